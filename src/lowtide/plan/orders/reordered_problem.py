"""A problem whose ops are given in another order, and the way there and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lowtide.graph.ir import OpId
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
