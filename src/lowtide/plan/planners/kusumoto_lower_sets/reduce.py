"""From a forward pass to the DAG of the program: whole ticks, and no vertices that could not matter.

1. Small values that depend on nothing but inputs and one another (masks, positions, counters of batches) are left out
   and always kept, as inputs are.
2. A vertex that is small in bytes and in time joins its only reader, or the only vertex it reads.
3. If more vertices are left than allowed, neighbours join in the same way, the smallest first.

Small is at most 1/2000 of all bytes, and of all seconds; what is left out has at most 1/100 of the bytes together.
A joined vertex is kept or recomputed as a whole.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from lowtide.graph.analysis import ForwardDag
from lowtide.graph.ir import OpId, ValueId
from lowtide.plan.planners.kusumoto_lower_sets.dag import Dag, VertexSet, members

_SMALL = 1 / 2000
_ALL_GIVEN = 1 / 100


@dataclass(frozen=True)
class Reduced:
    """The DAG of the program, and what its vertices stand for.

    Attributes:
        forward: The forward pass it was made from.
        dag: The DAG.
        groups: For every vertex of the DAG, the ops it stands for.
        given: Ops whose values are always kept.
    """

    forward: ForwardDag
    dag: Dag
    groups: tuple[tuple[OpId, ...], ...]
    given: tuple[OpId, ...]

    def kept(self, vertices: VertexSet) -> frozenset[ValueId]:
        """Return the values to keep if `vertices` of the DAG are kept."""
        ops = [op for vertex in members(vertices) for op in self.groups[vertex]]
        return frozenset(self.forward.kept([*ops, *self.given]))


def reduced(forward: ForwardDag, *, ticks: int, max_vertices: int) -> Reduced:
    """Return the DAG of the program for `forward`.

    Args:
        forward: The forward pass.
        ticks: About how many ticks all ops take together; each op's time is rounded to whole ticks.
        max_vertices: Largest number of vertices; more are left only if too few can join.
    """
    merger = _Merger(forward)
    merger.join_small()
    merger.join_until(max_vertices)
    groups, predecessors = merger.quotient()
    tick = sum(forward.seconds) / ticks
    dag = Dag(
        bytes=tuple(sum(forward.bytes[op] for op in group) for group in groups),
        ticks=tuple(round(sum(forward.seconds[op] for op in group) / tick) if tick else 0 for group in groups),
        predecessors=predecessors,
    )
    return Reduced(forward, dag, groups, tuple(sorted(merger.given)))


class _Merger:
    """The quotient of a forward DAG, in which neighbours join one pair at a time."""

    def __init__(self, forward: ForwardDag) -> None:
        self._total_bytes, self._total_seconds = sum(forward.bytes), sum(forward.seconds)
        self._bytes, self._seconds = list(forward.bytes), list(forward.seconds)
        self.given = self._find_given(forward)
        left = [vertex for vertex in range(len(forward)) if vertex not in self.given]
        self._groups = {vertex: [vertex] for vertex in left}
        self._before = {vertex: set(forward.predecessors[vertex]) - self.given for vertex in left}
        self._after = {vertex: set(forward.successors[vertex]) for vertex in left}

    def _find_given(self, forward: ForwardDag) -> set[OpId]:
        given: set[OpId] = set()
        room = _ALL_GIVEN * self._total_bytes
        for vertex, before in enumerate(forward.predecessors):
            size = forward.bytes[vertex]
            if size <= min(room, _SMALL * self._total_bytes) and given.issuperset(before):
                given.add(vertex)
                room -= size
        return given

    def _weight(self, vertex: int) -> float:
        """Return the larger of the vertex's shares of all bytes and of all seconds."""
        return max(
            self._bytes[vertex] / self._total_bytes if self._total_bytes else 0.0,
            self._seconds[vertex] / self._total_seconds if self._total_seconds else 0.0,
        )

    def _neighbour(self, vertex: int) -> int | None:
        """Return a vertex that `vertex` can join without closing a cycle, or None."""
        if len(self._after[vertex]) == 1:
            return next(iter(self._after[vertex]))
        if len(self._before[vertex]) == 1:
            return next(iter(self._before[vertex]))
        return None

    def join_small(self) -> None:
        """Let every small vertex join a neighbour."""
        for vertex in sorted(self._groups):
            other = self._neighbour(vertex)
            if other is not None and self._weight(vertex) <= _SMALL:
                self._join(vertex, other)

    def join_until(self, count: int) -> None:
        """Let the smallest vertices join until `count` are left, or none can."""
        queue = [(self._weight(vertex), vertex) for vertex in self._groups]
        heapq.heapify(queue)
        while len(self._groups) > count and queue:
            weight, vertex = heapq.heappop(queue)
            if vertex not in self._groups or weight < self._weight(vertex):
                continue
            other = self._neighbour(vertex)
            if other is not None:
                self._join(vertex, other)
                heapq.heappush(queue, (self._weight(other), other))

    def _join(self, vertex: int, other: int) -> None:
        """Make `vertex` a part of `other`."""
        self._groups[other] += self._groups.pop(vertex)
        self._bytes[other] += self._bytes[vertex]
        self._seconds[other] += self._seconds[vertex]
        before, after = self._before.pop(vertex) - {other}, self._after.pop(vertex) - {other}
        for earlier in before:
            self._after[earlier].remove(vertex)
            self._after[earlier].add(other)
        for later in after:
            self._before[later].remove(vertex)
            self._before[later].add(other)
        self._before[other] = (self._before[other] - {vertex}) | before
        self._after[other] = (self._after[other] - {vertex}) | after

    def quotient(self) -> tuple[tuple[tuple[OpId, ...], ...], tuple[tuple[int, ...], ...]]:
        """Return the groups in an order in which every edge goes forward, and the predecessors of each."""
        waiting = {vertex: len(before) for vertex, before in self._before.items()}
        ready = [(min(self._groups[vertex]), vertex) for vertex, count in waiting.items() if not count]
        heapq.heapify(ready)
        place: dict[int, int] = {}
        while ready:
            _, vertex = heapq.heappop(ready)
            place[vertex] = len(place)
            for later in self._after[vertex]:
                waiting[later] -= 1
                if not waiting[later]:
                    heapq.heappush(ready, (min(self._groups[later]), later))
        groups = tuple(tuple(sorted(self._groups[vertex])) for vertex in place)
        return groups, tuple(tuple(sorted(place[other] for other in self._before[vertex])) for vertex in place)
