"""Views of a training graph: its forward DAG, and the chain of its cut points."""

from __future__ import annotations

from lowtide.graph.ir import Graph, OpId, ValueId


def values_for_backward(graph: Graph) -> tuple[ValueId, ...]:
    """Return the values that forward ops produce and backward ops read, in the order in which they are produced."""
    return tuple(
        value
        for op in graph.forward
        for value in graph.ops[op].outputs
        if any(not graph.is_forward(reader) for reader in graph.readers[value])
    )


def cut_points(graph: Graph) -> tuple[tuple[OpId, ValueId], ...]:
    """Return the places in forward where one value separates all before from all after.

    Each is an op and a value: when the op has run, that value is the only one produced so far that a later forward op
    reads. Inputs of the graph do not count, for they are always there. A value that is the only one after several ops
    is listed once, with the first of them.
    """
    last_reader = [_last_forward_reader(graph, value) for value in range(len(graph.values))]
    crossing: set[ValueId] = set()
    cuts: list[tuple[OpId, ValueId]] = []
    for op in graph.forward:
        crossing.difference_update([value for value in graph.ops[op].inputs if last_reader[value] == op])
        crossing.update(value for value in graph.ops[op].outputs if last_reader[value] > op)
        if len(crossing) == 1:
            (value,) = crossing
            if not cuts or cuts[-1][1] != value:
                cuts.append((op, value))
    return tuple(cuts)


def _last_forward_reader(graph: Graph, value: ValueId) -> OpId:
    return max((reader for reader in graph.readers[value] if graph.is_forward(reader)), default=-1)
