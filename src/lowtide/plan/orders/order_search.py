"""Searches for one problem in one or two orders of first runs.

The given order is one side. Where a descent does well with ops that wait for their readers, that order is another: it
can need far less memory, or lead nowhere, which only searching tells. While both are near each other they take turns;
a side that has fallen behind gets no more work.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

from lowtide.graph.ir import Graph, OpId
from lowtide.plan.bounds.least_peak import least_peak_bytes
from lowtide.plan.core.problem import Problem
from lowtide.plan.orders.reordered_problem import View
from lowtide.plan.orders.reorderings import delayed, releasing, without_idle_runs
from lowtide.plan.search.local_search import Climb
from lowtide.plan.search.problem_arrays import Facts
from lowtide.plan.search.starts import descents, go_low
from lowtide.progress import Progress
from lowtide.schedule.steps import Schedule
from lowtide.schedule.verify import verify

# A side whose overhead is more than this multiple of the other's has fallen behind.
_NEAR = 1.15
# Above this number of ops no other order is looked at; above the second, none that only promises less memory.
_MOST_OPS, _FEW_OPS = 4_000, 500
# Above this number of ops one descent in an order is enough.
_MANY_OPS = 1_000
# How many sides are kept beside that of the given order.
_MOST_SIDES = 3
# The work of a search after ops have been let wait, and how often that is done at most before the long searches.
_SETTLING, _MOST_SETTLING = 300_000, 4
# The work of a search in each of the best orders before one of them is chosen, how many of them there are at most, and
# the overhead above which it is worth its time.
_EXPLORING, _EXPLORED = 600_000, 3
_SCARCE = 0.1


@dataclass(frozen=True, slots=True)
class _Side:
    view: View
    climb: Climb


class Sides:
    """The best schedule so far of the searches in all orders; schedules and ops are those of the problem as given."""

    def __init__(self, problem: Problem, *, seed: int) -> None:
        self._problem, self._seed, self._turn = problem, seed, 0
        self._given = _Side(View.of(problem, range(len(problem.graph.ops))), Climb(problem, seed=seed))
        # The better one first.
        self._sides = [self._given]

    @property
    def view(self) -> View:
        """The problem in the order of the better side."""
        return self._sides[0].view

    @property
    def is_given(self) -> bool:
        """Whether the better side is that of the given order."""
        return self._sides[0] is self._given

    @property
    def given_is_behind(self) -> bool:
        """Whether something fits, but in the given order nothing or only at a far higher overhead."""
        return self.fits and not self.is_given and not _is_near(self._given.climb, self._climb)

    @property
    def schedule(self) -> Schedule:
        """The best schedule so far."""
        return self.view.outward(self._climb.schedule)

    @property
    def fits(self) -> bool:
        """Whether it is within the budget."""
        return self._climb.fits

    @property
    def overhead(self) -> float:
        """Its overhead."""
        return self._climb.overhead

    @property
    def peak_bytes(self) -> int:
        """Its peak."""
        return self._climb.peak_bytes

    def offer(self, schedule: Schedule, *, last: bool = True) -> None:
        """Take a legal schedule if it is better than the best so far; see `Climb.offer`."""
        self._given.climb.offer(schedule, last=last)
        self._sides.sort(key=self._rank)

    def take(self, schedule: Schedule) -> None:
        """Take a legal schedule if it is better than the best so far, on a side of its order, for a search to go on."""
        order = first_runs(schedule)
        if order == self._given.view.order or not _is_complete(self._problem.graph, schedule):
            self.offer(schedule, last=False)
            return
        side = next((side for side in self._sides if side.view.order == order), None)
        if side is None:
            self._sides.append(self._side(View.of(self._problem, order), (schedule,)))
        else:
            side.climb.offer(side.view.inward(schedule), last=False)
        self._sides.sort(key=self._rank)

    def look_around(self, *, given: bool, until: float, progress: Progress) -> None:
        """Add the side of the best other order, if there is one that is not far behind.

        Such orders are those in which ops wait or let values go early, and that of the best of the schedules offered so
        far. If asked to, it descends in the `given` one first.
        """
        graph = self._problem.graph
        quickly = partial(_descend, first=len(graph.ops) > _MANY_OPS)
        if given:
            for schedule in quickly(self._given.view):
                self.offer(schedule)
        if len(graph.ops) > _MOST_OPS:
            return
        own, usual = self._given.climb.schedule, self._given.view.order
        found: list[_Side] = []
        if _is_complete(graph, own) and first_runs(own) != usual:
            found.append(self._side(View.of(self._problem, first_runs(own)), (own,)))
        views = [View.of(self._problem, order) for order in _other_orders(graph) if order != usual]
        descended: list[list[Schedule]] = [[] for _ in views]
        # Where a plain descent gets there in one of the orders, the long way down is not worth its time in another.
        for descent in (quickly, _go_low):
            for number, view in enumerate(views):
                if time.perf_counter() < until:
                    progress("auto: looking at another order")
                    descended[number] = descent(view)
            if any(descended) or self.fits or len(graph.ops) > _FEW_OPS:
                break
        found += [self._side(view, own_ones) for view, own_ones in zip(views, descended, strict=True)]
        self._sides += sorted((side for side in found if side.climb.can_begin or not self.fits), key=self._rank)[:1]
        self._sides.sort(key=self._rank)
        self._settle(until)
        self._explore(until)

    def go_low(self) -> None:
        """Look for a schedule within the budget, or of as little memory as is found, in the given order."""
        for schedule in _go_low(self._given.view):
            self.offer(schedule)

    def improve(
        self, work: int, *, anew: bool = False, hint: Collection[OpId] = (), best: bool = False, until: float
    ) -> None:
        """Search on the better side or, every other time, on the other unless the `best` is asked for.

        See `Climb.improve` for the rest.
        """
        near = len(self._sides) > 1 and _is_near(self._sides[1].climb, self._climb)
        side = self._sides[1] if near and self._turn % 2 and not best else self._sides[0]
        self._turn += not best
        side.climb.improve(work, anew=anew, hint=side.view.ops_inward(hint), until=until)
        self._sides.sort(key=self._rank)

    def mend(self, view: View, schedule: Schedule) -> None:
        """Bring `schedule`, one of `view`, within the budget on the side of that order; see `Climb.mend`."""
        for side in self._sides:
            if side.view.order == view.order:
                side.climb.mend(schedule)
        self._sides.sort(key=self._rank)

    def _settle(self, until: float) -> None:
        """Let ops wait and search on for a short while, as long as that leads to another order."""
        for _ in range(_MOST_SETTLING):
            before = self.view
            self.let_wait()
            if self.view is before or time.perf_counter() >= until:
                return
            self._climb.improve(_SETTLING, until=until)

    def _explore(self, until: float) -> None:
        """Search for a while in each order that is not far behind: the one that leads need not get furthest."""
        if not self.fits or self.overhead < _SCARCE:
            return
        near = [side for side in self._sides[:_EXPLORED] if _is_near(side.climb, self._climb)]
        for side in near if len(near) > 1 else ():
            if time.perf_counter() < until:
                side.climb.improve(_EXPLORING, until=until)
        self._sides.sort(key=self._rank)

    def let_wait(self) -> None:
        """Take the schedules of both sides without idle runs if that is better: it adds the side of another order."""
        for side in self._sides[:2]:
            schedule = side.view.outward(side.climb.schedule)
            shorter = without_idle_runs(self._problem.graph, schedule)
            if side.climb.fits and shorter != schedule:
                trace = self._problem.price(shorter)
                if not self.fits or self._problem.overhead(trace) < self.overhead:
                    self.take(shorter)
        # No other side gets work any more.
        self._sides = [side for place, side in enumerate(self._sides) if place < _MOST_SIDES or side is self._given]

    @property
    def _climb(self) -> Climb:
        return self._sides[0].climb

    def _rank(self, side: _Side) -> tuple[bool, float, bool]:
        """Return what is less for the better side; of two that are equal up to rounding, the given order is."""
        climb = side.climb
        return not climb.fits, round(climb.overhead, 9) if climb.fits else climb.peak_bytes, side is not self._given

    def _side(self, view: View, schedules: Sequence[Schedule]) -> _Side:
        side = _Side(view, Climb(view.problem, seed=self._seed))
        for schedule in schedules:
            verify(self._problem.graph, schedule)
            side.climb.offer(view.inward(schedule))
        return side


def _descend(view: View, *, first: bool) -> list[Schedule]:
    """Return the best schedule of descents in the order of `view`, or the `first` of them, if there is one."""
    problem = view.problem
    if least_peak_bytes(problem) > problem.budget_bytes:
        return []
    found = descents(Facts(problem.graph, problem.costs), problem.budget_bytes, first=first)
    return [view.outward(min(found, key=lambda timeline: timeline.seconds).schedule())] if found else []


def _go_low(view: View) -> list[Schedule]:
    """Return a schedule within the budget, or else of as little memory as is found, in the order of `view`."""
    problem = view.problem
    return [view.outward(go_low(Facts(problem.graph, problem.costs), problem.budget_bytes)[0].schedule())]


def _other_orders(graph: Graph) -> list[tuple[OpId, ...]]:
    """Return orders worth a look, without repetitions."""
    found = [delayed(graph, outputs=True)]
    if len(graph.ops) <= _MANY_OPS:
        found.append(delayed(graph, outputs=False))
    for last in (False, True) if len(graph.ops) <= _MANY_OPS else (False,):
        released = releasing(graph, last=last)
        found += [released, delayed(graph, outputs=True, begin=released)]
    return list(dict.fromkeys(found))


def first_runs(schedule: Schedule) -> tuple[OpId, ...]:
    """Return the ops in the order of their first runs."""
    return tuple(dict.fromkeys(schedule.steps))


def _is_complete(graph: Graph, schedule: Schedule) -> bool:
    """Whether `schedule` runs all ops of forward before any of backward."""
    order = first_runs(schedule)
    return len(order) == len(graph.ops) and all(map(graph.is_forward, order[: graph.num_forward]))


def _is_near(climb: Climb, best: Climb) -> bool:
    return climb.fits and best.fits and climb.overhead <= _NEAR * best.overhead
