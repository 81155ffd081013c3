"""`keep_all`: plain training. Every op once, in the given order; nothing is recomputed.

Memory model: the simulator's. Optimal in time, the highest in memory. Cost: linear.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.plan.core.planner import AbstractPlanner, Proposal
from lowtide.plan.core.problem import Problem
from lowtide.progress import Progress, silent
from lowtide.schedule.steps import Schedule


@dataclass(frozen=True, kw_only=True)
class KeepAll(AbstractPlanner):
    """Recompute nothing."""

    def propose(self, problem: Problem, progress: Progress = silent) -> Proposal:
        """Return the given order."""
        del progress
        return Proposal(Schedule.keep_all(problem.graph), bound=0.0, optimal=True)
