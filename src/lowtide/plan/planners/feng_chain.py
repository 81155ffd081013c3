"""`feng_chain`: the cuts of a chain for which kept values plus the most expensive segment are least.

Also known as: optimal gradient checkpoint search, linear computation graphs. Paper: Feng and Huang, "Optimal Gradient
Checkpoint Search for Arbitrary Computation Graphs", 2021. Memory model: bytes of the values kept at cut points, plus
the bytes of the most expensive segment between two of them; no gradients, no workspace, no budget. Optimal in that
model. Cost: a threshold takes linear time (`feng_division.chain`), and few of the quadratically many thresholds are
tried: a tenth of a second for 1,000 links.

Every threshold gives a plan. The paper's answer is the one with the least sum; as the true peak also has gradients and
workspace, and as there is a budget, the plans of many thresholds are priced and the fastest that fits is taken.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.errors import InvalidOptionError
from lowtide.graph.analysis import Chain, chain_of
from lowtide.plan.core.best_schedule import best_of
from lowtide.plan.core.options import check_numbers
from lowtide.plan.core.planner import AbstractPlanner, Proposal
from lowtide.plan.core.problem import Problem
from lowtide.plan.planners.feng_division.chain import Row, cut
from lowtide.plan.planners.feng_division.family import affordable, schedules
from lowtide.plan.planners.feng_division.terms import Terms, minimise, spread
from lowtide.progress import Progress, silent


@dataclass(frozen=True, kw_only=True)
class FengChain(AbstractPlanner):
    """Keep the values at some cut points and recompute what lies between.

    Attributes:
        plans: About how many plans to price with the simulator besides the paper's answer, fewer on graphs of many
            thousand ops; 0 returns that answer, whatever the budget.
    """

    plans: int = 160

    def __post_init__(self) -> None:
        """Check the options."""
        check_numbers(self)
        if self.plans < 0:
            raise InvalidOptionError(f"The number of plans to price is {self.plans}; it must be at least 0.")

    def supports(self, problem: Problem) -> str | None:
        """Return why there is no chain to cut, or None."""
        if problem.graph.boundary is None:
            return "it needs a graph with a forward and a backward phase"
        if len(chain_of(problem.graph, problem.costs).links) == 1:
            return "it needs a cut point in forward and the graph has none"
        return None

    def propose(self, problem: Problem, progress: Progress = silent) -> Proposal:
        """Return the fastest of the priced plans that fits, else the one with the least peak."""
        progress("feng_chain: cutting the chain")
        chain = chain_of(problem.graph, problem.costs)
        row = row_of(chain)
        terms = Terms([(row.before, row.counted)])
        least = max(row.between)
        found = [minimise(terms, lambda limit: cut(row, limit), least)[2]]
        if self.plans:
            found += spread(terms, lambda limit: cut(row, limit), affordable(problem.graph, self.plans), least)
        # The first vertex of the row stands for what is there before forward, so link k is vertex k + 1.
        choices = (chain.kept(vertex - 1 for vertex in path) for path in found)
        return Proposal(best_of(problem, schedules(problem.graph, choices)))


def row_of(chain: Chain) -> Row:
    """Return `chain` as a row: the value of each link is a vertex, what else backward reads of it lies before that."""
    readers, is_forward = chain.graph.readers, chain.graph.is_forward
    inside = [
        link.bytes if link.value is not None and not all(map(is_forward, readers[link.value])) else 0
        for link in chain.links
    ]
    return Row(
        stored=(0, *(link.bytes for link in chain.links)),
        inside=(0, *inside),
        between=tuple(link.inside_bytes for link in chain.links),
    )
