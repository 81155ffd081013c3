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

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lowtide.plan.planners.kusumoto_lower_sets.connect import Paths, Shape
from lowtide.plan.planners.kusumoto_lower_sets.dag import as_set, members
from lowtide.plan.planners.kusumoto_lower_sets.family import Bools, Family, Ints

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
