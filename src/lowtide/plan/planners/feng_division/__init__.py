"""Dividing a graph of tensors into segments that are recomputed whole (Feng and Huang 2021).

`multigraph` is the noun; `tree` divides it, with `segments` for the parts that are neither in a row nor side by side;
`chain` cuts a row under a threshold; `terms` searches the thresholds; `solve` puts them together; `view` makes the
multigraph of a training graph, and `family` the schedules of many thresholds.
"""
