"""The division tree: a graph of tensors taken apart into independent segments, down to single operators.

An independent segment, or closed set, has one entry and one exit; no vertex strictly inside it touches a vertex
outside. A node of the tree is such a segment, divided in one of three ways:

- linear: splitting vertices, which every path passes, cut it into a row of segments;
- branch: entry and exit alone hold it together; its parts lie side by side, and so do direct edges, as one part;
- complicated: neither; it is divided into the largest closed sets that are smaller than itself.

Every edge is in exactly one leaf; a leaf holds all the edges from one vertex to another. Each level of the tree takes
time linear in its edges, complicated nodes as `segments` says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from lowtide.plan.planners.feng_division.multigraph import Multigraph, topological_order


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


LEAF, LINEAR, BRANCH, COMPLICATED = "leaf", "linear", "branch", "complicated"


@dataclass(frozen=True, slots=True)
class Node:
    """An independent segment.

    Attributes:
        kind: How it is divided: LEAF (not at all), LINEAR, BRANCH or COMPLICATED.
        source: Its entry.
        target: Its exit.
        children: Numbers of the nodes it is divided into; those of a linear node from entry to exit.
        division: The vertices at which it is divided, entry and exit not among them, in topological order.
        edges: The edges of a leaf; empty for all others.
        cost: What its vertices cost inside a segment, entry and exit not counted.
    """

    kind: str
    source: int
    target: int
    children: tuple[int, ...]
    division: tuple[int, ...]
    edges: tuple[int, ...]
    cost: int


@dataclass(frozen=True)
class DivisionTree:
    """All nodes, parents before children; the first one is the whole graph."""

    graph: Multigraph
    nodes: tuple[Node, ...]

    @cached_property
    def kinds(self) -> Counter[str]:
        """Number of nodes of every kind."""
        return Counter(node.kind for node in self.nodes)

    def edges(self, number: int) -> Iterator[int]:
        """Yield the edges of a node and all below it."""
        stack = [number]
        while stack:
            node = self.nodes[stack.pop()]
            yield from node.edges
            stack += node.children


def divide(graph: Multigraph) -> DivisionTree:
    """Return the division tree of `graph`; raise `InvalidGraphError` if it lacks a single source and target."""
    edges = [Edge(number, *ends) for number, ends in enumerate(graph.edges)]
    todo: list[tuple[Piece, bool]] = [(Piece(topological_order(graph), edges), False)]
    drafts: list[tuple[str, Piece, list[int], range]] = []
    for piece, in_a_row in todo:
        kind, parts, division = _parts(piece, in_a_row)
        drafts.append((kind, piece, division, range(len(todo), len(todo) + len(parts))))
        todo += [(part, kind == LINEAR) for part in parts]
    costs = [0] * len(drafts)
    for number, (_, _, division, children) in reversed(list(enumerate(drafts))):
        costs[number] = sum(costs[child] for child in children) + sum(graph.inside[vertex] for vertex in division)
    return DivisionTree(
        graph,
        tuple(
            Node(
                kind=kind,
                source=piece.order[0],
                target=piece.order[-1],
                children=tuple(children),
                division=tuple(division),
                edges=() if children else tuple(edge.number for edge in piece.edges),
                cost=cost,
            )
            for (kind, piece, division, children), cost in zip(drafts, costs, strict=True)
        ),
    )


def _parts(piece: Piece, in_a_row: bool) -> tuple[str, list[Piece], list[int]]:
    """Return how a piece is divided, into what, and at which vertices; `in_a_row` says that it cannot be split."""
    if len(piece.order) == 2:
        return LEAF, [], []
    if not in_a_row and (splits := splitting_vertices(piece)):
        return LINEAR, _split(piece, splits), [piece.order[place] for place in splits]
    parts = _side_by_side(piece)
    if len(parts) > 1:
        return BRANCH, parts, []
    return COMPLICATED, *largest_segments(piece)


def splitting_vertices(piece: Piece) -> list[int]:
    """Return the places in the order of the vertices that all paths pass and no edge passes by, without the ends."""
    place = {vertex: k for k, vertex in enumerate(piece.order)}
    furthest = [0] * len(piece.order)
    for edge in piece.edges:
        tail = place[edge.tail]
        furthest[tail] = max(furthest[tail], place[edge.head])
    found, reach = [], furthest[0]
    for k in range(1, len(piece.order) - 1):
        if reach <= k:
            found.append(k)
        reach = max(reach, furthest[k])
    return found


def _split(piece: Piece, splits: list[int]) -> list[Piece]:
    """Return the pieces between consecutive places of `splits`."""
    borders = [0, *splits, len(piece.order) - 1]
    owner = {}
    parts = []
    for number, (begin, end) in enumerate(pairwise(borders)):
        owner.update(dict.fromkeys(piece.order[begin:end], number))
        parts.append(Piece(piece.order[begin : end + 1], []))
    for edge in piece.edges:
        parts[owner[edge.tail]].edges.append(edge)
    return parts


def _side_by_side(piece: Piece) -> list[Piece]:
    """Return the parts that only entry and exit hold together: direct edges first, then by their first vertex."""
    source, target = piece.order[0], piece.order[-1]
    leader = {vertex: vertex for vertex in piece.order[1:-1]}

    def find(vertex: int) -> int:
        while leader[vertex] != vertex:
            leader[vertex] = leader[leader[vertex]]
            vertex = leader[vertex]
        return vertex

    for edge in piece.edges:
        if edge.tail != source and edge.head != target:
            leader[find(edge.tail)] = find(edge.head)
    direct = Piece([source, target], [])
    parts: dict[int, Piece] = {}
    for vertex in piece.order[1:-1]:
        parts.setdefault(find(vertex), Piece([source], [])).order.append(vertex)
    for edge in piece.edges:
        if edge.tail != source:
            parts[find(edge.tail)].edges.append(edge)
        elif edge.head != target:
            parts[find(edge.head)].edges.append(edge)
        else:
            direct.edges.append(edge)
    for part in parts.values():
        part.order.append(target)
    return [*([direct] if direct.edges else []), *parts.values()]
