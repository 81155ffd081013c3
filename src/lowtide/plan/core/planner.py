"""What every planner is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.plan.core.problem import Problem
from lowtide.progress import Progress, silent
from lowtide.schedule.steps import Schedule


@dataclass(frozen=True, slots=True)
class Proposal:
    """A planner's answer: a schedule, and what it proved about the least overhead, if anything.

    The schedule is the planner's best one; if no schedule it knows fits the budget, the one with the least peak.
    `given_bound` is proved of the schedules that first run ops in the given order, also where this one is faster than
    all of them. `impossible` says that none of those fits, which is proved.
    """

    schedule: Schedule
    bound: float | None = None
    given_bound: float | None = None
    optimal: bool = False
    impossible: bool = False


class AbstractPlanner(ABC):
    """Proposes schedules. Subclasses are frozen dataclasses whose fields are their options and hold no other state."""

    @abstractmethod
    def propose(self, problem: Problem, progress: Progress = silent) -> Proposal:
        """Return the best schedule this planner finds for `problem`."""

    def supports(self, problem: Problem) -> str | None:
        """Return why this planner cannot serve `problem`, or None if it can."""
        del problem
        return None

    def choose(self, problem: Problem) -> object:
        """Return what this planner would do for `problem`, to be printed; by default the planner with its options."""
        del problem
        return self

    def with_effort(self, effort: float) -> AbstractPlanner:
        """Return this planner with that effort, where 1 is usual; the same one if it knows no effort."""
        del effort
        return self

    def with_starts(self, schedules: Sequence[Schedule]) -> AbstractPlanner:
        """Return this planner with `schedules` known already; the same one if it has no use for them."""
        del schedules
        return self
