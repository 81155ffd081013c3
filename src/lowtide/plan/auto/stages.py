"""The stages of `auto`: ask planners, explore orders, rounds of search beside the proof, polish.

Three different gaps are meant by these names:

- `open_gap`: from the best schedule to what is proved about the order that the proof is about.
- `proved_gap`: from the best schedule to what is proved about its own order; this is what the plan says.
- `stop_gap`: the gap with which the best schedule is good enough.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import count

from lowtide.graph.ir import OpId
from lowtide.plan.auto.choice_description import Choice
from lowtide.plan.auto.policy import POLICY, Round, SearchStart
from lowtide.plan.auto.proof_state import EQUAL, ProofState
from lowtide.plan.bounds.integer_program import Limits
from lowtide.plan.bounds.prover import Prover
from lowtide.plan.core.planner import AbstractPlanner, Proposal
from lowtide.plan.core.problem import Problem
from lowtide.plan.orders.order_search import OrderSearch, first_runs
from lowtide.progress import Progress, silent
from lowtide.schedule.steps import Schedule
from lowtide.schedule.verify import verify


@dataclass(frozen=True, slots=True)
class Task:
    """One question to `auto`.

    Attributes:
        problem: Graph, costs and budget.
        choice: What to do for it.
        planners: All planners of the list by name.
        starts: Schedules known already.
        seed: Of the random numbers.
        progress: Receives a line of text now and then.
        started: When it began, a time of `time.perf_counter`.
    """

    problem: Problem
    choice: Choice
    planners: Mapping[str, AbstractPlanner]
    starts: tuple[Schedule, ...]
    seed: int
    progress: Progress
    started: float

    @property
    def deadline(self) -> float:
        """When to end."""
        return math.inf if self.choice.time_limit is None else self.started + self.choice.time_limit

    @property
    def is_late(self) -> bool:
        """Whether the time is up."""
        return time.perf_counter() >= self.deadline

    @property
    def seconds_left(self) -> float:
        """The seconds left, a tenth of one at least."""
        return max(0.1, self.deadline - time.perf_counter())


class Stages:
    """One call of `Auto.propose`: the stages share the searches in all orders and the state of the proof."""

    def __init__(self, task: Task, prover: Prover) -> None:
        self._task, self._choice = task, task.choice
        self._orders = OrderSearch(task.problem, seed=task.seed)
        self._proof = ProofState(self._orders.reordered, prover, impossible=task.choice.is_impossible)
        # Whether the last search, from the best schedule, found a much better one: then the next goes on from there.
        self._has_momentum = False

    def run(self) -> Proposal:
        """Run all stages and return the answer."""
        self._ask_planners()
        if self._choice.searches:
            self._explore_orders()
        self._ask_if_nothing_fits()
        if self._choice.searches:
            self._choose_proved_order()
            self._run_rounds(self._choice.num_rounds)
        self._offer_starts()
        if self._choice.searches:
            self._polish()
            # Nothing to do unless the last search has left the order that the proof is about.
            self._run_rounds(lambda _: 0)
        return self._proposal()

    # Stage 1: ask planners.

    def _ask_planners(self) -> None:
        """Offer the schedules of the planners to the search."""
        for schedule in self._task.starts:
            verify(self._task.problem.graph, schedule)
        for name in self._choice.asked:
            self._ask(name)

    def _ask_if_nothing_fits(self) -> None:
        """Look for anything that fits where neither planners nor other orders have found something."""
        if self._choice.descends_itself and not self._orders.fits:
            self._task.progress("auto: descending as low as possible")
            self._orders.descend_low()
        for name in self._choice.asked_if_nothing_fits:
            if not self._orders.fits:
                self._ask(name, last=False)
        if not self._orders.fits:
            self._offer_starts()

    def _ask(self, name: str, *, last: bool = True) -> None:
        self._task.progress(f"auto: asking {name}")
        proposal = self._task.planners[name].propose(self._task.problem, silent)
        verify(self._task.problem.graph, proposal.schedule)
        self._orders.offer(proposal.schedule, last=last)
        if proposal.bound is not None:
            self._proof.add_bound(proposal.bound)

    def _offer_starts(self) -> None:
        """Take a schedule known already if it is better; not at first, for it would keep the search near it."""
        for schedule in self._task.starts:
            self._orders.offer_in_own_order(schedule)

    # Stage 2: explore orders.

    def _explore_orders(self) -> None:
        """Find the best other order; in large graphs a quick bound takes about as long and runs beside it."""
        if self._choice.is_economical and self._choice.proves:
            self._proof.begin_quick_bound(self._task.seconds_left)
        self._orders.explore(
            descend_in_given=self._choice.descends_itself, deadline=self._task.deadline, progress=self._task.progress
        )

    def _choose_proved_order(self) -> None:
        """Let the proof be about the order of the best schedule if the given one is behind and seems to stay there."""
        behind = self._orders.given_is_behind
        if behind and self._choice.proves and self._proof.begin_quick_bound(self._task.seconds_left):
            self._search(SearchStart.BEST, int(POLICY.proof.quick_search_work * min(1.0, self._choice.effort)), ())
        has_bound = self._proof.finish()
        if has_bound and behind and self._proof.bound >= POLICY.proof.switch_share * self._orders.overhead:
            self._proof.switch_to(self._orders.reordered)

    # Stage 3: rounds of search beside the proof.

    def _run_rounds(self, num_rounds: Callable[[float], int]) -> None:
        """Improve the schedule and the bound until they are close enough or the effort is spent.

        There are as many rounds as `num_rounds` says for the gap so far, but always some after the proof has switched
        to another order.
        """
        after_switch = 0
        for number in count():
            if self._proof.should_switch(self._orders.reordered, self._overhead):
                self._proof.switch_to(self._orders.reordered)
                # While nothing fits, how far the search goes must not depend on the budget by way of the proof.
                if self._orders.fits:
                    after_switch = number + POLICY.proof.rounds_after_switch
            # There are more of them as soon as something fits.
            gap = self._proved_gap
            enough = num_rounds(gap)
            if after_switch:
                enough = max(enough, after_switch + self._choice.num_more_rounds(gap))
            if self._is_done or number >= enough or self._has_stalled():
                return
            # That nothing fits is only said of the given order.
            if self._choice.proves and (self._orders.fits or self._proof.is_about_given):
                self._proof.begin()
            self._run_round(POLICY.rounds.rounds[number % len(POLICY.rounds.rounds)])

    def _run_round(self, planned: Round) -> None:
        """Search while the proof goes on."""
        fits, scale = self._orders.fits, self._choice.work_scale
        proof_work = planned.proof_work if fits else POLICY.proof.infeasible_proof_work
        limits = self._limits(proof_work * scale * self._choice.proof_share)
        rerun = self._proof.rerun_ops
        self._proof.begin_stage(limits, self._orders.schedule if fits else None)
        for start, work in self._searches(planned):
            share = 1.0 if self._orders.fits else POLICY.proof.infeasible_search_share
            self._search(start, int(share * work * scale), rerun)
        if self._proof.finish():
            self._repair_suggestion()
        if self._orders.fits:
            self._proof.gaps.append(self._open_gap)
        self._report()

    def _limits(self, work: float) -> Limits:
        """Return when one stage of the proof ends."""
        if not self._orders.fits:
            gap, enough = self._choice.gap, math.inf
        else:
            gap = self._stop_gap
            enough = self._orders.overhead - POLICY.proof.enough_share * gap
        return Limits(self._task.seconds_left, work, POLICY.proof.solver_gap_share * gap, enough)

    def _searches(self, planned: Round) -> list[tuple[SearchStart, int]]:
        """Return the searches of a round; where the gap is wide, the proof takes long, and there are more of them."""
        wide = self._orders.fits and self._open_gap > POLICY.gaps.wide
        searches = [*planned.searches]
        if self._choice.is_economical:
            # To start at plain training takes long in large graphs and wins rarely. Where the gap is wide, to start at
            # the solution behind the proof does not pay either: such graphs are searched too slowly to be caught.
            kept = [each for each in searches if each[0] is not SearchStart.PLAIN]
            searches = [(SearchStart.BEST if wide else start, work) for start, work in kept]
        if wide:
            first = self._choice.is_economical and self._proof.is_about_given and not self._proof.gaps
            more = POLICY.polish.early_in_large if first else 1
            searches += [(SearchStart.BEST, POLICY.polish.work)] * more
        return searches

    def _search(self, start: SearchStart, work: int, rerun: Collection[OpId]) -> None:
        """Search once; one that goes on from the best schedule and gains much gives momentum to the next."""
        before, momentum = self._overhead, self._has_momentum
        # Once the proof is about the order of the best schedule, other orders have had their turns.
        best_only = momentum or not self._proof.is_about_given
        follow = start is SearchStart.PROOF and bool(rerun) and not momentum
        restart = start is not SearchStart.BEST and not follow and not momentum
        self._orders.improve(
            work, restart=restart, rerun=rerun if follow else (), best_only=best_only, deadline=self._task.deadline
        )
        self._remove_redundant_runs()
        onward = momentum or start is SearchStart.BEST
        self._has_momentum = onward and math.inf > before > (1 + POLICY.rounds.momentum) * self._orders.overhead

    def _repair_suggestion(self) -> None:
        """Take what the solution behind the proof does, repaired: where few moments decide, it is close to the best."""
        suggested = self._proof.suggested_schedule
        if suggested is not None and self._orders.fits and not self._task.is_late:
            self._orders.repair(self._proof.about, suggested)
            self._remove_redundant_runs()

    def _remove_redundant_runs(self) -> None:
        """Remove redundant runs, which changes the order, unless the proof has switched to another order."""
        if self._proof.is_about_given:
            self._orders.remove_redundant_runs()

    def _has_stalled(self) -> bool:
        """Return whether one more round is not worth its time: the last brought or left little, or it is expensive.

        In large graphs there are few, since the proof takes long, and one after the proof has switched to another
        order; the polishing searches go on.
        """
        gaps, is_large = self._proof.gaps, self._choice.is_economical
        if not self._choice.may_end_early or not gaps:
            return False
        if len(gaps) == 1:
            return is_large and (not self._proof.is_about_given or gaps[0] <= self._choice.little_gap)
        if is_large:
            return len(gaps) >= POLICY.rounds.max_in_large
        before, after = gaps[-2:]
        if after > POLICY.gaps.far:
            return len(gaps) > 2 and before - after < POLICY.rounds.min_closed_far * before
        return after <= self._choice.little_gap or before - after < POLICY.rounds.min_closed * before

    # Stage 4: polish.

    def _polish(self) -> None:
        """Search from the best schedule as long as that gains much: the rounds need not have ended there."""
        failures = 0
        for _ in range(self._choice.num_polishes):
            before, gap = self._overhead, self._open_gap
            if not self._orders.fits or gap <= EQUAL or self._task.is_late:
                return
            work = int(POLICY.polish.work * min(1.0, self._choice.effort))
            self._orders.improve(work, best_only=True, deadline=self._task.deadline)
            self._remove_redundant_runs()
            failures += before - self._orders.overhead < POLICY.polish.min_closed * gap
            forgiven = (gap > POLICY.gaps.far) + (gap > POLICY.gaps.wide)
            if failures > forgiven or gap <= max(self._stop_gap, self._choice.little_gap):
                return

    # The answer.

    def _proposal(self) -> Proposal:
        best, proof = self._orders.schedule, self._proof
        if not self._orders.fits:
            return Proposal(best, impossible=proof.impossible)
        overhead, order = self._orders.overhead, first_runs(best)
        optimal = not best.num_recomputed or proof.is_optimal(order, overhead)
        bound = proof.bound_for(order, overhead)
        return Proposal(best, bound=bound, given_bound=proof.given_bound, optimal=optimal)

    @property
    def _overhead(self) -> float:
        """The overhead of the best schedule, infinite while none fits."""
        return self._orders.overhead if self._orders.fits else math.inf

    @property
    def _open_gap(self) -> float:
        """See the head of this file; infinite while nothing fits.

        Once the proof is about another order, what is known about the given one does not count: the next search may
        beat it.
        """
        return self._overhead - self._proof.bound if self._orders.fits else math.inf

    @property
    def _proved_gap(self) -> float:
        """See the head of this file; infinite while nothing fits."""
        if not self._orders.fits:
            return math.inf
        overhead = self._orders.overhead
        return overhead - self._proof.bound_for(first_runs(self._orders.schedule), overhead)

    @property
    def _stop_gap(self) -> float:
        """See the head of this file."""
        return self._choice.stop_gap(self._orders.overhead)

    @property
    def _is_done(self) -> bool:
        close = self._orders.fits and self._open_gap <= max(self._stop_gap, EQUAL)
        return close or self._proof.is_hopeless or self._task.is_late

    def _report(self) -> None:
        seconds = time.perf_counter() - self._task.started
        if not self._orders.fits:
            self._task.progress(f"auto: nothing fits yet, least peak {self._orders.peak_bytes} bytes, {seconds:.1f} s")
            return
        best, gap = self._orders.overhead, self._proved_gap
        self._task.progress(
            f"auto: best overhead {best:.2%}, bound {best - gap:.2%}, gap {gap:.2%} of a step, {seconds:.1f} s"
        )
