"""Proved lower bounds: on the overhead of every schedule of a problem, and on the least peak."""
