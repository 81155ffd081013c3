"""Families of lower sets: all of them, or those made of one vertex and its ancestors, with their sizes as arrays."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from lowtide.errors import InvalidGraphError, PlannerRefusedError
from lowtide.plan.planners.kusumoto_lower_sets.dag import Dag, VertexSet

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

# GoogLeNet with both auxiliary classifiers, the largest graph of the paper, has 27,358.
MAX_LOWER_SETS = 50_000


@dataclass(frozen=True)
class Family:
    """Lower sets of one DAG, smaller ones first, so that every subset comes before its supersets.

    Attributes:
        dag: The DAG.
        sets: The lower sets; the first is empty and the last has every vertex.
        complete: Whether these are all lower sets there are.
    """

    dag: Dag
    sets: tuple[VertexSet, ...]
    complete: bool

    def __post_init__(self) -> None:
        """Check that the sets are sorted by size and begin and end as they must."""
        counts = [lower.bit_count() for lower in self.sets]
        if counts != sorted(counts) or not self.sets or self.sets[0] or self.sets[-1] != self.dag.everything:
            raise InvalidGraphError(
                "A family of lower sets must begin with the empty set, end with the set of all vertices, and have "
                "smaller sets before larger ones; otherwise steps from a set to its supersets would be missed."
            )

    def __len__(self) -> int:
        return len(self.sets)

    @cached_property
    def member(self) -> Bools:
        """Whether a vertex (row) is in a set (column)."""
        width = (len(self.dag) + 7) // 8
        packed = b"".join(lower.to_bytes(width, "little") for lower in self.sets)
        rows = np.frombuffer(packed, dtype=np.uint8).reshape(len(self.sets), width)
        bits = np.unpackbits(rows, axis=1, count=len(self.dag), bitorder="little")
        return np.ascontiguousarray(bits.T).view(np.bool_)

    @cached_property
    def boundary(self) -> Bools:
        """Whether a vertex (row) is in a set (column) and is read from outside it."""
        found = np.zeros_like(self.member)
        for vertex, after in enumerate(self.dag.successors):
            for other in after:
                found[vertex] |= ~self.member[other]
            found[vertex] &= self.member[vertex]
        return found

    @cached_property
    def next(self) -> Bools:
        """Whether a vertex (row) is outside a set (column) with all its predecessors inside it."""
        found = ~self.member
        for vertex, before in enumerate(self.dag.predecessors):
            for other in before:
                found[vertex] &= self.member[other]
        return found

    @cached_property
    def sizes(self) -> Ints:
        """Bytes of each set."""
        return self._total(self.member, self.dag.bytes)

    @cached_property
    def times(self) -> Ints:
        """Ticks of each set."""
        return self._total(self.member, self.dag.ticks)

    @cached_property
    def later_bytes(self) -> Ints:
        """What backward through each set still holds from outside it.

        These are the gradients of the vertices that read the set, and the values that those vertices read.
        """
        reading = ~self.member
        for vertex, before in enumerate(self.dag.predecessors):
            inside = np.zeros(len(self), dtype=np.bool_)
            for other in before:
                inside |= self.member[other]
            reading[vertex] &= inside
        read = np.zeros_like(reading)
        for vertex, after in enumerate(self.dag.successors):
            for other in after:
                read[vertex] |= reading[other]
            read[vertex] &= ~self.member[vertex]
        return self._total(reading, self.dag.bytes) + self._total(read, self.dag.bytes)

    @cached_property
    def counts(self) -> Ints:
        """Number of vertices of each set."""
        return np.array([lower.bit_count() for lower in self.sets], dtype=np.int64)

    @cached_property
    def smaller(self) -> Ints:
        """For each set, the number of sets with fewer vertices."""
        return np.searchsorted(self.counts, self.counts).astype(np.int64)

    def _total(self, rows: Bools, weights: tuple[int, ...]) -> Ints:
        total = np.zeros(len(self), dtype=np.int64)
        for row, weight in zip(rows, weights, strict=True):
            total += row * np.int64(weight)
        return total


def all_lower_sets(dag: Dag, *, limit: int = MAX_LOWER_SETS) -> Family:
    """Return every lower set of `dag`; raise `PlannerRefusedError` when there are more than `limit`."""
    sets: list[VertexSet] = []
    # The sets of one size, each with the vertices that can be added to it.
    level = {0: _sources(dag)}
    while level:
        sets += sorted(level)
        if len(sets) > limit:
            raise PlannerRefusedError(too_many(len(sets), limit))
        following: dict[VertexSet, VertexSet] = {}
        for lower, addable in level.items():
            rest = addable
            while rest:
                vertex = rest & -rest
                rest ^= vertex
                larger = lower | vertex
                if larger not in following:
                    following[larger] = (addable ^ vertex) | _freed(dag, larger, vertex.bit_length() - 1)
        level = following
    return Family(dag, tuple(sets), complete=True)


def _sources(dag: Dag) -> VertexSet:
    """Return the vertices without predecessors."""
    return sum(1 << vertex for vertex, before in enumerate(dag.predecessors) if not before)


def _freed(dag: Dag, lower: VertexSet, vertex: int) -> VertexSet:
    """Return the vertices that can be added to `lower` because `vertex` is in it."""
    found = 0
    for other in dag.successors[vertex]:
        if not dag.before[other] & ~lower:
            found |= 1 << other
    return found


def too_many(found: int, limit: int) -> str:
    """Return the reason for refusing a DAG of which `found` lower sets are known."""
    return f"the forward DAG has at least {found:,} lower sets and {limit:,} are allowed"


def pruned_lower_sets(dag: Dag) -> Family:
    """Return the lower sets that are a vertex with all its ancestors, the empty set, and the set of all vertices."""
    with_ancestors: list[VertexSet] = []
    for vertex, before in enumerate(dag.predecessors):
        lower = 1 << vertex
        for other in before:
            lower |= with_ancestors[other]
        with_ancestors.append(lower)
    sets = sorted({0, dag.everything, *with_ancestors}, key=lambda lower: (lower.bit_count(), lower))
    return Family(dag, tuple(sets), complete=False)
