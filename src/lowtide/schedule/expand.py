"""From a decision about values to a schedule."""

from __future__ import annotations

from collections.abc import Collection

from lowtide.errors import InvalidScheduleError
from lowtide.graph.ir import Graph, OpId, ValueId
from lowtide.schedule.steps import Schedule


def expand(graph: Graph, kept: Collection[ValueId], *, again: Collection[ValueId] = ()) -> Schedule:
    """Return the schedule that keeps `kept` for backward and recomputes everything else where it is read.

    Forward runs as given. Backward runs as given, and just before an op that reads a value which is not there, the
    value is recomputed from what is. A recomputed value stays until its last reader, unless it is in `again`: then it
    is recomputed again for each backward op that reads it. Outputs of the graph and values whose op is pinned are
    always kept.
    """
    available = {*graph.always_there, *kept}
    again = frozenset(again)
    backward: list[OpId] = []
    for op in graph.backward:
        steps = missing(graph, op, available)
        backward += steps
        for step in steps:
            available.update(graph.ops[step].outputs)
        if again:
            available.difference_update(
                value for step in steps[:-1] for value in graph.ops[step].outputs if value in again
            )
    return Schedule(tuple(graph.forward), tuple(backward))


def missing(graph: Graph, op: OpId, available: Collection[ValueId]) -> list[OpId]:
    """Return the ops to run so that `op` can run last, given the values in `available`, in an order that works."""
    if all(value in available for value in graph.reads[op]):
        return [op]
    order: list[OpId] = []
    done: set[OpId] = set()
    stack: list[tuple[OpId, bool]] = [(op, False)]
    while stack:
        current, ready = stack.pop()
        if ready:
            order.append(current)
            continue
        if current in done:
            continue
        done.add(current)
        stack.append((current, True))
        for value in reversed(graph.reads[current]):
            producer = graph.values[value].producer
            if value in available or producer is None or producer in done:
                continue
            if graph.ops[producer].pinned:
                raise InvalidScheduleError(
                    f"Value {graph.values[value].name!r} is needed by {graph.ops[op].name!r} but was dropped, and "
                    f"{graph.ops[producer].name!r} must not run again: {graph.ops[producer].pinned}."
                )
            stack.append((producer, False))
    return order
