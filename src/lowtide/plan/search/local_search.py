"""The best schedule so far, and a search that takes it further in as many calls as one likes."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

from lowtide.graph.ir import OpId
from lowtide.plan.core.problem import Problem
from lowtide.plan.search.descent import descend, tidy
from lowtide.plan.search.destroy_repair import Dice, improve, lower
from lowtide.plan.search.drop_choice import Taste
from lowtide.plan.search.edited_schedule import Timeline, timeline_of
from lowtide.plan.search.problem_arrays import Facts
from lowtide.schedule.simulate import Trace
from lowtide.schedule.steps import Schedule

# How far one stride goes: the next limit as a share of the one before.
_STRIDE = 0.8
# What an op of a hint seems to cost beside others.
_LIKED = 0.07
# A schedule being mended that takes this many times as long as the best one is given up.
_HOPELESS = 1.1
# The work of mending one: where it takes more, it is not a matter of a few drops.
_MENDING = 200_000


class Climb:
    """A search for the fastest schedule within a problem's budget, or the one of least peak while none is.

    Attributes:
        schedule: The best schedule so far.
    """

    def __init__(self, problem: Problem, *, seed: int) -> None:
        self._problem = problem
        self._facts: Facts | None = None
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
        trace = self._take(schedule)
        if last:
            self._latest = schedule
        # The search can only go on from schedules whose first runs are in the given order.
        if self._key(trace) < self._start_key and self._timeline(schedule) is not None:
            self._start, self._start_key = schedule, self._key(trace)

    @property
    def can_begin(self) -> bool:
        """Whether a search can begin at a schedule within the budget whose first runs are in the given order."""
        return not self._start_key[0]

    def improve(
        self, work: int, *, anew: bool = False, hint: Collection[OpId] = (), until: float = float("inf")
    ) -> None:
        """Search on for about `work` units of work, until the clock shows `until` at most.

        Args:
            work: Effort, about in microseconds but counted in steps.
            anew: Begin again at plain training and go down to the budget in strides, with some search at each.
            hint: If given, begin again at plain training and go down to the budget by running these ops again rather
                than others.
            until: A time of `time.perf_counter`.
        """
        self._calls += 1
        dice = Dice(1_000_003 * self._seed + self._calls)
        limit = self._problem.budget_bytes
        if not self.fits:
            self._reach(limit, dice, work)
            return
        if hint:
            timeline = self._follow(hint, dice)
        elif anew:
            timeline = self._stride(dice, work // 2, until)
            work -= work // 2
        else:
            timeline = self._timeline(self.schedule) or self._timeline(self._start)
        if timeline is not None:
            self._take(timeline.schedule())
            # The way to the beginning counts, but not for more than half.
            self._take(improve(timeline, limit, dice=dice, work=max(work // 2, work - timeline.work), until=until))

    def mend(self, schedule: Schedule) -> None:
        """Bring `schedule`, a legal one that may be above the budget, within it by a few drops, and offer that."""
        limit = self._problem.budget_bytes
        hopeless = _HOPELESS * self._trace.seconds if self.fits else math.inf
        for area in (True, False):
            timeline = self._timeline(schedule)
            if timeline is None:
                return
            if descend(timeline, limit, Taste(area=area), hopeless=hopeless, work=_MENDING) <= limit:
                tidy(timeline, limit)
                self.offer(timeline.schedule(), last=False)

    def _stride(self, dice: Dice, work: int, until: float) -> Timeline | None:
        """Return a timeline within the budget, reached by way of larger ones; None if the way ends above it."""
        timeline = self._timeline(Schedule.keep_all(self._problem.graph))
        limit, budget = self._problem.baseline.peak_bytes, self._problem.budget_bytes
        strides = max(1, math.ceil(math.log(limit / budget, 1 / _STRIDE)))
        while limit > budget and timeline is not None:
            limit = max(budget, int(limit * _STRIDE))
            if descend(timeline, limit, Taste()) > limit:
                timeline.undo()
                if descend(timeline, limit, Taste(area=False)) > limit:
                    return None
            tidy(timeline, limit)
            schedule = improve(timeline, limit, dice=dice, work=work // strides, until=until)
            timeline = self._timeline(schedule)
        return timeline

    def _follow(self, hint: Collection[OpId], dice: Dice) -> Timeline | None:
        """Return a timeline within the budget that runs the ops of `hint` again rather than others, or None."""
        liked, limit = frozenset(hint), self._problem.budget_bytes
        costs = self._problem.costs
        seconds = tuple(_LIKED * cost if op in liked else cost for op, cost in enumerate(costs.seconds))
        facts = Facts(self._problem.graph, replace(costs, seconds=seconds))
        area = dice.few.random() < 0.5
        for taste in (Taste(area=area), Taste(area=not area)):
            timeline = Timeline(facts)
            if descend(timeline, limit, taste) <= limit:
                tidy(timeline, limit)
                found = self._timeline(timeline.schedule())
                if found is not None:
                    tidy(found, limit)
                    found.work += timeline.work
                    return found
        return None

    def _reach(self, limit: int, dice: Dice, work: int) -> None:
        """Look for a schedule within `limit`; but for where it ends, the way there does not depend on it."""
        timeline = self._timeline(self._latest)
        if timeline is None:
            return
        lower(timeline, enough=limit, dice=dice, work=work)
        self._latest = timeline.schedule()
        self._take(self._latest)
        if self.fits:
            tidy(timeline, limit)
            self._start = timeline.schedule()
            self._take(self._start)

    def _take(self, schedule: Schedule) -> Trace:
        trace = self._problem.price(schedule)
        if self._key(trace) < self._key(self._trace):
            self.schedule, self._trace = schedule, trace
        return trace

    def _timeline(self, schedule: Schedule) -> Timeline | None:
        if self._facts is None:
            self._facts = Facts(self._problem.graph, self._problem.costs)
        return timeline_of(self._facts, schedule)

    def _key(self, trace: Trace) -> tuple[bool, float, float]:
        if self._problem.fits(trace):
            return False, trace.seconds, trace.peak_bytes
        return True, trace.peak_bytes, trace.seconds
