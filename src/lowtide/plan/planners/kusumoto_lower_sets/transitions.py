"""Steps from one lower set to a larger one: the moves of the dynamic program.

A step from L to L' computes the block L' - L and adds the boundary of L', as far as it lies in the block, to the cache.
Between all lower sets there are up to n^2 / 2 steps, hundreds of millions for the larger networks, but few are needed:

If there is a lower set K between L and L' such that no vertex of the block outside the boundary of L' is in the
boundary of K, then the two steps L, K, L' cache the same vertices as the one step L, L', and neither needs more
memory. So L, L' can be left out. The argument, with M for bytes, c(X) for what backward through X still holds from
outside X, and m for the bytes cached at L:

- the second step starts with at most m + M(K - L) cached bytes and computes L' - K, so its peak is at most that of
  L, L', which counts K - L twice;
- the first step's peak is m + 2 M(K - L) + c(K). Each reader of K outside K is in L' - K or reads L' from outside,
  and what it reads outside K is in L' - K, or is held for L' too. So c(K) is at most 2 M(L' - K) + c(L').

What is left are the irreducible steps: 4.1 million instead of 121 million for GoogLeNet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lowtide.plan.planners.kusumoto_lower_sets.dag import Dag, VertexSet, as_set, members
from lowtide.plan.planners.kusumoto_lower_sets.family import Bools, Family, Ints

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
            separate = []
            for group in groups:
                if group & ends:
                    ends |= group
                else:
                    separate.append(group)
            groups = [*separate, ends]
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


# Up to this many bits, a table with an entry for every number is quicker than sorting the numbers that occur.
_TABLE_BITS = 16


@dataclass(frozen=True)
class Transitions:
    """Steps between the sets of a family, grouped by the set they lead to.

    Attributes:
        family: The family.
        start: The steps to set `k` are `start[k]` to `start[k + 1] - 1`.
        source: The set each step comes from.
        kept_bytes: Bytes that each step adds to the cache.
        kept_ticks: Ticks of what each step adds to the cache. The steps to one set are sorted by this, then by bytes.
    """

    family: Family
    start: Ints
    source: Ints
    kept_bytes: Ints
    kept_ticks: Ints

    def __len__(self) -> int:
        return len(self.source)

    @cached_property
    def taken_bytes(self) -> Ints:
        """What each step needs besides the cache: twice its block, and what backward holds from later blocks."""
        family = self.family
        target = np.repeat(np.arange(len(family)), np.diff(self.start))
        return 2 * (family.sizes[target] - family.sizes[self.source]) + family.later_bytes[target]

    def into(self, target: int) -> slice:
        """Return where the steps to `target` are."""
        return slice(int(self.start[target]), int(self.start[target + 1]))


def transitions_of(family: Family) -> Transitions:
    """Return the steps that the dynamic program needs: irreducible ones if the family is complete, otherwise all.

    Every set has a step to the set of all vertices, for strategies that keep their last block.
    """
    paths = Paths.of(family.dag)
    sizes = np.array(family.dag.bytes, dtype=np.int64)
    ticks = np.array(family.dag.ticks, dtype=np.int64)
    start, parts = [0], []
    for target in range(len(family)):
        sources = _subsets(family, target)
        border = np.flatnonzero(family.boundary[:, target])
        if family.complete and 0 < target < len(family) - 1:
            sources = _irreducible(family, paths, target, sources)
        kept_bytes = np.full(len(sources), sizes[border].sum(), dtype=np.int64)
        kept_ticks = np.full(len(sources), ticks[border].sum(), dtype=np.int64)
        for vertex in border:
            inside = family.member[vertex].take(sources)
            kept_bytes -= inside * sizes[vertex]
            kept_ticks -= inside * ticks[vertex]
        order = np.lexsort((kept_bytes, kept_ticks))
        parts.append((sources[order], kept_bytes[order], kept_ticks[order]))
        start.append(start[-1] + len(sources))
    source, kept_bytes, kept_ticks = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Transitions(family, np.array(start, dtype=np.int64), source, kept_bytes, kept_ticks)


def _subsets(family: Family, target: int) -> Ints:
    """Return the proper subsets of `target` in the family: those that have none of the vertices next to it."""
    found = np.ones(int(family.smaller[target]), dtype=np.bool_)
    for vertex in np.flatnonzero(family.next[:, target]):
        found &= ~family.member[vertex, : len(found)]
    return np.flatnonzero(found)


def _irreducible(family: Family, paths: Paths, target: int, sources: Ints) -> Ints:
    """Return those `sources` from which the step to `target` is irreducible."""
    lower = family.sets[target]
    ends = np.flatnonzero(family.boundary[:, target]).tolist()
    ends += [vertex for vertex in paths.sinks if lower >> vertex & 1]
    shape = Shape.of(paths, lower, ends)
    if len(shape.ends) == 1:
        return sources
    # Most sources leave out vertices of several groups: find those that do not before looking at classes.
    groups = [list(members(group)) for group in shape.groups]
    left_out = [_missing(family, sources, [top for index in group for top in shape.tops[index]]) for group in groups]
    alone = np.add.reduce(left_out, dtype=np.int16) == 1
    found = [sources[:0]]
    for group, missing in zip(groups, left_out, strict=True):
        chosen = sources[alone & missing]
        if len(group) > 1 and len(chosen):
            present = np.array([_missing(family, chosen, shape.tops[index]) for index in group])
            chosen = chosen[_hold(shape, group, present)]
        found.append(chosen)
    return np.concatenate(found)


def _missing(family: Family, sources: Ints, vertices: Sequence[int]) -> Bools:
    """Return which of `sources` do not have all of `vertices`."""
    inside: Bools = family.member[vertices[0]].take(sources)
    for vertex in vertices[1:]:
        inside &= family.member[vertex].take(sources)
    return np.logical_not(inside)


def _hold(shape: Shape, classes: list[int], present: Bools) -> Bools:
    """Return which columns of `present`, with one row for each of `classes`, stand for an irreducible block."""
    codes, first = _distinct(present)
    answer = np.zeros(len(first), dtype=np.bool_)
    for code in np.flatnonzero(first >= 0).tolist():
        chosen = [index for index, there in zip(classes, present[:, first[code]].tolist(), strict=True) if there]
        answer[code] = len(chosen) == 1 or shape.is_irreducible(as_set(chosen))
    return answer[codes]


def _distinct(columns: Bools) -> tuple[Ints, Ints]:
    """Return a code for every column, equal for equal ones, and for every code a column that has it, or -1."""
    packed = np.packbits(columns, axis=0, bitorder="little")
    if len(columns) > _TABLE_BITS:
        _, first, codes = np.unique(packed, axis=1, return_index=True, return_inverse=True)
        return codes.reshape(-1), first
    codes = packed[0].astype(np.int64)
    for row in packed[1:]:
        codes |= row.astype(np.int64) << 8
    first = np.full(1 << len(columns), -1, dtype=np.int64)
    first[codes] = np.arange(len(codes))
    return codes, first
