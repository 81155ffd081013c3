"""`greedy`: drop what relieves most bytes per second of recomputation, on the true peak; then improve by repair.

Source: ours; the eviction score is related to the heuristic of dynamic tensor rematerialization (Kirisame et al. 2021),
but planned ahead on the whole schedule. Memory model: the simulator's. First runs keep the given order; every op may
run any number of times.

1. Descent. The schedule is an explicit list of steps, at first the given order. At its worst step, choose among the
   values that are alive but not used there: dropping one means running its op again, and whatever else that needs,
   just before its next use. Take the best score, price, repeat until the peak fits.
2. Tidying. Take out repeated runs that turn out not to be needed, dearest first.
3. Repair. Take out some of the repeated runs at random, descend with randomly disturbed scores, tidy, and keep the
   result if it is no slower. The random numbers are the same in every run.

If the descent gets stuck above the budget, a descent that does not look at the budget goes as low as it can, and the
answer is made from its schedule; so the least budget that is known to work does work. Not optimal; no bound. Cost:
about 1 ms per drop and 1,000 steps, and a number of repairs set by `effort`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lowtide.errors import InvalidOptionError
from lowtide.plan.base import AbstractPlanner, Progress, Proposal, silent
from lowtide.plan.problem import Problem
from lowtide.plan.search.draft import Draft, Facts
from lowtide.plan.search.drop import Taste, descend
from lowtide.plan.search.pricer import Pricer
from lowtide.plan.search.repair import improve, lower
from lowtide.plan.search.tidy import tidy

_SEED = 20160421
_STRIDES = (0.9, 0.97, 0.99)
_FLOOR_WORK = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Greedy(AbstractPlanner):
    """Descend to the budget, tidy, repair.

    Attributes:
        effort: Steps to price while repairing, in millions; 0 skips the repairs.
    """

    effort: float = 4.0

    def __post_init__(self) -> None:
        """Check the options."""
        if not 0 <= self.effort < float("inf"):
            raise InvalidOptionError(f"The effort is {self.effort}; it must be a number of at least 0.")

    def propose(self, problem: Problem, progress: Progress = silent) -> Proposal:
        """Return the fastest schedule found that fits, else the one with the least peak found."""
        graph, limit = problem.graph, problem.budget_bytes
        facts, pricer = Facts(graph, problem.costs), Pricer(graph, problem.costs)
        start = Draft.keep_all(graph)
        if problem.fits(problem.baseline):
            return Proposal(start.schedule(), bound=0.0, optimal=True)
        progress("greedy: descending to the budget")
        found = _starts(facts, pricer, start, limit)
        if not found:
            progress("greedy: descending as low as possible")
            lowest, peak = _lowest(facts, pricer, start, limit)
            if peak > limit:
                return Proposal(lowest.schedule())
            found = [tidy(facts, pricer, lowest, limit)]
        best = min(found, key=facts.total_seconds)
        if self.effort:
            progress("greedy: improving by repairs")
            best = improve(facts, pricer, best, limit, rng=np.random.default_rng(_SEED), work=int(self.effort * 1e6))
        return Proposal(best.schedule())


def _starts(facts: Facts, pricer: Pricer, start: Draft, limit: int) -> list[Draft]:
    """Return the tidied ends of the descents that reach `limit`."""
    found = []
    for area in (True, False):
        draft, peak = descend(facts, pricer, start, limit, Taste(area=area))
        if peak <= limit:
            found.append(tidy(facts, pricer, draft, limit))
    return found


def _lowest(facts: Facts, pricer: Pricer, start: Draft, enough: int) -> tuple[Draft, float]:
    """Return a draft with the least peak that descents in ever smaller strides find, and that peak.

    They end early at a peak of at most `enough`, but nothing else depends on the budget: a later call with the least
    peak as its budget takes the same road to the same draft.
    """
    best, best_peak = start, pricer.events(start.steps, start.split).peak
    for stride in _STRIDES:
        while best_peak > enough:
            draft, peak = descend(facts, pricer, best, stride * best_peak, Taste())
            if peak >= best_peak:
                break
            best, best_peak = tidy(facts, pricer, draft, peak), peak
    if best_peak <= enough:
        return best, best_peak
    return lower(facts, pricer, best, enough=enough, rng=np.random.default_rng(_SEED), work=_FLOOR_WORK)
