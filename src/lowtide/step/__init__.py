"""The whole training step as a sequence of blocks: one variant of each is chosen so that the step fits. No torch."""
