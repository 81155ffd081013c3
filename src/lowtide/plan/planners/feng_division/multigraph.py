"""A multigraph of tensors: vertices are tensors, edges are operators, one source and one target.

`tensor_view_of` makes it of the forward pass of a training graph:

A vertex is a forward op with all it makes; an edge says that an op reads what another made. Two vertices are added: the
source stands for what is there before the step, the target for the end of forward.

What is always there glues nothing together: inputs, values that pinned ops make or that the caller receives, and small
values read far away (`ambient_values`) have no edges. Ops that backward never needs again are left out. This leaves
ops without predecessor in the middle of forward, such as the conversion of one layer's weight; each is put beside an
edge into the first op that needs it. Likewise an end in the middle, such as that of an auxiliary head, is put beside
an edge out of the op that it hangs from. So neither hides where the rest can be divided.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from lowtide.errors import InvalidGraphError
from lowtide.graph.analysis import ambient_values
from lowtide.graph.ir import Graph, OpId, ValueId


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


@dataclass(frozen=True)
class TensorView:
    """A training graph seen as a graph of tensors.

    Attributes:
        graph: The graph it is a view of.
        tensors: The graph of tensors.
        ops: The op of every vertex but the first and the last, which are source and target.
        ambient: Values that every schedule made from this view keeps.
    """

    graph: Graph
    tensors: Multigraph
    ops: tuple[OpId, ...]
    ambient: frozenset[ValueId]

    def kept(self, checkpoints: Iterable[int]) -> set[ValueId]:
        """Return the values to keep if the vertices in `checkpoints` are kept and the rest is recomputed.

        Backward begins with what follows the last checkpoint, so recomputing that would free nothing: it is kept.
        """
        chosen = {self.ops[vertex - 1] for vertex in checkpoints}
        chosen.update(range(max(chosen, default=-1) + 1, self.graph.num_forward))
        return set(self.ambient).union(*(self.graph.ops[op].outputs for op in chosen))


def tensor_view_of(graph: Graph, *, count_all: bool = False) -> TensorView:
    """Return the view of `graph`; source and target are its only vertices if backward needs nothing again.

    Args:
        graph: A graph with phases.
        count_all: Count every value in a segment, as the paper does, and not only those that backward reads.
    """
    ambient = ambient_values(graph)
    there = graph.always_there | ambient
    ops = sorted(_needed_again(graph, there))
    vertex = {op: k for k, op in enumerate(ops, 1)}
    producers = [value.producer for value in graph.values]
    edges = [
        (vertex[made], vertex[op])
        for op in ops
        for value in graph.ops[op].inputs
        if value not in there and (made := producers[value]) is not None
    ]
    edges += _loose_ends(len(ops) + 2, edges)
    return TensorView(graph, _with_costs(graph, edges, ops, there, count_all), tuple(ops), ambient)


def _needed_again(graph: Graph, there: Collection[ValueId]) -> set[OpId]:
    """Return the forward ops that backward would run again if nothing but `there` was kept."""
    found: set[OpId] = set()
    stack: list[OpId] = list(graph.backward)
    while stack:
        for value in graph.ops[stack.pop()].inputs:
            producer = graph.values[value].producer
            if value in there or producer is None or producer in found or not graph.is_forward(producer):
                continue
            found.add(producer)
            stack.append(producer)
    return found


def _with_costs(
    graph: Graph, edges: Sequence[tuple[int, int]], ops: Sequence[OpId], there: Collection[ValueId], count_all: bool
) -> Multigraph:
    again = set(ops)
    stored, inside = [0], [0]
    for op in ops:
        made = [value for value in graph.ops[op].outputs if value not in there]
        late = [value for value in made if any(not graph.is_forward(reader) for reader in graph.readers[value])]
        read = [value for value in made if value in late or not again.isdisjoint(graph.readers[value])]
        stored.append(sum(graph.values[value].bytes for value in (made if count_all else read)))
        inside.append(sum(graph.values[value].bytes for value in (made if count_all else late)))
    return Multigraph(tuple(edges), (*stored, 0), (*inside, 0), 0, len(ops) + 1)


def _loose_ends(count: int, edges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the edges that make 0 the only source and the last vertex the only target."""
    if count == 2:
        return [(0, 1)]
    before: list[list[int]] = [[] for _ in range(count)]
    after: list[list[int]] = [[] for _ in range(count)]
    for tail, head in edges:
        after[tail].append(head)
        before[head].append(tail)
    rank = _late_order(before, after)
    first = _tie(0, before, after, rank)
    last = _tie(count - 1, after, before, [-place for place in rank])
    return [*first, *((tail, head) for head, tail in last)]


def _late_order(before: list[list[int]], after: list[list[int]]) -> list[int]:
    """Return the places of the vertices in a topological order in which short beginnings come right before their use.

    Depth first from every end, the predecessor with the longest way to it first.
    """
    depth = [0] * len(before)
    for vertex, others in enumerate(before):
        depth[vertex] = 1 + max((depth[other] for other in others), default=0)
    place = [0] * len(before)
    place[-1] = len(before)
    count = 0
    for end in range(1, len(before) - 1):
        stack = [] if after[end] else [(end, False)]
        while stack:
            vertex, ready = stack.pop()
            if place[vertex]:
                continue
            if ready:
                count += 1
                place[vertex] = count
                continue
            stack.append((vertex, True))
            stack += [(other, False) for other in sorted(before[vertex], key=lambda other: (depth[other], -other))]
    return place


def _tie(start: int, before: list[list[int]], after: list[list[int]], rank: list[int]) -> list[tuple[int, int]]:
    """Return edges to all vertices that none leads to, so that `start` leads to all, and add them to the lists.

    Such a vertex is put beside an edge: among those it leads to, the first with a predecessor that is reached from
    `start` and ranks before the vertex lends that one. If there is none, the vertex is put behind the nearest dead end
    before it. All edges go from lower to higher rank, so there is no cycle.
    """
    reached = [False] * len(rank)
    reached[start] = True
    dead_ends, made = [start], []
    roots = [vertex for vertex in range(1, len(rank) - 1) if not before[vertex]]
    for root in sorted(roots, key=rank.__getitem__):
        link = _lender(root, before, after, rank, reached)
        if link is None:
            near = [v for v in dead_ends if not after[v] and rank[v] < rank[root]]
            link = max(near, key=rank.__getitem__, default=start)
        made.append((link, root))
        after[link].append(root)
        before[root].append(link)
        stack = [root]
        while stack:
            vertex = stack.pop()
            if not reached[vertex]:
                reached[vertex] = True
                stack += after[vertex]
                if not after[vertex]:
                    dead_ends.append(vertex)
    return made


def _lender(
    root: int, before: list[list[int]], after: list[list[int]], rank: list[int], reached: list[bool]
) -> int | None:
    """Return a vertex beside one of whose edges `root` can be put, or None."""
    heap, seen = [(rank[root], root)], {root}
    while heap:
        _, vertex = heappop(heap)
        lenders = [other for other in before[vertex] if reached[other] and rank[other] < rank[root]]
        if lenders:
            return max(lenders, key=rank.__getitem__)
        for other in after[vertex]:
            if other not in seen:
                seen.add(other)
                heappush(heap, (rank[other], other))
    return None
