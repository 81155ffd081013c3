"""Dividing a graph of tensors into segments that are recomputed whole (Feng and Huang 2021).

`multigraph` is the graph of tensors, made of a training graph; `tree` divides it; `chain` cuts a row under a threshold;
`terms` searches the thresholds; `family` makes the schedules of many thresholds.
"""
