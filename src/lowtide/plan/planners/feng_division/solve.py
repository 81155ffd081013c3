"""The best checkpoints of a graph of tensors, over its division tree.

The objective is the cost of the vertices kept plus the cost of the dearest segment. For a threshold, going down from
the whole graph:

- a child that costs no more than the threshold stays whole: it may be one segment, or part of one;
- a child that costs more is solved in the same way, and its entry and exit are kept;
- in a row the children that stay whole are joined into segments by the shortest path of `chain`;
- elsewhere all vertices of the division are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from lowtide.plan.planners.feng_division.chain import Row, cut
from lowtide.plan.planners.feng_division.multigraph import Multigraph
from lowtide.plan.planners.feng_division.terms import Terms, minimise
from lowtide.plan.planners.feng_division.tree import LINEAR, DivisionTree, Node, divide


@dataclass(frozen=True, slots=True)
class Segment:
    """Children of one node that are recomputed together; `nodes` are their numbers in the tree."""

    source: int
    target: int
    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Division:
    """What is kept and what is recomputed together.

    Attributes:
        checkpoints: The vertices kept, source and target left out, in the order of their numbers.
        segments: The segments; each edge of the graph is in one.
    """

    checkpoints: tuple[int, ...]
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Solution:
    """The best division with its objective: cost of the checkpoints plus `max_term`, the dearest segment's cost."""

    division: Division
    total: int
    max_term: int


class Solver:
    """Divides one graph under thresholds."""

    def __init__(self, graph: Multigraph) -> None:
        self.tree: DivisionTree = divide(graph)
        self._rows = {k: self._row(node) for k, node in enumerate(self.tree.nodes) if node.kind == LINEAR}

    @cached_property
    def terms(self) -> Terms:
        """The costs that the dearest segment may have: of stretches of rows, and of nodes."""
        rows = [(row.before, row.counted) for row in self._rows.values()]
        nodes = self.tree.nodes
        alone = [nodes[child].cost for node in nodes if node.kind != LINEAR for child in node.children]
        return Terms([*rows, *(((0, cost), (0, 0)) for cost in (nodes[0].cost, *alone))])

    def at(self, limit: int) -> tuple[int, Division]:
        """Return the least cost of checkpoints, and the division, such that no segment costs more than `limit`."""
        nodes, stored = self.tree.nodes, self.tree.graph.stored
        kept: set[int] = set()
        segments: list[Segment] = []
        todo = [0]
        for number in todo:
            node = nodes[number]
            if node.cost <= limit or not node.children:
                segments.append(Segment(node.source, node.target, (number,)))
                continue
            if node.kind != LINEAR:
                kept.update(node.division)
                todo += node.children
                continue
            _, chosen = cut(self._rows[number], limit)
            places = [0, *chosen, len(node.children)]
            kept.update(node.division[place - 1] for place in chosen)
            for begin, end in pairwise(places):
                run = node.children[begin:end]
                if len(run) == 1:
                    todo.append(run[0])
                else:
                    segments.append(Segment(nodes[run[0]].source, nodes[run[-1]].target, run))
        return sum(stored[vertex] for vertex in kept), Division(tuple(sorted(kept)), tuple(segments))

    def best(self) -> Solution:
        """Return the division with the least objective over all thresholds."""
        total, limit, division = minimise(self.terms, self.at)
        return Solution(division, total, limit)

    def _row(self, node: Node) -> Row:
        graph, nodes = self.tree.graph, self.tree.nodes
        vertices = (node.source, *node.division, node.target)
        return Row(
            stored=tuple(graph.stored[vertex] for vertex in vertices),
            inside=tuple(graph.inside[vertex] for vertex in vertices),
            between=tuple(nodes[child].cost for child in node.children),
        )
