"""The largest closed sets of a graph that is neither splittable nor branched.

They share no edge and cover all of them. A closed set with entry i and exit j lies, but for j, among the vertices that
i dominates: all paths to them pass i. Without i, and with directions forgotten, j is all that ties it to the rest. So
for every i one depth-first search of what i dominates, starting from the rest, finds each such j as an articulation
point; the outermost ones give the largest sets. No pair of vertices is ever tried.

Entries are tried in topological order, and what lies inside a set that was found is skipped. The cost is the number of
edges times the depth of the dominator tree of the vertices that remain, which is small: a vertex that dominates many
others, all of which are tied to the rest in more than one place, is rare.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Edge(NamedTuple):
    """An edge with its id."""

    number: int
    tail: int
    head: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a graph with one entry and one exit: its vertices in topological order, and its edges."""

    order: list[int]
    edges: list[Edge]


def largest_segments(piece: Piece) -> tuple[list[Piece], list[int]]:
    """Return the largest closed sets of `piece` other than itself, and the vertices between them, ends left out."""
    search = _Search(piece)
    for entry in range(len(piece.order) - 1):
        if search.owner[entry] is None:
            search.enter(entry)
    return search.pieces(), search.remaining()


class _Search:
    """Works on places in the topological order instead of vertices.

    Attributes:
        owner: For every place, entry and exit of the set that it lies inside of, or None.
    """

    def __init__(self, piece: Piece) -> None:
        self.piece = piece
        self.place = {vertex: k for k, vertex in enumerate(piece.order)}
        self.ends = [(self.place[edge.tail], self.place[edge.head]) for edge in piece.edges]
        size = len(piece.order)
        before: list[list[int]] = [[] for _ in range(size)]
        after: list[list[int]] = [[] for _ in range(size)]
        for tail, head in dict.fromkeys(self.ends):
            before[head].append(tail)
            after[tail].append(head)
        self.neighbours = [[*a, *b] for a, b in zip(before, after, strict=True)]
        self.last = size - 1
        self.dominators = _Dominators(before)
        self.owner: list[tuple[int, int] | None] = [None] * size

    def enter(self, entry: int) -> None:
        """Find the largest closed sets that begin at `entry`."""
        inside = set(self.dominators.below(entry))
        if not inside:
            return
        if entry:
            tied = {other for vertex in inside for other in self.neighbours[vertex]} - inside - {entry}
            inside |= tied
        else:  # the first vertex dominates the last one, and the two together must not hold the whole
            inside.remove(self.last)
            tied = set(self.neighbours[self.last])
        for exit_, members in _cut_off(self.neighbours, inside, sorted(tied)):
            for member in members:
                self.owner[member] = (entry, exit_)

    def pieces(self) -> list[Piece]:
        """Return the sets found, and the edges outside of all of them, by entry and exit."""
        found: dict[tuple[int, int], Piece] = {}

        def at(ends: tuple[int, int]) -> Piece:
            return found.setdefault(ends, Piece([self.piece.order[ends[0]]], []))

        for place, owner in enumerate(self.owner):
            if owner is not None:
                at(owner).order.append(self.piece.order[place])
        for edge, (tail, head) in zip(self.piece.edges, self.ends, strict=True):
            at(self.owner[tail] or self.owner[head] or (tail, head)).edges.append(edge)
        for (_, exit_), part in found.items():
            part.order.append(self.piece.order[exit_])
        return [found[ends] for ends in sorted(found)]

    def remaining(self) -> list[int]:
        """Return the vertices that lie inside no set, without entry and exit of the whole."""
        return [v for v, owner in list(zip(self.piece.order, self.owner, strict=True))[1:-1] if owner is None]


class _Dominators:
    """The dominator tree of a graph whose vertices are places in a topological order, the first one at its root."""

    def __init__(self, before: list[list[int]]) -> None:
        size = len(before)
        above = [0] * size
        for place in range(1, size):
            above[place] = before[place][0]
            for other in before[place][1:]:
                while other != above[place]:
                    if other > above[place]:
                        other = above[other]
                    else:
                        above[place] = above[above[place]]
        self._count = [1] * size
        for place in range(size - 1, 0, -1):
            self._count[above[place]] += self._count[place]
        # In preorder what a vertex dominates comes right behind it.
        self._rank, free = [0] * size, [1] * size
        self._preorder = [0] * size
        for place in range(1, size):
            self._rank[place] = free[above[place]]
            free[above[place]] += self._count[place]
            free[place] = self._rank[place] + 1
            self._preorder[self._rank[place]] = place

    def below(self, place: int) -> list[int]:
        """Return what `place` dominates, itself left out."""
        rank = self._rank[place]
        return self._preorder[rank + 1 : rank + self._count[place]]


def _cut_off(neighbours: list[list[int]], inside: set[int], tied: list[int]) -> Iterator[tuple[int, list[int]]]:
    """Yield every vertex of `inside` that alone ties others to the rest, with those others; the outermost only.

    The rest is one vertex more, next to all of `tied`; it is where the depth-first search begins.
    """
    number: dict[int, int] = {}  # when a vertex was first seen, from 1; the rest is 0
    lowest: dict[int, int] = {}  # the earliest vertex that it and those below it touch
    seen: list[int] = []
    cuts: list[tuple[int, int, int]] = []
    close = frozenset(tied)

    def visit(vertex: int) -> tuple[int, Iterator[int]]:
        seen.append(vertex)
        number[vertex] = len(seen)
        lowest[vertex] = 0 if vertex in close else len(seen)
        return vertex, iter(neighbours[vertex])

    for start in tied:
        if start in number:
            continue
        path = [visit(start)]
        while path:
            vertex, others = path[-1]
            for other in others:
                if other in number:
                    lowest[vertex] = min(lowest[vertex], number[other])
                elif other in inside:
                    path.append(visit(other))
                    break
            else:
                path.pop()
                if path:
                    parent = path[-1][0]
                    lowest[parent] = min(lowest[parent], lowest[vertex])
                    if lowest[vertex] >= number[parent]:
                        cuts.append((number[vertex], len(seen), parent))
    covered = 0
    for first, last, vertex in sorted(cuts):
        if first > covered:
            covered = last
            yield vertex, seen[first - 1 : last]
