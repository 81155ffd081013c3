"""Local searches for one problem in several orders of first runs.

One search keeps the given order. Where a descent does well with ops that wait for their readers, another search keeps
that order: it can need far less memory, or lead nowhere, which only searching tells. While the two best orders are near
each other they take turns; an order that has fallen behind gets no more work.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

from lowtide.graph.ir import Graph, OpId
from lowtide.plan.bounds.least_peak import least_peak_bytes
from lowtide.plan.core.problem import Problem
from lowtide.plan.orders.policy import ORDERS
from lowtide.plan.orders.reordering import ReorderedProblem, delayed, releasing, without_redundant_runs
from lowtide.plan.search.local_search import LocalSearch
from lowtide.plan.search.problem_arrays import ProblemArrays
from lowtide.plan.search.starts import descend_low, descents
from lowtide.progress import Progress
from lowtide.schedule.steps import Schedule
from lowtide.schedule.verify import verify


@dataclass(frozen=True, slots=True)
class _OneOrder:
    """A problem in one order and the search in that order."""

    reordered: ReorderedProblem
    search: LocalSearch


class OrderSearch:
    """The best schedule so far of the searches in all orders; schedules and ops are those of the problem as given."""

    def __init__(self, problem: Problem, *, seed: int) -> None:
        self._problem, self._seed, self._turn = problem, seed, 0
        given = ReorderedProblem.of(problem, range(len(problem.graph.ops)))
        self._given = _OneOrder(given, LocalSearch(problem, seed=seed))
        # The best one first.
        self._orders = [self._given]

    @property
    def reordered(self) -> ReorderedProblem:
        """The problem in the best order."""
        return self._orders[0].reordered

    @property
    def is_given(self) -> bool:
        """Whether the best order is the given one."""
        return self._orders[0] is self._given

    @property
    def given_is_behind(self) -> bool:
        """Whether something fits, but in the given order nothing or only at a far higher overhead."""
        return self.fits and not self.is_given and not _is_near(self._given.search, self._best)

    @property
    def schedule(self) -> Schedule:
        """The best schedule so far."""
        return self.reordered.to_given(self._best.schedule)

    @property
    def fits(self) -> bool:
        """Whether it is within the budget."""
        return self._best.fits

    @property
    def overhead(self) -> float:
        """Its overhead."""
        return self._best.overhead

    @property
    def peak_bytes(self) -> int:
        """Its peak."""
        return self._best.peak_bytes

    def offer(self, schedule: Schedule, *, last: bool = True) -> None:
        """Take a legal schedule into the search of the given order; see `LocalSearch.offer`."""
        self._given.search.offer(schedule, last=last)
        self._sort()

    def offer_in_own_order(self, schedule: Schedule) -> None:
        """Take a legal schedule into the search of its own order, which can then go on from it."""
        order = first_runs(schedule)
        if order == self._given.reordered.order or not _is_complete(self._problem.graph, schedule):
            self.offer(schedule, last=False)
            return
        known = next((each for each in self._orders if each.reordered.order == order), None)
        if known is None:
            self._orders.append(self._search_in(ReorderedProblem.of(self._problem, order), (schedule,)))
        else:
            known.search.offer(known.reordered.from_given(schedule), last=False)
        self._sort()

    def explore(self, *, descend_in_given: bool, deadline: float, progress: Progress) -> None:
        """Add the best other order, if there is one that is not far behind.

        Candidates are orders in which ops wait or release values early, and the order of the best schedule offered so
        far.

        Args:
            descend_in_given: Whether to descend in the given order first.
            deadline: A time of `time.perf_counter`.
            progress: Receives a line of text now and then.
        """
        graph = self._problem.graph
        quickly = partial(_descend, first=len(graph.ops) > ORDERS.thorough_max_ops)
        if descend_in_given:
            for schedule in quickly(self._given.reordered):
                self.offer(schedule)
        if len(graph.ops) > ORDERS.max_ops:
            return
        found = self._candidates(quickly, deadline, progress)
        best = sorted((each for each in found if each.search.can_begin or not self.fits), key=self._rank)[:1]
        self._orders += best
        self._sort()
        self._settle(deadline)
        self._try_near_orders(deadline)

    def descend_low(self) -> None:
        """Look for a schedule within the budget, or of as little memory as is found, in the given order."""
        for schedule in _descend_low(self._given.reordered):
            self.offer(schedule)

    def improve(
        self,
        work: int,
        *,
        restart: bool = False,
        rerun: Collection[OpId] = (),
        best_only: bool = False,
        deadline: float,
    ) -> None:
        """Search in the best order or, every other time, in the second unless `best_only`.

        See `LocalSearch.improve` for the rest.
        """
        near = len(self._orders) > 1 and _is_near(self._orders[1].search, self._best)
        chosen = self._orders[1] if near and self._turn % 2 and not best_only else self._orders[0]
        self._turn += not best_only
        rerun = chosen.reordered.ops_from_given(rerun)
        chosen.search.improve(work, restart=restart, rerun=rerun, deadline=deadline)
        self._sort()

    def repair(self, reordered: ReorderedProblem, schedule: Schedule) -> None:
        """Bring `schedule`, one of `reordered`, within the budget in that order; see `LocalSearch.repair`."""
        for each in self._orders:
            if each.reordered.order == reordered.order:
                each.search.repair(schedule)
        self._sort()

    def remove_redundant_runs(self) -> None:
        """Take the schedules of the two best orders without redundant runs if that is better: it adds another order."""
        for each in self._orders[:2]:
            schedule = each.reordered.to_given(each.search.schedule)
            shorter = without_redundant_runs(self._problem.graph, schedule)
            if each.search.fits and shorter != schedule:
                trace = self._problem.price(shorter)
                if not self.fits or self._problem.overhead(trace) < self.overhead:
                    self.offer_in_own_order(shorter)

    def _candidates(self, quickly: partial[list[Schedule]], deadline: float, progress: Progress) -> list[_OneOrder]:
        """Return other orders with the schedules that descents find in them."""
        graph, own, usual = self._problem.graph, self._given.search.schedule, self._given.reordered.order
        found: list[_OneOrder] = []
        if _is_complete(graph, own) and first_runs(own) != usual:
            found.append(self._search_in(ReorderedProblem.of(self._problem, first_runs(own)), (own,)))
        others = [ReorderedProblem.of(self._problem, order) for order in _other_orders(graph) if order != usual]
        descended: list[list[Schedule]] = [[] for _ in others]
        # Where a plain descent reaches the budget in one order, the long one is not worth its time in another.
        for descent in (quickly, _descend_low):
            for number, reordered in enumerate(others):
                if time.perf_counter() < deadline:
                    progress("auto: trying another order")
                    descended[number] = descent(reordered)
            if any(descended) or self.fits or len(graph.ops) > ORDERS.least_peak_max_ops:
                break
        found += [self._search_in(reordered, each) for reordered, each in zip(others, descended, strict=True)]
        return found

    def _settle(self, deadline: float) -> None:
        """Remove redundant runs and search for a short while, as long as that leads to another order."""
        for _ in range(ORDERS.settle_rounds):
            before = self.reordered
            self.remove_redundant_runs()
            if self.reordered is before or time.perf_counter() >= deadline:
                return
            self._best.improve(ORDERS.settle_work, deadline=deadline)

    def _try_near_orders(self, deadline: float) -> None:
        """Search for a while in each order that is not far behind: the one that leads need not get furthest."""
        if not self.fits or self.overhead < ORDERS.trial_min_overhead:
            return
        near = [each for each in self._orders[: ORDERS.max_trials] if _is_near(each.search, self._best)]
        for each in near if len(near) > 1 else ():
            if time.perf_counter() < deadline:
                each.search.improve(ORDERS.trial_work, deadline=deadline)
        self._sort()

    @property
    def _best(self) -> LocalSearch:
        return self._orders[0].search

    def _sort(self) -> None:
        self._orders.sort(key=self._rank)

    def _rank(self, each: _OneOrder) -> tuple[bool, float, bool]:
        """Return what is less for the better order; of two that are equal up to rounding, the given one is better."""
        search = each.search
        return not search.fits, round(search.overhead, 9) if search.fits else search.peak_bytes, each is not self._given

    def _search_in(self, reordered: ReorderedProblem, schedules: Sequence[Schedule]) -> _OneOrder:
        """Return a search in the order of `reordered` that knows `schedules`."""
        made = _OneOrder(reordered, LocalSearch(reordered.problem, seed=self._seed))
        for schedule in schedules:
            verify(self._problem.graph, schedule)
            made.search.offer(reordered.from_given(schedule))
        return made


def _descend(reordered: ReorderedProblem, *, first: bool) -> list[Schedule]:
    """Return the best schedule of descents in the order of `reordered`, or of the `first` one, if there is one."""
    problem = reordered.problem
    if least_peak_bytes(problem) > problem.budget_bytes:
        return []
    found = descents(ProblemArrays(problem.graph, problem.costs), problem.budget_bytes, first=first)
    return [reordered.to_given(min(found, key=lambda edited: edited.seconds).schedule())] if found else []


def _descend_low(reordered: ReorderedProblem) -> list[Schedule]:
    """Return a schedule within the budget, or else of as little memory as is found, in the order of `reordered`."""
    problem = reordered.problem
    found, _ = descend_low(ProblemArrays(problem.graph, problem.costs), problem.budget_bytes)
    return [reordered.to_given(found.schedule())]


def _other_orders(graph: Graph) -> list[tuple[OpId, ...]]:
    """Return orders worth a trial, without repetitions."""
    thorough = len(graph.ops) <= ORDERS.thorough_max_ops
    found = [delayed(graph, outputs=True)]
    if thorough:
        found.append(delayed(graph, outputs=False))
    for last in (False, True) if thorough else (False,):
        released = releasing(graph, last=last)
        found += [released, delayed(graph, outputs=True, begin=released)]
    return list(dict.fromkeys(found))


def first_runs(schedule: Schedule) -> tuple[OpId, ...]:
    """Return the ops in the order of their first runs."""
    return tuple(dict.fromkeys(schedule.steps))


def _is_complete(graph: Graph, schedule: Schedule) -> bool:
    """Return whether `schedule` runs all ops of forward before any of backward."""
    order = first_runs(schedule)
    return len(order) == len(graph.ops) and all(map(graph.is_forward, order[: graph.num_forward]))


def _is_near(search: LocalSearch, best: LocalSearch) -> bool:
    return search.fits and best.fits and search.overhead <= ORDERS.near * best.overhead
