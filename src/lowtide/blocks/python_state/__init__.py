"""Python state of blocks: read, compared, put back, or refused."""
