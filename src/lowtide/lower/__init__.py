"""From a program and a schedule to the forward and backward graphs that run."""
