"""Which blocks below a lower set hold together, so that they cannot be computed as two blocks at the same cost.

Take a lower set X with the boundary D, and the block X - L of a smaller one L. A lower set K between them adds nothing
to the cache if every vertex of K - L outside D has all its readers in K. So a block holds together along every edge
whose tail is not in D, in both directions; and along an edge whose tail is in D, the head pulls the tail with it. The
block is irreducible if every vertex pulls all others.

Follow edges from a vertex outside D until D, or a vertex that nobody reads, is reached: the ends of these walks say
what the vertex holds together, and vertices with the same ends form a class. Which classes have a vertex in the block
is all that matters. If one has, then so has its top: a vertex without a successor in the class.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from lowtide.plan.planners.kusumoto_lower_sets.dag import Dag, VertexSet, members

# A set of classes, one bit each.
ClassSet = int


@dataclass(frozen=True)
class Paths:
    """The DAG's vertices without branches, skipped: for every vertex, the way to the next vertex with 0 or 2 readers.

    Attributes:
        dag: The DAG.
        path: For every vertex, itself and the vertices after it up to the first that does not have exactly one reader.
        last: For every vertex, that first vertex.
        branching: The vertices with several readers, descending.
        sinks: The vertices without readers.
    """

    dag: Dag
    path: tuple[VertexSet, ...]
    last: tuple[int, ...]
    branching: tuple[int, ...]
    sinks: tuple[int, ...]

    @staticmethod
    def of(dag: Dag) -> Paths:
        """Return the paths of `dag`."""
        path, last = [0] * len(dag), [0] * len(dag)
        for vertex in reversed(range(len(dag))):
            after = dag.successors[vertex]
            path[vertex], last[vertex] = 1 << vertex, vertex
            if len(after) == 1:
                path[vertex] |= path[after[0]]
                last[vertex] = last[after[0]]
        branching = tuple(vertex for vertex in reversed(range(len(dag))) if len(dag.successors[vertex]) > 1)
        sinks = tuple(vertex for vertex in range(len(dag)) if not dag.successors[vertex])
        return Paths(dag, tuple(path), tuple(last), branching, sinks)

    def stop(self, vertex: int, lower: VertexSet) -> int:
        """Return the last vertex of the path from `vertex` that is in `lower`."""
        inside = self.path[vertex] & lower
        return self.last[vertex] if inside == self.path[vertex] else inside.bit_length() - 1


@dataclass(frozen=True)
class Shape:
    """The classes of a lower set.

    Attributes:
        ends: For every class, the ends that its vertices lead to.
        tops: For every class, its vertices without a successor in the class.
        pulls: Pairs of an end in the boundary, and the ends of a successor of it in the set.
    """

    ends: tuple[VertexSet, ...]
    tops: tuple[tuple[int, ...], ...]
    pulls: tuple[tuple[VertexSet, VertexSet], ...]

    @staticmethod
    def of(paths: Paths, lower: VertexSet, ends: Iterable[int]) -> Shape:
        """Return the classes of `lower`, of which `ends` are the boundary and the vertices that nobody reads."""
        dag = paths.dag
        found = {vertex: 1 << vertex for vertex in ends}
        tops = {mark: [vertex] for vertex, mark in found.items()}
        pulls: list[tuple[VertexSet, VertexSet]] = []
        for vertex in paths.branching:
            if not lower >> vertex & 1:
                continue
            if vertex in found:
                inside = [other for other in dag.successors[vertex] if lower >> other & 1]
                pulls += [(found[vertex], found[paths.stop(other, lower)]) for other in inside]
                continue
            after = [found[paths.stop(other, lower)] for other in dag.successors[vertex]]
            mark = 0
            for other in after:
                mark |= other
            found[vertex] = mark
            if mark not in after:
                tops.setdefault(mark, []).append(vertex)
        return Shape(tuple(tops), tuple(tuple(vertices) for vertices in tops.values()), tuple(pulls))

    @cached_property
    def groups(self) -> tuple[ClassSet, ...]:
        """The classes that can be in one irreducible block, as sets of classes that do not overlap."""
        groups = self._joined((1 << len(self.ends)) - 1)
        pulled = [self._pulled(group, groups) for group in groups]
        mutual = {
            sum(other for other, back in zip(groups, pulled, strict=True) if other & mine and group & back)
            for group, mine in zip(groups, pulled, strict=True)
        }
        return tuple(
            sum(1 << index for index, ends in enumerate(self.ends) if not ends & ~group) for group in sorted(mutual)
        )

    def is_irreducible(self, present: ClassSet) -> bool:
        """Whether a block is irreducible that has vertices of the classes `present` and of no other."""
        groups = self._joined(present)
        if len(groups) == 1 or not self.pulls:
            return len(groups) == 1
        return all(self._pulled(group, groups) == sum(groups) for group in groups)

    def _joined(self, present: ClassSet) -> list[VertexSet]:
        """Return the ends of the classes `present`, joined where classes share one."""
        groups: list[VertexSet] = []
        for index in members(present):
            ends = self.ends[index]
            apart = []
            for group in groups:
                if group & ends:
                    ends |= group
                else:
                    apart.append(group)
            groups = [*apart, ends]
        return groups

    def _pulled(self, group: VertexSet, groups: list[VertexSet]) -> VertexSet:
        """Return the ends of those of `groups` that come with `group`."""
        pulled, before = group, 0
        while before != pulled:
            before = pulled
            for tail, heads in self.pulls:
                if heads & pulled and not tail & pulled:
                    pulled |= next((other for other in groups if other & tail), 0)
        return pulled
