"""A multigraph of tensors: vertices are tensors, edges are operators, one source and one target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from lowtide.errors import InvalidGraphError


@dataclass(frozen=True)
class Multigraph:
    """Vertices with costs, and directed edges of which several may join the same two vertices.

    Attributes:
        edges: Tail and head of every edge; the index is the edge's id.
        stored: For every vertex, the cost of keeping it as a checkpoint.
        inside: For every vertex, its cost inside a segment that is recomputed; the paper's model has `stored` here.
        source: The vertex that nothing leads to; it costs nothing.
        target: The vertex that leads nowhere; it costs nothing.
    """

    edges: tuple[tuple[int, int], ...]
    stored: tuple[int, ...]
    inside: tuple[int, ...]
    source: int
    target: int

    def __len__(self) -> int:
        return len(self.stored)


def topological_order(graph: Multigraph) -> list[int]:
    """Return the vertices in a topological order, the smallest first where there is a choice.

    Raise `InvalidGraphError` if there is a cycle, or a vertex that is not on a path from source to target.
    """
    _check(graph)
    order = _sort(len(graph), graph.edges)
    if len(order) < len(graph):
        raise InvalidGraphError(f"The graph of tensors has a cycle among {len(graph) - len(order)} of its vertices.")
    tails, heads = {tail for tail, _ in graph.edges}, {head for _, head in graph.edges}
    for vertex in order:
        if (vertex != graph.source) != (vertex in heads) or (vertex != graph.target) != (vertex in tails):
            raise InvalidGraphError(
                f"Vertex {vertex} breaks the rule that every vertex has an edge to it, except the source, "
                f"{graph.source}, and an edge from it, except the target, {graph.target}."
            )
    return order


def _sort(count: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """Return the vertices in a topological order, the smallest first; those behind a cycle are left out."""
    waiting = [0] * count
    after: list[list[int]] = [[] for _ in range(count)]
    for tail, head in edges:
        waiting[head] += 1
        after[tail].append(head)
    ready = [vertex for vertex in range(count) if not waiting[vertex]]
    order = []
    while ready:
        vertex = heappop(ready)
        order.append(vertex)
        for head in after[vertex]:
            waiting[head] -= 1
            if not waiting[head]:
                heappush(ready, head)
    return order


def _check(graph: Multigraph) -> None:
    size = len(graph)
    if len(graph.inside) != size:
        raise InvalidGraphError(f"There are {size} costs of keeping a vertex and {len(graph.inside)} inside segments.")
    if not (0 <= graph.source < size and 0 <= graph.target < size) or graph.source == graph.target:
        raise InvalidGraphError(
            f"Source {graph.source} and target {graph.target} must be two different vertices of 0 to {size - 1}."
        )
    for tail, head in graph.edges:
        if not (0 <= tail < size and 0 <= head < size):
            raise InvalidGraphError(f"The edge from {tail} to {head} leaves the vertices 0 to {size - 1}.")
    _check_costs(graph.stored)
    _check_costs(graph.inside)


def _check_costs(costs: Sequence[int]) -> None:
    for vertex, cost in enumerate(costs):
        if cost < 0:
            raise InvalidGraphError(f"Vertex {vertex} costs {cost}; costs must be at least 0.")
