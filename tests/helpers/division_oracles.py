"""Slow, plain versions of what `lowtide.plan.planners.feng_division` does, and random graphs to compare them on."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

from lowtide.plan.planners.feng_division.multigraph import Multigraph
from lowtide.plan.planners.feng_division.tree import BRANCH, COMPLICATED, LEAF, LINEAR, DivisionTree


def cheapest_cut(stored, inside, between):
    """Return the least objective of a chain, by trying every subset of its vertices."""
    inner = range(1, len(stored) - 1)
    found = []
    for count in range(len(inner) + 1):
        for chosen in combinations(inner, count):
            borders = [0, *chosen, len(stored) - 1]
            segments = [sum(inside[a + 1 : b]) + sum(between[a:b]) for a, b in pairwise(borders)]
            found.append(sum(stored[vertex] for vertex in chosen) + max(segments))
    return min(found)


def random_dag(rng: random.Random, n: int, density: float) -> Multigraph:
    """Return a random graph in which every vertex is on a path from 0 to n - 1; some edges are doubled."""
    edges = [(a, b) for a in range(n) for b in range(a + 1, n) if rng.random() < density]
    for vertex in range(n):
        if vertex and all(head != vertex for _, head in edges):
            edges.append((rng.randrange(vertex), vertex))
        if vertex < n - 1 and all(tail != vertex for tail, _ in edges):
            edges.append((vertex, rng.randrange(vertex + 1, n)))
    return _costed(rng, n, edges + [edge for edge in edges if rng.random() < 0.1])


def random_nest(rng: random.Random, depth: int) -> Multigraph:
    """Return a random graph of nested rows, branches and knots, each of which is divided as it was put together."""
    edges: list[tuple[int, int]] = []
    count = [2]

    def new() -> int:
        count[0] += 1
        return count[0] - 1

    def grow(source: int, target: int, depth: int) -> None:
        kind = rng.choice(("row", "row", "branch", "knot", "edge")) if depth else "edge"
        if kind == "edge":
            edges.extend([(source, target)] * rng.choice((1, 1, 1, 2)))
        elif kind == "row":
            stops = [source, *(new() for _ in range(rng.randint(1, 3))), target]
            for a, b in pairwise(stops):
                grow(a, b, depth - 1)
        elif kind == "branch":
            for _ in range(rng.randint(2, 3)):
                grow(source, target, depth - 1)
        else:  # four vertices of which each is joined to each, but for source and target
            a, b = new(), new()
            for ends in ((source, a), (source, b), (a, b), (a, target), (b, target)):
                grow(*ends, depth - 1)

    grow(0, 1, depth)
    return _costed(rng, count[0], edges, target=1)


def _costed(rng: random.Random, n: int, edges: list[tuple[int, int]], target: int = -1) -> Multigraph:
    """Return the graph with random costs; its vertices are numbered at random, so their numbers tell no order."""
    names = list(range(n))
    rng.shuffle(names)
    rng.shuffle(edges)
    stored = tuple(rng.randint(0, 9) for _ in range(n))
    inside = stored if rng.random() < 0.5 else tuple(cost if rng.random() < 0.5 else 0 for cost in stored)
    return Multigraph(tuple((names[a], names[b]) for a, b in edges), stored, inside, names[0], names[target])


def check_closed(graph: Multigraph, edges: list[int], source: int, target: int) -> None:
    """Check that `edges` form an independent segment from `source` to `target`."""
    ends = [graph.edges[edge] for edge in edges]
    inner = {vertex for pair in ends for vertex in pair} - {source, target}
    touching = {edge for edge, pair in enumerate(graph.edges) if inner & set(pair)}
    assert touching <= set(edges), "a vertex inside touches an edge outside"
    assert all(tail != target and head != source for tail, head in ends), "an edge leaves the exit or enters the entry"
    for vertex in inner:
        assert any(head == vertex for _, head in ends), "a second entry"
        assert any(tail == vertex for tail, _ in ends), "a second exit"


def shape_of(tree: DivisionTree) -> set[tuple[str, int, int, frozenset[int]]]:
    """Return what a tree says, regardless of the order of children."""
    return {
        (node.kind, node.source, node.target, frozenset(tree.edges(number))) for number, node in enumerate(tree.nodes)
    }


def plain_shape(graph: Multigraph) -> set[tuple[str, int, int, frozenset[int]]]:
    """Return the shape of the division tree, built from its definition by scanning all vertices and all pairs."""
    found: set[tuple[str, int, int, frozenset[int]]] = set()

    def grow(edges: frozenset[int], source: int, target: int, in_a_row: bool) -> None:
        ends = [graph.edges[edge] for edge in edges]
        inner = {vertex for pair in ends for vertex in pair} - {source, target}
        kind, parts = _plain_parts(graph, edges, inner, (source, target), in_a_row)
        found.add((kind, source, target, edges))
        for part, entry, exit_ in parts:
            grow(part, entry, exit_, kind == LINEAR)

    grow(frozenset(range(len(graph.edges))), graph.source, graph.target, False)
    return found


def _plain_parts(graph, edges, inner, ends, in_a_row):
    source, target = ends
    if not inner:
        return LEAF, []
    below = {vertex: _reach(graph, edges, vertex, forward=True) for vertex in (source, *inner)}
    above = {vertex: _reach(graph, edges, vertex, forward=False) for vertex in (target, *inner)}

    def within(entry, exit_):
        vertices = (below[entry] & above[exit_]) | {entry, exit_}
        return frozenset(edge for edge in edges if set(graph.edges[edge]) <= vertices)

    if not in_a_row:
        splits = [v for v in inner if within(source, v) | within(v, target) == edges]
        splits.sort(key=lambda vertex: len(within(source, vertex)))
        if splits:
            stops = [source, *splits, target]
            return LINEAR, [(within(a, b), a, b) for a, b in pairwise(stops)]
    parts = _components(graph, edges, source, target)
    if len(parts) > 1:
        return BRANCH, [(part, source, target) for part in parts]
    closed = []
    for entry in (source, *inner):
        for exit_ in (below[entry] & (inner | {target})) - ({target} if entry == source else set()):
            part = _closed_between(graph, edges, below[entry] & above[exit_], entry, exit_)
            if part:
                closed.append((part, entry, exit_))
    chosen, covered = [], set()
    for part, entry, exit_ in sorted(closed, key=lambda each: -len(each[0])):
        if not part & covered:
            chosen.append((part, entry, exit_))
            covered |= part
    assert covered == edges
    return COMPLICATED, chosen


def _reach(graph, edges, start, *, forward):
    """Return the vertices that lie behind `start`, or before it, on the given edges."""
    found, stack = set(), [start]
    while stack:
        vertex = stack.pop()
        for edge in edges:
            tail, head = graph.edges[edge] if forward else reversed(graph.edges[edge])
            if tail == vertex and head not in found:
                found.add(head)
                stack.append(head)
    return found


def _components(graph, edges, source, target):
    """Return the sets of edges that only `source` and `target` hold together; direct edges are one set."""
    parts = []
    for edge in edges:
        own = set(graph.edges[edge]) - {source, target}
        joined, apart = {edge}, []
        for part, vertices in parts:
            if (own & vertices) or (not own and not vertices):
                joined |= part
                own |= vertices
            else:
                apart.append((part, vertices))
        parts = [*apart, (joined, own)]
    return [frozenset(part) for part, _ in parts]


def _closed_between(graph, edges, inner, entry, exit_):
    """Return the edges of the largest closed set between two vertices."""
    inner = set(inner)
    while True:
        allowed = inner | {entry, exit_}
        leaks = {v for e in edges for v in graph.edges[e] if v in inner and not set(graph.edges[e]) <= allowed}
        if not leaks:
            break
        inner -= leaks
    return frozenset(edge for edge in edges if graph.edges[edge] == (entry, exit_) or (inner & set(graph.edges[edge])))


def cheapest_division(tree: DivisionTree) -> int:
    """Return the least objective over all choices that the tree offers, by trying all of them."""
    stored = tree.graph.stored

    def options(number: int) -> set[tuple[frozenset[int], int]]:
        """Return every way to solve a node: vertices kept inside it, and cost of its most expensive segment."""
        node = tree.nodes[number]
        found = {(frozenset(), node.cost)}
        if node.kind in (BRANCH, COMPLICATED):
            found |= join([options(child) for child in node.children], frozenset(node.division))
        elif node.kind == LINEAR:
            places = range(1, len(node.children))
            for count in range(len(places) + 1):
                for chosen in combinations(places, count):
                    borders = [0, *chosen, len(node.children)]
                    runs = [run(node, begin, end) for begin, end in pairwise(borders)]
                    found |= join(runs, frozenset(node.division[place - 1] for place in chosen))
        return found

    def run(node, begin, end):
        if end - begin == 1:
            return options(node.children[begin])
        inner = sum(tree.graph.inside[vertex] for vertex in node.division[begin : end - 1])
        return {(frozenset(), inner + sum(tree.nodes[child].cost for child in node.children[begin:end]))}

    def join(parts, kept):
        found = {(kept, 0)}
        for part in parts:
            found = {(one | other, max(a, b)) for one, a in found for other, b in part}
        return found

    return min(sum(stored[vertex] for vertex in kept) + costliest for kept, costliest in options(0))
