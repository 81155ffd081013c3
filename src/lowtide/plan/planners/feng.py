"""`feng`: independent segments of an arbitrary graph, kept vertices plus most expensive segment at their least.

Also known as: optimal gradient checkpoint search, arbitrary computation graphs. Paper: Feng and Huang, "Optimal
Gradient Checkpoint Search for Arbitrary Computation Graphs", 2021. Memory model: bytes of the tensors kept, plus the
bytes of the most expensive segment, each of which is recomputed whole from its entry; no gradients, no workspace, no
budget. Optimal in that model on a chain; elsewhere optimal among the choices that the division tree offers. Cost: the
tree is nearly linear, a threshold takes linear time, and few of the quadratically many thresholds are tried.

Every threshold gives a plan. The paper's answer is the one with the least sum; as the true peak also has gradients and
workspace, and as there is a budget, the plans of many thresholds are priced and the fastest that fits is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from lowtide.errors import InvalidOptionError
from lowtide.graph.ir import Graph, ValueId
from lowtide.plan.core.best_schedule import best_of
from lowtide.plan.core.options import check_numbers
from lowtide.plan.core.planner import AbstractPlanner, Proposal
from lowtide.plan.core.problem import Problem
from lowtide.plan.planners.feng_division.chain import Row, cut
from lowtide.plan.planners.feng_division.family import affordable, schedules
from lowtide.plan.planners.feng_division.multigraph import Multigraph, tensor_view_of
from lowtide.plan.planners.feng_division.terms import Terms, minimise, spread
from lowtide.plan.planners.feng_division.tree import LINEAR, DivisionTree, Node, divide
from lowtide.progress import Progress, silent


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
    """The best division and its objective: cost of the checkpoints plus `max_term`, that of the largest segment."""

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
        """The costs that the most expensive segment may have: of stretches of rows, and of nodes."""
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


@dataclass(frozen=True, kw_only=True)
class Feng(AbstractPlanner):
    """Divide forward into independent segments and keep what lies between them.

    Attributes:
        plans: About how many plans to price with the simulator besides the paper's answer, fewer on graphs of many
            thousand ops; 0 returns that answer, whatever the budget.
        count_all: Whether every tensor of a segment counts in the paper's answer, also those that backward does not
            read. The paper merges ops that work in place, so its tensors are mostly ones that backward reads. The
            priced plans come from both ways to count.
    """

    plans: int = 160
    count_all: bool = False

    def __post_init__(self) -> None:
        """Check the options."""
        check_numbers(self)
        if self.plans < 0:
            raise InvalidOptionError(f"The number of plans to price is {self.plans}; it must be at least 0.")

    def supports(self, problem: Problem) -> str | None:
        """Return why there is nothing to divide, or None."""
        return None if problem.graph.boundary is not None else "it needs a graph with a forward and a backward phase"

    def propose(self, problem: Problem, progress: Progress = silent) -> Proposal:
        """Return the fastest of the priced plans that fits, else the one with the least peak."""
        progress("feng: dividing the forward pass")
        share = affordable(problem.graph, self.plans) // 2
        ways = (self.count_all, not self.count_all) if self.plans else (self.count_all,)
        choices = [kept for count_all in ways for kept in _choices(problem.graph, count_all, share)]
        progress(f"feng: pricing up to {len(choices)} ways to divide it")
        return Proposal(best_of(problem, schedules(problem.graph, choices)))


def _choices(graph: Graph, count_all: bool, plans: int) -> Iterator[set[ValueId]]:
    """Yield what the best division keeps, then what the divisions of `plans` thresholds keep."""
    view = tensor_view_of(graph, count_all=count_all)
    solver = Solver(view.tensors)
    yield view.kept(solver.best().division.checkpoints)
    if plans:
        yield from (view.kept(division.checkpoints) for division in spread(solver.terms, solver.at, plans))
