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

from dataclasses import dataclass

from lowtide.errors import InvalidOptionError
from lowtide.plan.base import AbstractPlanner, Progress, Proposal, silent
from lowtide.plan.division.family import best_of
from lowtide.plan.division.solve import Solver
from lowtide.plan.division.terms import spread
from lowtide.plan.division.view import tensor_view_of
from lowtide.plan.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Feng(AbstractPlanner):
    """Divide forward into independent segments and keep what lies between them.

    Attributes:
        plans: Number of thresholds to price with the simulator besides the paper's answer; 0 returns that answer,
            whatever the budget.
        count_all: Count every tensor of a segment, as the paper does. Otherwise those that backward does not read count
            nothing inside a segment, which is what the paper reaches by merging ops that work in place.
    """

    plans: int = 60
    count_all: bool = False

    def __post_init__(self) -> None:
        """Check the options."""
        if self.plans < 0:
            raise InvalidOptionError(f"The number of plans to price is {self.plans}; it must be at least 0.")

    def supports(self, problem: Problem) -> str | None:
        """Return why there is nothing to divide, or None."""
        return None if problem.graph.boundary is not None else "it needs a graph with a forward and a backward phase"

    def propose(self, problem: Problem, progress: Progress = silent) -> Proposal:
        """Return the fastest of the priced plans that fits, else the one with the least peak."""
        progress("feng: dividing the forward pass")
        view = tensor_view_of(problem.graph, count_all=self.count_all)
        solver = Solver(view.tensors)
        found = [solver.best().division]
        if self.plans:
            found += spread(solver.terms, solver.at, self.plans)
        return Proposal(best_of(problem, (view.kept(division.checkpoints) for division in found), progress))
