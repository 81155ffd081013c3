"""The DAG that the program over lower sets works on: sizes and whole ticks of time, nothing else.

A set of vertices is a Python `int` with one bit per vertex.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from lowtide.errors import InvalidGraphError

VertexSet = int

# Four times this stays below the mark for "no such state" in the program's tables.
MAX_BYTES = 1 << 58


@dataclass(frozen=True)
class Dag:
    """Values of a forward pass; vertices are numbered so that every edge goes to a higher number.

    Attributes:
        bytes: Size of each vertex's value; its gradient has the same size.
        ticks: Time to compute each vertex, in whole ticks.
        predecessors: For every vertex, the vertices that are read to compute it, ascending.
    """

    bytes: tuple[int, ...]
    ticks: tuple[int, ...]
    predecessors: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        """Check lengths, signs and the order of the vertices."""
        if not len(self.bytes) == len(self.ticks) == len(self.predecessors):
            raise InvalidGraphError(
                f"The DAG has {len(self.bytes)} sizes, {len(self.ticks)} times and {len(self.predecessors)} lists of "
                "predecessors; there must be one of each for every vertex."
            )
        if sum(self.bytes) > MAX_BYTES:
            raise InvalidGraphError(f"The DAG has {sum(self.bytes)} bytes; at most {MAX_BYTES} can be reckoned with.")
        for vertex, before in enumerate(self.predecessors):
            if self.bytes[vertex] < 0 or self.ticks[vertex] < 0:
                raise InvalidGraphError(
                    f"Vertex {vertex} has {self.bytes[vertex]} bytes and {self.ticks[vertex]} ticks; both must be at "
                    "least 0."
                )
            if list(before) != sorted(set(before)) or any(not 0 <= other < vertex for other in before):
                raise InvalidGraphError(
                    f"Vertex {vertex} has the predecessors {before}; they must be ascending and lie in 0 to "
                    f"{vertex - 1}."
                )

    def __len__(self) -> int:
        return len(self.bytes)

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """For every vertex, the vertices that read it, ascending."""
        found: list[list[int]] = [[] for _ in self.bytes]
        for vertex, before in enumerate(self.predecessors):
            for other in before:
                found[other].append(vertex)
        return tuple(tuple(after) for after in found)

    @cached_property
    def before(self) -> tuple[VertexSet, ...]:
        """For every vertex, its predecessors as a set."""
        return tuple(as_set(vertices) for vertices in self.predecessors)

    @cached_property
    def after(self) -> tuple[VertexSet, ...]:
        """For every vertex, its successors as a set."""
        return tuple(as_set(vertices) for vertices in self.successors)

    @property
    def everything(self) -> VertexSet:
        """The set of all vertices."""
        return (1 << len(self)) - 1

    @property
    def num_edges(self) -> int:
        """Number of edges."""
        return sum(len(before) for before in self.predecessors)

    def size(self, vertices: VertexSet) -> int:
        """Return the bytes of `vertices`."""
        return sum(self.bytes[vertex] for vertex in members(vertices))

    def time(self, vertices: VertexSet) -> int:
        """Return the ticks of `vertices`."""
        return sum(self.ticks[vertex] for vertex in members(vertices))

    def boundary(self, lower: VertexSet) -> VertexSet:
        """Return the vertices of `lower` that are read from outside it."""
        return as_set([vertex for vertex in members(lower) if self.after[vertex] & ~lower])

    def heads(self, vertices: VertexSet) -> VertexSet:
        """Return the heads of all edges that leave a vertex of `vertices`."""
        found = 0
        for vertex in members(vertices):
            found |= self.after[vertex]
        return found

    def tails(self, vertices: VertexSet) -> VertexSet:
        """Return the tails of all edges that enter a vertex of `vertices`."""
        found = 0
        for vertex in members(vertices):
            found |= self.before[vertex]
        return found

    def is_lower(self, vertices: VertexSet) -> bool:
        """Whether no edge enters `vertices` from outside."""
        return not self.tails(vertices) & ~vertices


def as_set(vertices: Sequence[int]) -> VertexSet:
    """Return `vertices` as a set."""
    found = 0
    for vertex in vertices:
        found |= 1 << vertex
    return found


def members(vertices: VertexSet) -> Iterator[int]:
    """Yield the vertices of a set in ascending order."""
    while vertices:
        lowest = vertices & -vertices
        yield lowest.bit_length() - 1
        vertices ^= lowest
