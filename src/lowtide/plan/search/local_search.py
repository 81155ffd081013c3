"""Local search in one order of first runs: the best schedule so far, and calls that improve it."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

from lowtide.graph.ir import OpId
from lowtide.plan.core.problem import Problem
from lowtide.plan.search.descent import descend, tidy
from lowtide.plan.search.destroy_repair import SearchRandom, improve, lower_peak
from lowtide.plan.search.drop_choice import DropPolicy
from lowtide.plan.search.edited_schedule import EditedSchedule, edit_schedule
from lowtide.plan.search.policy import START
from lowtide.plan.search.problem_arrays import ProblemArrays
from lowtide.schedule.simulate import Trace
from lowtide.schedule.steps import Schedule


class LocalSearch:
    """A search for the fastest schedule within a problem's budget, or the one of least peak while none is.

    Attributes:
        schedule: The best schedule so far.
    """

    def __init__(self, problem: Problem, *, seed: int) -> None:
        self._problem = problem
        self._arrays: ProblemArrays | None = None
        self._seed = seed
        self._calls = 0
        self.schedule = Schedule.keep_all(problem.graph)
        self._trace: Trace = problem.baseline
        self._start: Schedule = self.schedule
        self._start_key = self._key(self._trace)
        self._latest: Schedule = self.schedule

    @property
    def fits(self) -> bool:
        """Whether the best schedule is within the budget."""
        return self._problem.fits(self._trace)

    @property
    def overhead(self) -> float:
        """Overhead of the best schedule."""
        return self._problem.overhead(self._trace)

    @property
    def peak_bytes(self) -> int:
        """Peak of the best schedule."""
        return self._trace.peak_bytes

    def offer(self, schedule: Schedule, *, last: bool = True) -> None:
        """Take `schedule`, a legal one, if it is better than the best so far.

        If nothing fits in the end, the search for less memory begins at the schedule that was offered as the `last`; if
        that does not depend on the budget, a least peak found once is found again when it is the budget.
        """
        trace = self._keep_if_better(schedule)
        if last:
            self._latest = schedule
        # The search can only go on from schedules whose first runs are in the given order.
        if self._key(trace) < self._start_key and self._edit(schedule) is not None:
            self._start, self._start_key = schedule, self._key(trace)

    @property
    def can_begin(self) -> bool:
        """Whether a search can begin at a schedule within the budget whose first runs are in the given order."""
        return not self._start_key[0]

    def improve(
        self, work: int, *, restart: bool = False, rerun: Collection[OpId] = (), deadline: float = float("inf")
    ) -> None:
        """Search on for about `work` units of work, until the clock shows `deadline` at most.

        Args:
            work: Effort, about in microseconds but counted in steps.
            restart: Start at plain training and go down to the budget in strides, with some search at each.
            rerun: If given, start at plain training and go down to the budget by running these ops again rather than
                others.
            deadline: A time of `time.perf_counter`.
        """
        self._calls += 1
        rng = SearchRandom(1_000_003 * self._seed + self._calls)
        limit = self._problem.budget_bytes
        if not self.fits:
            self._lower_peak(limit, rng, work)
            return
        if rerun:
            edited = self._descend_by(rerun, rng)
        elif restart:
            edited = self._descend_in_strides(rng, work // 2, deadline)
            work -= work // 2
        else:
            edited = self._edit(self.schedule) or self._edit(self._start)
        if edited is not None:
            self._keep_if_better(edited.schedule())
            # The way to the start counts, but not for more than half.
            self._keep_if_better(
                improve(edited, limit, rng=rng, work=max(work // 2, work - edited.work), deadline=deadline)
            )

    def repair(self, schedule: Schedule) -> None:
        """Bring `schedule`, a legal one that may be above the budget, within it by a few drops, and offer that."""
        limit = self._problem.budget_bytes
        max_seconds = START.max_slowdown * self._trace.seconds if self.fits else math.inf
        for area in (True, False):
            edited = self._edit(schedule)
            if edited is None:
                return
            policy = DropPolicy(area=area)
            if descend(edited, limit, policy, max_seconds=max_seconds, work=START.repair_work) <= limit:
                tidy(edited, limit)
                self.offer(edited.schedule(), last=False)

    def _descend_in_strides(self, rng: SearchRandom, work: int, deadline: float) -> EditedSchedule | None:
        """Return an edited schedule within the budget, reached by way of larger limits, or None if one is missed."""
        edited = self._edit(Schedule.keep_all(self._problem.graph))
        limit, budget = self._problem.baseline.peak_bytes, self._problem.budget_bytes
        strides = max(1, math.ceil(math.log(limit / budget, 1 / START.stride)))
        while limit > budget and edited is not None:
            limit = max(budget, int(limit * START.stride))
            if descend(edited, limit, DropPolicy()) > limit:
                edited.undo()
                if descend(edited, limit, DropPolicy(area=False)) > limit:
                    return None
            tidy(edited, limit)
            schedule = improve(edited, limit, rng=rng, work=work // strides, deadline=deadline)
            edited = self._edit(schedule)
        return edited

    def _descend_by(self, rerun: Collection[OpId], rng: SearchRandom) -> EditedSchedule | None:
        """Return an edited schedule within the budget that runs the ops `rerun` again rather than others, or None."""
        preferred, limit = frozenset(rerun), self._problem.budget_bytes
        costs, factor = self._problem.costs, START.preferred_cost
        seconds = tuple(factor * cost if op in preferred else cost for op, cost in enumerate(costs.seconds))
        arrays = ProblemArrays(self._problem.graph, replace(costs, seconds=seconds))
        area = rng.coin()
        for policy in (DropPolicy(area=area), DropPolicy(area=not area)):
            edited = EditedSchedule(arrays)
            if descend(edited, limit, policy) <= limit:
                tidy(edited, limit)
                found = self._edit(edited.schedule())
                if found is not None:
                    tidy(found, limit)
                    found.work += edited.work
                    return found
        return None

    def _lower_peak(self, limit: int, rng: SearchRandom, work: int) -> None:
        """Look for a schedule within `limit`; only where the search ends depends on the limit."""
        edited = self._edit(self._latest)
        if edited is None:
            return
        lower_peak(edited, enough=limit, rng=rng, work=work)
        self._latest = edited.schedule()
        self._keep_if_better(self._latest)
        if self.fits:
            tidy(edited, limit)
            self._start = edited.schedule()
            self._keep_if_better(self._start)

    def _keep_if_better(self, schedule: Schedule) -> Trace:
        trace = self._problem.price(schedule)
        if self._key(trace) < self._key(self._trace):
            self.schedule, self._trace = schedule, trace
        return trace

    def _edit(self, schedule: Schedule) -> EditedSchedule | None:
        if self._arrays is None:
            self._arrays = ProblemArrays(self._problem.graph, self._problem.costs)
        return edit_schedule(self._arrays, schedule)

    def _key(self, trace: Trace) -> tuple[bool, float, float]:
        if self._problem.fits(trace):
            return False, trace.seconds, trace.peak_bytes
        return True, trace.peak_bytes, trace.seconds
