"""`greedy`: drop what relieves most bytes per second of recomputation, on the true peak; destroy and repair if asked.

Source: ours; the eviction score is related to the heuristic of dynamic tensor rematerialization (Kirisame et al. 2021),
but planned ahead on the whole schedule. Memory model: the simulator's. First runs keep the given order; every op may
run any number of times.

1. Descent. The schedule is an explicit list of steps, at first the given order. At its worst step, choose among the
   values that are alive but not used there: dropping one means running its op again, and whatever else that needs,
   just before its next use. Take the best score, price, repeat until the peak fits.
2. Tidying. Take out repeated runs that turn out not to be needed, most expensive first.
3. Destroy and repair, as far as `effort` allows; none by default, `auto` does it better. Take out some of the repeated
   runs at random, descend with randomly disturbed scores, tidy, and keep the result if it is no slower. The random
   numbers are the same in every run.

If the descent gets stuck above the budget, a descent that does not look at the budget goes as low as it can, and the
answer is made from its schedule; so the least budget that is known to work does work. Not optimal; no bound. Cost:
about 0.2 ms per drop in graphs of 500 ops and 1 ms at 50,000, and repairs for as long as `effort` says.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.errors import InvalidOptionError
from lowtide.plan.core.options import check_numbers
from lowtide.plan.core.planner import AbstractPlanner, Proposal
from lowtide.plan.core.problem import Problem
from lowtide.plan.search.destroy_repair import SearchRandom, improve
from lowtide.plan.search.policy import SEED
from lowtide.plan.search.problem_arrays import ProblemArrays
from lowtide.plan.search.starts import descend_low, descents
from lowtide.progress import Progress, silent
from lowtide.schedule.steps import Schedule


@dataclass(frozen=True, kw_only=True)
class Greedy(AbstractPlanner):
    """Descend to the budget, tidy, repair if asked.

    Attributes:
        effort: Work to spend on repairs, about in seconds but counted in steps, so that it is the same everywhere; 0
            for none.
    """

    effort: float = 0.0

    def __post_init__(self) -> None:
        """Check the options."""
        check_numbers(self)
        if not 0 <= self.effort < float("inf"):
            raise InvalidOptionError(f"The effort is {self.effort}; it must be a number of at least 0.")

    def propose(self, problem: Problem, progress: Progress = silent) -> Proposal:
        """Return the fastest schedule found that fits, else the one with the least peak found."""
        if problem.fits(problem.baseline):
            return Proposal(Schedule.keep_all(problem.graph), bound=0.0, optimal=True)
        arrays, limit = ProblemArrays(problem.graph, problem.costs), problem.budget_bytes
        progress("greedy: descending to the budget")
        found = descents(arrays, limit)
        if not found:
            progress("greedy: descending as low as possible")
            least, reached = descend_low(arrays, limit)
            if not reached:
                return Proposal(least.schedule())
            found = [least]
        best = min(found, key=lambda edited: edited.seconds)
        if not self.effort:
            return Proposal(best.schedule())
        progress("greedy: improving by repairs")
        return Proposal(improve(best, limit, rng=SearchRandom(SEED), work=int(self.effort * 1e6)))
