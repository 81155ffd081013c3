"""First plans, with which training begins at once, and the better ones that are made for them in the background.

The first call of a graph waits a few seconds for the plan that was asked for. If that is not there by then, the call
runs a plan that was made quickly: it fits the budget as every plan does, and is a little slower. The better plan is
taken over between two steps, by the graph that runs, without capturing anything again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from lowtide.capture.arrived_gradients import Arrived
from lowtide.errors import InvalidScheduleError
from lowtide.graph.analysis import has_same_ops
from lowtide.graph.ir import Graph
from lowtide.lower.variants import LazyVariant, Turn
from lowtide.plan import registry
from lowtide.plan.auto.planner import Auto
from lowtide.plan.background import PlanJob
from lowtide.plan.core.planner import AbstractPlanner
from lowtide.plan.core.problem import Problem
from lowtide.plan.core.result import Plan, Stage
from lowtide.plan.plan_cache import known_plan, solve_or_nearest
from lowtide.plan.solve import solve
from lowtide.progress import Progress, say

# The planner of first plans: some tenths of a second for a thousand ops, and rarely more than a percent behind.
_QUICK = "greedy"
# With any patience at all, graphs of so many ops are planned on the spot: it takes less than to start a process.
_SMALL_OPS = 50


# Returns whether the graph that runs a first plan can go on with this one.
Judge = Callable[[Plan], bool]


class Improvement:
    """A first plan, and what becomes of it.

    Attributes:
        plan: What is known about what runs.
        better: The better plan, once it is taken over.
        judge: Says whether a better plan is taken over; set by the graph that runs.
    """

    def __init__(self, plan: Plan, job: PlanJob) -> None:
        self.plan = plan
        self.better: Plan | None = None
        self.judge: Judge | None = None
        self._job: PlanJob | None = job

    @property
    def is_over(self) -> bool:
        """Whether the plan stays what it is."""
        return self._job is None

    def settle(self, replaced: Callable[[Plan, Plan], None]) -> None:
        """Take over what was found, if it was; `replaced` is told of the plan that went and the one that came."""
        if self._job is None or self.judge is None or not self._job.is_over:
            return
        found = self._job.plan
        if found is not None and self.judge(found):
            self.better = replace(found, cut=self.plan.cut)
            before, now = (100 * plan.overhead for plan in (self.plan, found))
            say(f"the plan of {found.planner} is taken over: overhead {now:.2f} % in the place of {before:.2f} %")
        self._end(self.better or self.plan, replaced)

    def _end(self, now: Plan, replaced: Callable[[Plan, Plan], None]) -> None:
        self._job = None
        # What runs and what is listed stay one object where they are.
        before, self.plan = self.plan, now if now.stage is Stage.FINAL else replace(now, stage=Stage.FINAL)
        replaced(before, self.plan)

    def wait(self) -> None:
        """Wait until there is something to settle."""
        while self._job is not None and not self._job.wait(60.0):
            pass

    def stop(self, replaced: Callable[[Plan, Plan], None]) -> None:
        """Leave the plan as it is."""
        if self._job is not None:
            self._job.close()
            self._end(self.plan, replaced)


@dataclass
class StagedGraph:
    """Directs a graph that begins with a first plan and goes on with a better one, between two of its runs.

    Attributes:
        variants: What runs each plan so far; a backward pass runs that of its forward.
        plan: The plan of the last one.
        better: Settles what was found meanwhile; returns the better plan, once it is there.
        variant_for: Lowers another plan.
    """

    variants: list[LazyVariant]
    plan: Plan
    better: Callable[[], Plan | None]
    variant_for: Callable[[Plan], LazyVariant]

    def begin_forward(self, args: Sequence[Any]) -> Turn:
        """Return what to run: the latest plan."""
        del args
        plan = self.better()
        if plan is not None and plan is not self.plan:
            if plan.schedule != self.plan.schedule:
                self.variants.append(self.variant_for(plan))
            self.plan = plan
        return Turn(len(self.variants) - 1, 0)

    def end_forward(self, turn: Turn, outputs: Sequence[Any]) -> None:
        """Note nothing: the graph is the whole step."""

    def begin_backward(self, turn: Turn, arrived: Arrived) -> None:
        """Note nothing."""

    def end_backward(self, turn: Turn, gradients: Sequence[Any]) -> None:
        """Note nothing."""

    @property
    def keeps_values(self) -> bool:
        """True: backward may run."""
        return True


class Improvements:
    """Those of one model.

    Args:
        patience: Seconds that a first call waits for the best plan; None to wait until it is there.
        replaced: Is told of every plan that another one takes the place of.
    """

    def __init__(self, patience: float | None, replaced: Callable[[Plan, Plan], None]) -> None:
        self.patience = patience
        self._replaced = replaced
        self._begun: list[tuple[Problem, PlanJob]] = []
        self._under_way: list[Improvement] = []

    def solve(
        self, problem: Problem, planner: AbstractPlanner, progress: Progress, others: Sequence[Plan] = ()
    ) -> Plan:
        """Return the plan of `planner`, or a quick one while that is being made; it may not fit, if none does.

        Args:
            problem: The question.
            planner: Who is asked.
            progress: Is told what is being done.
            others: Plans of other graphs. Where one has the same ops, for other shapes, its schedule may serve at once.
        """
        if self.patience is None or not isinstance(planner, Auto) or problem.fits(problem.baseline):
            return solve_or_nearest(problem, planner, progress)
        known = known_plan(problem, planner)
        adopted = _adopted(problem, others)
        is_small = len(problem.graph.ops) <= _SMALL_OPS and self.patience > 0 and not adopted
        if known is not None or is_small:
            return known or solve_or_nearest(problem, planner, progress)
        self._abandon()
        job = PlanJob(problem, planner)
        try:
            return self._first(problem, planner, job, progress, adopted)
        except BaseException:
            job.close()
            raise

    def _first(
        self, problem: Problem, planner: AbstractPlanner, job: PlanJob, progress: Progress, adopted: Sequence[Plan]
    ) -> Plan:
        assert self.patience is not None
        patience = 0.0 if adopted else self.patience
        started = time.monotonic()
        progress("making a first plan")
        made = solve(problem, registry.get(_QUICK), throw=False)
        quick = min((made, *adopted), key=lambda plan: (not plan.fits, plan.trace.seconds))
        progress("waiting for the best plan")
        if job.wait(patience - (time.monotonic() - started)) or not quick.fits:
            while not job.wait(60.0):
                pass
            # Where there can be no process, or it is lost, the plan is made here.
            return job.plan or solve_or_nearest(problem, planner, progress)
        job.give_way()
        self._begun.append((problem, job))
        return replace(quick, stage=Stage.FIRST)

    def begin(self, plan: Plan) -> None:
        """Note that `plan`, if a better one is being made, is in use from now on, and none that was begun before."""
        jobs = [job for problem, job in self._begun if problem is plan.problem]
        self._begun = [each for each in self._begun if each[0] is not plan.problem]
        self._under_way += [Improvement(plan, job) for job in jobs]
        self._abandon()

    def _abandon(self) -> None:
        """End what was begun for plans that did not come into use."""
        for _, job in self._begun:
            job.close()
        self._begun = []

    def of(self, plan: Plan) -> Improvement | None:
        """Return what becomes of `plan`, or None if it is what was asked for."""
        return next((each for each in self._under_way if each.plan is plan and not each.is_over), None)

    def settle(self, improvement: Improvement) -> None:
        """Take over what was found for one plan, if it was."""
        improvement.settle(self._replaced)
        if improvement.is_over and improvement in self._under_way:
            self._under_way.remove(improvement)

    def finish(self) -> None:
        """Wait until all is found, and take it over."""
        for each in list(self._under_way):
            while not each.is_over and each.judge is not None:
                each.wait()
                self.settle(each)

    def follow(self, before: Plan, now: Plan) -> None:
        """Note that what a plan takes is known better: `now` says the same of what runs."""
        for each in self._under_way:
            if each.plan is before:
                each.plan = now

    def stop(self, graphs: list[Graph] | None = None) -> None:
        """Leave the plans of these graphs, or all plans, as they are."""
        for each in list(self._under_way):
            if graphs is None or each.plan.problem.graph in graphs:
                each.stop(self._replaced)
                self._under_way.remove(each)
        if graphs is None:
            self._abandon()


def _adopted(problem: Problem, others: Sequence[Plan]) -> list[Plan]:
    """Return plans for `problem` with the schedules of plans for the same ops on other shapes, if they fit."""
    found = []
    for schedule, name in {plan.schedule: plan.planner for plan in others if _is_alike(plan, problem)}.items():
        # What may run again can depend on more than which op reads what.
        with suppress(InvalidScheduleError):
            found.append(replace(solve(problem, schedule, throw=False), planner=name))
    return [plan for plan in found if plan.fits]


def _is_alike(plan: Plan, problem: Problem) -> bool:
    return has_same_ops(plan.problem.graph, problem.graph)
