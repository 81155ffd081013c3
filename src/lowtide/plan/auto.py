"""`auto`: runs every planner of a list that serves the problem and takes the best answer.

Memory model: the simulator's. Not optimal, but never worse than any planner of its list. Cost: theirs, added up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lowtide.plan.base import AbstractPlanner, Progress, Proposal, silent
from lowtide.plan.problem import Problem
from lowtide.schedule.verify import verify


@dataclass(frozen=True, kw_only=True)
class Auto(AbstractPlanner):
    """Take the cheapest schedule that fits, else the one with the least peak.

    Attributes:
        planners: The planners to run, by name, cheapest to run first; earlier ones win ties.
    """

    planners: Mapping[str, AbstractPlanner]

    def supports(self, problem: Problem) -> str | None:
        """Return the planners' reasons if none of them serves `problem`."""
        reasons = {name: planner.supports(problem) for name, planner in self.planners.items()}
        if any(reason is None for reason in reasons.values()):
            return None
        return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())

    def propose(self, problem: Problem, progress: Progress = silent) -> Proposal:
        """Return the best proposal of the planners in the list."""
        best: Proposal | None = None
        best_key = (True, 0.0, 0.0)
        bounds: list[float] = []
        for name, planner in self.planners.items():
            if planner.supports(problem) is not None:
                continue
            progress(f"auto: trying {name}")
            proposal = planner.propose(problem, progress)
            verify(problem.graph, proposal.schedule)
            trace = problem.price(proposal.schedule)
            fits = problem.fits(trace)
            key = (not fits, trace.seconds, trace.peak_bytes) if fits else (True, trace.peak_bytes, trace.seconds)
            if proposal.bound is not None:
                bounds.append(proposal.bound)
            if best is None or key < best_key:
                best, best_key = proposal, key
            if fits and proposal.optimal:
                break
        assert best is not None, "supports() was not asked"
        return Proposal(best.schedule, max(bounds, default=None), best.optimal and not best_key[0])
