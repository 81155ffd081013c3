"""An order in which backward lets its own values go as early as it can.

Values of forward may be dropped and made again when they are needed, so they do not count; gradients that wait for
their readers do. Of all ops of backward that could run next, take the one after which least of them is alive: gradients
of weights before the next gradient of an activation, and one of two branches to its end before the other begins. Random
ops and those of which something must run once keep their order among each other. Cost: linear in the number of ops and
values, times the number of ops that could run at the same time.
"""

from __future__ import annotations

from itertools import pairwise

from lowtide.graph.ir import Graph, OpId


def releasing(graph: Graph, *, last: bool = False) -> tuple[OpId, ...]:
    """Return the ops with forward in the given order and backward in this one.

    Args:
        graph: The graph.
        last: Whether of ops that are equally good the last one in the given order is taken, not the first.
    """
    phase = graph.backward
    missing = {
        op: {p for v in graph.ops[op].inputs if (p := graph.values[v].producer) is not None and p in phase}
        for op in phase
    }
    fixed = [op for op in phase if graph.ops[op].keeps_place]
    for before, op in pairwise(fixed):
        missing[op].add(before)
    waiting: dict[OpId, list[OpId]] = {}
    for op, needed in missing.items():
        for other in needed:
            waiting.setdefault(other, []).append(op)
    left = {v: sum(reader in phase for reader in graph.readers[v]) for op in phase for v in graph.ops[op].outputs}
    ready = sorted(op for op, needed in missing.items() if not needed)
    order: list[OpId] = []
    while ready:
        op = min(ready, key=lambda op: (_growth(graph, op, left), -op if last else op))
        ready.remove(op)
        order.append(op)
        for value in set(graph.ops[op].inputs) & left.keys():
            left[value] -= 1
        for later in waiting.get(op, ()):
            missing[later].discard(op)
            if not missing[later]:
                ready.append(later)
    return (*graph.forward, *order)


def _growth(graph: Graph, op: OpId, left: dict[int, int]) -> int:
    """Return by how many bytes the values of backward that are alive grow if `op` runs next."""
    made = sum(graph.values[value].bytes for value in graph.ops[op].outputs if left[value] or value in graph.held)
    last = (value for value in set(graph.ops[op].inputs) & left.keys() if left[value] == 1 and value not in graph.held)
    return made - sum(graph.values[value].bytes for value in last)
