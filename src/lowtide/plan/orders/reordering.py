"""Other orders of first runs: which are worth a trial, a problem in one, and schedules without redundant runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from lowtide.graph.ir import Graph, OpId, ValueId
from lowtide.plan.core.problem import Problem
from lowtide.schedule.steps import Schedule


@dataclass(frozen=True, slots=True)
class ReorderedProblem:
    """A problem whose ops are in another order.

    Attributes:
        problem: The problem with its ops in that order.
        order: For every op of that problem, the op it is of the problem as given.
    """

    problem: Problem
    order: tuple[OpId, ...]

    @staticmethod
    def of(problem: Problem, order: Sequence[OpId]) -> ReorderedProblem:
        """Return `problem` with its ops in `order`, which must be legal."""
        graph, costs = problem.graph, problem.costs
        place = {op: new for new, op in enumerate(order)}
        values = tuple(
            value if value.producer is None else replace(value, producer=place[value.producer])
            for value in graph.values
        )
        seen = Problem(
            replace(graph, ops=tuple(graph.ops[op] for op in order), values=values),
            replace(
                costs,
                seconds=tuple(costs.seconds[op] for op in order),
                workspace_bytes=tuple(costs.workspace_bytes[op] for op in order),
            ),
            problem.budget_bytes,
        )
        return ReorderedProblem(seen, tuple(order))

    def to_given(self, schedule: Schedule) -> Schedule:
        """Return what a schedule of the reordered problem is for the problem as given."""
        return _translated(schedule, self.order)

    def from_given(self, schedule: Schedule) -> Schedule:
        """Return what a schedule of the problem as given is for the reordered one."""
        return _translated(schedule, self._places())

    def ops_from_given(self, ops: Iterable[OpId]) -> frozenset[OpId]:
        """Return what ops of the problem as given are in the reordered one."""
        places = self._places()
        return frozenset(places[op] for op in ops)

    def ops_to_given(self, ops: Iterable[OpId]) -> frozenset[OpId]:
        """Return what ops of the reordered problem are in the problem as given."""
        return frozenset(self.order[op] for op in ops)

    def _places(self) -> list[OpId]:
        places = [0] * len(self.order)
        for place, op in enumerate(self.order):
            places[op] = place
        return places


def _translated(schedule: Schedule, names: Sequence[OpId]) -> Schedule:
    return Schedule(tuple(names[op] for op in schedule.forward), tuple(names[op] for op in schedule.backward))


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


def without_redundant_runs(graph: Graph, schedule: Schedule) -> Schedule:
    """Return a legal `schedule` without the runs that another run of the same op in the same phase makes redundant."""
    wanted: set[ValueId] = set()
    # What backward reads first is decided before forward is looked at.
    backward = _useful(graph, schedule.backward, wanted)
    return Schedule(_useful(graph, schedule.forward, wanted), backward)


def _useful(graph: Graph, steps: Sequence[OpId], wanted: set[ValueId]) -> tuple[OpId, ...]:
    """Return the steps of one phase that are of use, given the values that later ones want, and add what they want."""
    kept: list[OpId] = []
    runs_later: set[OpId] = set()
    for op in reversed(steps):
        fact = graph.ops[op]
        if not fact.keeps_place and op in runs_later and wanted.isdisjoint(fact.outputs):
            continue
        kept.append(op)
        runs_later.add(op)
        wanted.difference_update(graph.rewrites[op])
        wanted.update(fact.inputs)
    return tuple(reversed(kept))


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
