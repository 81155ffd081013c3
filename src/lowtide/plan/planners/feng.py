"""`feng`: independent segments of an arbitrary graph, kept vertices plus dearest segment at their least.

Also known as: optimal gradient checkpoint search, arbitrary computation graphs. Paper: Feng and Huang, "Optimal
Gradient Checkpoint Search for Arbitrary Computation Graphs", 2021. Memory model: bytes of the tensors kept, plus the
bytes of the dearest segment, each of which is recomputed whole from its entry; no gradients, no workspace, no budget.
Optimal in that model on a chain; elsewhere optimal among the choices that the division tree offers. Cost: the tree is
nearly linear, a threshold takes linear time, and few of the quadratically many thresholds are tried.

Every threshold gives a plan. The paper's answer is the one with the least sum; as the true peak also has gradients and
workspace, and as there is a budget, the plans of many thresholds are priced and the fastest that fits is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lowtide.errors import InvalidOptionError
from lowtide.graph.ir import Graph, ValueId
from lowtide.plan.core.candidates import best_of
from lowtide.plan.core.options import check_numbers
from lowtide.plan.core.planner import AbstractPlanner, Progress, Proposal, silent
from lowtide.plan.core.problem import Problem
from lowtide.plan.planners.feng_division.family import affordable, schedules
from lowtide.plan.planners.feng_division.solve import Solver
from lowtide.plan.planners.feng_division.terms import spread
from lowtide.plan.planners.feng_division.view import tensor_view_of


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
