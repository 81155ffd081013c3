"""Python state of blocks (attributes, lists, closures, random generators): read, compared and restored."""
