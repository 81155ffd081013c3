"""`kusumoto_exact`: the dynamic program over all lower sets of the forward pass.

Also known as: exact DP, ExactDP. Paper: Kusumoto, Inoue, Watanabe, Akiba, Koyama, "A Graph Theoretic Framework of
Recomputation Algorithms for Memory-Efficient Backpropagation", NeurIPS 2019. Memory model: as for `kusumoto`. Optimal
in that model among all canonical strategies, up to the rounding of seconds to ticks and the joining of small vertices;
the paper's released program is not, because it visits lower sets in an order in which subsets can come after their
supersets. Cost: the number of irreducible steps between lower sets times the number of ticks, for every model budget. A
graph may have exponentially many lower sets: above `max_lower_sets` the planner refuses.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.errors import PlannerRefusedError
from lowtide.graph.analysis import forward_dag_of
from lowtide.plan.core.planner import AbstractPlanner, Proposal
from lowtide.plan.core.problem import Problem
from lowtide.plan.planners.kusumoto_lower_sets.family import all_lower_sets
from lowtide.plan.planners.kusumoto_lower_sets.reduce import Reduced, reduced
from lowtide.plan.planners.kusumoto_lower_sets.search import Search, check_options
from lowtide.progress import Progress, silent
from lowtide.schedule.steps import Schedule


@dataclass(frozen=True, kw_only=True)
class KusumotoExact(AbstractPlanner):
    """Keep the boundaries of the best chain of lower sets.

    Attributes:
        strategy: "time" for the least recomputation in the model, "memory" for the most, which the true peak often
            rewards, or "both", which also tries what lies between.
        budgets: About how many budgets of the paper's model to try; fewer if there are millions of steps.
        ticks: Into how many ticks the seconds of forward are divided.
        max_vertices: Vertices above which neighbours are joined, the smallest first.
        max_lower_sets: Lower sets above which the planner refuses.
    """

    strategy: str = "both"
    budgets: int = 18
    ticks: int = 250
    max_vertices: int = 800
    max_lower_sets: int = 10_000

    def __post_init__(self) -> None:
        """Check the options."""
        check_options(
            self.strategy,
            budgets=self.budgets,
            ticks=self.ticks,
            max_vertices=self.max_vertices,
            max_lower_sets=self.max_lower_sets,
        )

    def supports(self, problem: Problem) -> str | None:
        """Return by how much there are too many lower sets, or None."""
        if problem.graph.boundary is None:
            return "it needs a graph with a forward and a backward phase"
        try:
            all_lower_sets(self._reduced(problem).dag, limit=self.max_lower_sets)
        except PlannerRefusedError as error:
            return str(error)
        return None

    def propose(self, problem: Problem, progress: Progress = silent) -> Proposal:
        """Return the fastest schedule that fits, or the one with the least peak; one block if the budget allows it."""
        if problem.fits(problem.baseline):
            return Proposal(Schedule.keep_all(problem.graph), bound=0.0, optimal=True)
        small = self._reduced(problem)
        family = all_lower_sets(small.dag, limit=self.max_lower_sets)
        return Proposal(Search(problem, small, family, self.strategy).best(self.budgets, progress))

    def _reduced(self, problem: Problem) -> Reduced:
        forward = forward_dag_of(problem.graph, problem.costs)
        return reduced(forward, ticks=self.ticks, max_vertices=self.max_vertices)
