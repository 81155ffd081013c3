"""A training step as a sequence of blocks: which plan each of them runs, so that the whole step fits."""
