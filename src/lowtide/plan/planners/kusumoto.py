"""`kusumoto`: the dynamic program over the lower sets made of one vertex and its ancestors.

Also known as: approximate DP, ApproxDP. Paper: Kusumoto, Inoue, Watanabe, Akiba, Koyama, "A Graph Theoretic Framework
of Recomputation Algorithms for Memory-Efficient Backpropagation", NeurIPS 2019. Memory model: cached boundaries, plus
values and gradients of one block, plus what later blocks still hold; a value is recomputed at most once and nothing is
freed inside a block. Optimal in that model among chains of these lower sets, up to the rounding of seconds to ticks.
Cost: at most n^2 / 2 steps times the number of ticks for every model budget, n being the number of vertices: less than
a second for 600 vertices and 1,000 ticks.

The paper's budget is not the true one, so the program is solved for several of its budgets, time-centric and
memory-centric, and the simulator, which knows lifetimes, decides.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.graph.analysis import forward_dag_of
from lowtide.plan.core.planner import AbstractPlanner, Proposal
from lowtide.plan.core.problem import Problem
from lowtide.plan.planners.kusumoto_lower_sets.family import pruned_lower_sets
from lowtide.plan.planners.kusumoto_lower_sets.reduce import reduced
from lowtide.plan.planners.kusumoto_lower_sets.search import Search, check_options
from lowtide.progress import Progress, silent
from lowtide.schedule.steps import Schedule


@dataclass(frozen=True, kw_only=True)
class Kusumoto(AbstractPlanner):
    """Keep the boundaries of the best chain of lower sets, each of which is a vertex with its ancestors.

    Attributes:
        strategy: "time" for the least recomputation in the model, "memory" for the most, which the true peak often
            rewards, or "both", which also tries what lies between.
        budgets: About how many budgets of the paper's model to try.
        ticks: Into how many ticks the seconds of forward are divided.
        max_vertices: Vertices above which neighbours are joined, the smallest first.
    """

    strategy: str = "both"
    budgets: int = 18
    ticks: int = 500
    max_vertices: int = 800

    def __post_init__(self) -> None:
        """Check the options."""
        check_options(self.strategy, budgets=self.budgets, ticks=self.ticks, max_vertices=self.max_vertices)

    def supports(self, problem: Problem) -> str | None:
        """Return why there is nothing to plan, or None."""
        return None if problem.graph.boundary is not None else "it needs a graph with a forward and a backward phase"

    def propose(self, problem: Problem, progress: Progress = silent) -> Proposal:
        """Return the fastest schedule that fits, or the one with the least peak; one block if the budget allows it."""
        if problem.fits(problem.baseline):
            return Proposal(Schedule.keep_all(problem.graph), bound=0.0, optimal=True)
        forward = forward_dag_of(problem.graph, problem.costs)
        small = reduced(forward, ticks=self.ticks, max_vertices=self.max_vertices)
        search = Search(problem, small, pruned_lower_sets(small.dag), self.strategy)
        return Proposal(search.best(self.budgets, progress))
