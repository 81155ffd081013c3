"""Orders in which ops wait for their readers where that frees more bytes than it holds.

The given order is the one in which the framework happened to record the step. An op whose outputs are larger than what
it lets go had better run just before its first reader. Ops are taken from the last to the first, so an op that waits
makes the ops that feed it wait, too. Random ops and those of which something must run once stay where they are: their
order is part of what they mean. Cost: quadratic in the number of ops, with small steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.graph.ir import Graph, OpId


def delayed(graph: Graph, *, outputs: bool, begin: Sequence[OpId] | None = None) -> tuple[OpId, ...]:
    """Return the ops in an order in which each waits for its first reader if that frees bytes in between.

    Args:
        graph: The graph.
        outputs: Whether ops whose outputs the step returns wait, too, for its end.
        begin: The order to begin with, a legal one with forward before backward; the given one by default.
    """
    begin = range(len(graph.ops)) if begin is None else begin
    forward, backward = begin[: graph.num_forward], begin[graph.num_forward :]
    return (
        *_delayed(graph, forward, graph.forward, outputs=outputs),
        *_delayed(graph, backward, graph.backward, outputs=outputs),
    )


def _delayed(graph: Graph, ops: Sequence[OpId], phase: range, *, outputs: bool) -> list[OpId]:
    # From the last to the first: what waits is put behind its first reader here.
    order: list[OpId] = []
    ends = graph.held.union(graph.handovers)
    for op in reversed(ops):
        if not _may_wait(graph, op, ends, outputs=outputs):
            order.append(op)
            continue
        place = _place_of_first_reader(graph, op, phase, order)
        order.insert(place if _frees(graph, op, phase, order[:place]) else len(order), op)
    return order[::-1]


def _may_wait(graph: Graph, op: OpId, ends: frozenset[int], *, outputs: bool) -> bool:
    fact = graph.ops[op]
    return not fact.keeps_place and (outputs or ends.isdisjoint(fact.outputs))


def _place_of_first_reader(graph: Graph, op: OpId, phase: range, order: list[OpId]) -> int:
    """Return the place behind the first of the op's readers in `order`, 0 if it has none in this phase."""
    readers = {reader for value in graph.ops[op].outputs for reader in graph.readers[value] if reader in phase}
    return max((order.index(reader) + 1 for reader in readers), default=0)


def _frees(graph: Graph, op: OpId, phase: range, later: list[OpId]) -> bool:
    """Whether `op` makes more bytes than what it reads and neither `later` nor the next phase does."""
    stays = frozenset(later)
    held = 0
    for value in dict.fromkeys(graph.ops[op].inputs):
        fact = graph.values[value]
        if fact.producer is None or value in graph.held:
            continue
        if not any(reader in stays or reader >= phase.stop for reader in graph.readers[value]):
            held += fact.bytes
    return sum(graph.values[value].bytes for value in graph.ops[op].outputs) > held
