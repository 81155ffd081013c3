"""`auto`: the best of all planners, improved by a search and bounded by a proof, until both are close enough.

Source: ours. Memory model: the simulator's; every op may run any number of times. Optimal where the proof meets the
schedule, which the plan then says; never worse than a planner that it asks.

1. Every planner of the list that serves the problem proposes a schedule.
2. Where a descent does well with the first runs in another order, the search goes on in that order, or in both.
3. In rounds, the search takes the best schedule further by taking parts out and mending them another way, while the
   proof looks at more moments of the step on another core. Some searches begin anew, for a search can be caught: at
   plain training and down to the budget in strides, or by running again what the solution behind the proof does. The
   proof is about the given order; once the schedule is faster than that allows, about the order of the search.
4. They end when the overhead is within `gap` of the proved bound, when a round has brought little, after as many as
   `effort` allows, or when the time is up. Short searches then polish the schedule while that brings much.

Without a time limit the answer is the same every time: all work is counted in steps. Cost: that of the list, then some
seconds per unit of effort, little of it where the proof is met early.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import count

from lowtide.errors import InvalidOptionError
from lowtide.graph.ir import OpId
from lowtide.plan.auto import rounds
from lowtide.plan.auto.proof_state import EQUAL, Claims
from lowtide.plan.auto.rounds import ROUNDS, Round, Start
from lowtide.plan.bounds.integer_program import Limits
from lowtide.plan.bounds.least_peak import least_peak_bytes
from lowtide.plan.bounds.moment_selection import Proof
from lowtide.plan.bounds.prover import Prover
from lowtide.plan.core.options import check_numbers
from lowtide.plan.core.planner import AbstractPlanner, Proposal
from lowtide.plan.core.problem import Problem
from lowtide.plan.orders.order_search import Sides, first_runs
from lowtide.progress import Progress, silent
from lowtide.schedule.steps import Schedule
from lowtide.schedule.verify import verify

_LITTLE = 0.3
# The share of its work that the proof gets in large graphs, where the relaxations it begins with take long.
_LARGE_PROOF = 0.4
# Above this number of ops the programs of the proof take too long.
_MOST_OPS = 6_000
# Up to this number of ops the proof is not worth a process of its own, nor where so many seconds are all there is.
_FEW_OPS, _HURRY = 150, 5.0
# Above this number of ops, planners whose work grows faster than linearly are left out, and one round is enough.
_LARGE = 4_000
# From this number of ops on, the gap that is close enough grows with it, for so does the time of a round.
_SMALL = 500
# The planner that begins with plain descents, and looks for the least memory where these do not reach the budget.
_DESCENT = "greedy"
# A gap that is wide.
_WIDE = 0.04
# The share of its overhead by which a search must have lowered it to be gone on with at once.
_RISING = 0.1
# How many rounds at least a proof that begins anew gets.
_ANEW = 2
# The share of the best overhead, before the search, that the bound of the given order must at least be for the proof to
# turn to the order of the best schedule where the given one is far behind.
_NEARLY = 0.95
# How often the proof may turn to another order.
_MOST_TURNS = 2
# The work of a search beside a first glance at what can be proved.
_GLANCE = 500_000
# The work of one last search, how many there are at most, and the share of the gap that one must close for another.
_POLISH = 1_200_000
_MOST_POLISH = 8
# How many of them in large graphs are beside the proof of the first round, which takes longest, if the gap is wide.
_MORE = 3
_WORTH = 0.03


@dataclass(frozen=True, kw_only=True)
class Auto(AbstractPlanner):
    """Take the cheapest schedule that fits, else the one with the least peak; say how much better there could be.

    Attributes:
        planners: The planners to run first, by name; earlier ones win ties.
        slow: Those of them that are left out for large graphs.
        late: Those of them that, but for small graphs, are only asked if nothing else fits, and left out for those of
            more than 1,000 ops.
        effort: How much work to do, 1 by default; 10 is thorough.
        gap: Overhead, as a share of the step, within which of the proved bound the search ends; beyond 500 ops, up to
            an effort of 1, it is taken to be larger in proportion to their number.
        time_limit: Seconds after which it ends as soon as it can, or None. The planners of the list are not cut short.
        seed: Of the random numbers.
        starts: Schedules known already: the answer is no worse than any of them that fits.
    """

    planners: Mapping[str, AbstractPlanner]
    slow: frozenset[str] = frozenset()
    late: frozenset[str] = frozenset()
    effort: float = 1.0
    gap: float = 0.002
    time_limit: float | None = None
    seed: int = 0
    starts: tuple[Schedule, ...] = ()

    def __post_init__(self) -> None:
        """Check the options."""
        check_numbers(self)
        if not all(isinstance(planner, AbstractPlanner) for planner in self.planners.values()):
            raise InvalidOptionError(f"The planners are {self.planners!r:.80}; they must be planners by name.")
        for name in ("effort", "gap", "seed"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise InvalidOptionError(f"The {name} is {value}; it must be a number of at least 0.")
        if self.time_limit is not None and not (isinstance(self.time_limit, int | float) and self.time_limit > 0):
            raise InvalidOptionError(f"The time limit is {self.time_limit!r}; it must be a number of seconds above 0.")
        if not isinstance(self.starts, tuple) or not all(isinstance(start, Schedule) for start in self.starts):
            raise InvalidOptionError(f"The starts are {self.starts!r:.80}; they must be a tuple of schedules.")

    def supports(self, problem: Problem) -> str | None:
        """Return the planners' reasons if none of them serves `problem`."""
        reasons = {name: planner.supports(problem) for name, planner in self.planners.items()}
        if any(reason is None for reason in reasons.values()):
            return None
        return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())

    def propose(self, problem: Problem, progress: Progress = silent) -> Proposal:
        """Return the best schedule found and the bound proved."""
        if problem.fits(problem.baseline):
            return Proposal(Schedule.keep_all(problem.graph), bound=0.0, optimal=True)
        # A process of its own takes as long to start as a small graph takes to plan.
        at_leisure = self.time_limit is None or self.time_limit > _HURRY
        apart = self.effort > 0 and at_leisure and _FEW_OPS < len(problem.graph.ops) <= _MOST_OPS
        with Prover(apart=apart) as prover:
            work = _Work(self, problem, prover, progress)
            work.ask_planners()
            if self.effort:
                # In large graphs it takes about as long as to look around.
                if work.is_large:
                    work.begin_glance()
                work.sides.look_around(given=work.descends_late, until=work.deadline(), progress=progress)
            work.ask_late()
            if not work.sides.fits:
                work.offer_starts()
            if self.effort:
                work.run_rounds()
            work.offer_starts()
            if self.effort:
                work.polish()
                # Nothing to do unless the last search has left the proof behind.
                work.run_rounds(at_most=0)
            return work.proposal()


class _Work:
    """One call of `Auto.propose`."""

    def __init__(self, auto: Auto, problem: Problem, prover: Prover, progress: Progress) -> None:
        self.auto, self.problem, self.prover, self.progress = auto, problem, prover, progress
        self.num_ops, self.started = len(problem.graph.ops), time.perf_counter()
        self.sides = Sides(problem, seed=auto.seed)
        self.claims = Claims(self.sides.view, impossible=least_peak_bytes(problem) > problem.budget_bytes)
        growth = 1.0 if auto.effort > 1 else max(1.0, self.num_ops / _SMALL)
        self.gap = auto.gap * growth
        # What a first glance at the given order has begun to find.
        self.glancing: Callable[[], Proof] | None = None
        # Whether the last search went on from the best schedule and found a much better one: then so does the next.
        self.rises = False
        # The gap left after each round with this proof.
        self.left: list[float] = []

    def ask_planners(self) -> None:
        """Offer the schedules of the planners to the search."""
        for schedule in self.auto.starts:
            verify(self.problem.graph, schedule)
        left_out = self.auto.slow if self.num_ops > _LARGE else frozenset()
        late = self.auto.late if self.num_ops > rounds.MEDIUM else frozenset()
        for name in self.auto.planners:
            if name not in left_out | late and not (name == _DESCENT and self.descends_late):
                self._ask(name)

    @property
    def descends_late(self) -> bool:
        """Whether plain descents in all orders come before that planner of the list which goes on from its own."""
        return self.auto.effort > 0 and _DESCENT in self.auto.planners and self.num_ops > rounds.MEDIUM

    def offer_starts(self) -> None:
        """Take a schedule known already if it is better; not at first, for it would keep the search near it."""
        for schedule in self.auto.starts:
            self.sides.take(schedule)

    def ask_late(self) -> None:
        """Ask those that may still have an answer where the others have none, and no other order has either."""
        if self.descends_late and not self.sides.fits:
            self.progress("auto: descending as low as possible")
            self.sides.go_low()
        for name in self.auto.planners:
            if name in self.auto.late and rounds.MEDIUM < self.num_ops <= rounds.MANY and not self.sides.fits:
                self._ask(name, last=False)

    def _ask(self, name: str, *, last: bool = True) -> None:
        planner = self.auto.planners[name]
        if planner.supports(self.problem) is not None:
            return
        self.progress(f"auto: asking {name}")
        proposal = planner.propose(self.problem, silent)
        verify(self.problem.graph, proposal.schedule)
        self.sides.offer(proposal.schedule, last=last)
        if proposal.bound is not None:
            self.claims.note(proposal.bound)

    def run_rounds(self, at_most: int | None = None) -> None:
        """Improve the schedule and the bound until they are close enough or the effort is spent.

        There are `at_most` rounds, but always some for a proof that begins anew.
        """
        last = 0
        if at_most is None:
            self._glance()
        for number in count():
            if self._must_turn():
                self._turn()
                # While nothing fits, how far the search goes must not depend on the budget by way of the proof.
                last = number + _ANEW if self.sides.fits else last
            # There are more of them as soon as something fits.
            enough = self._num_rounds() if at_most is None else at_most
            if last:
                enough = max(enough, last + self._num_more())
            turned = not self.claims.is_about_given
            stalled = self.auto.effort <= 1 and rounds.has_stalled(self.left, self.num_ops, turned=turned)
            if self._is_done() or number >= enough or stalled:
                return
            # That nothing fits is only said of the given order.
            worth_proving = self.sides.fits or self.claims.is_about_given
            if self.prover.problem is None and worth_proving and self.num_ops <= _MOST_OPS:
                self.prover.turn_to(self.claims.about.problem)
            self._run_round(ROUNDS[number % len(ROUNDS)])

    def _run_round(self, planned: Round) -> None:
        """Search while the proof goes on."""
        scale = max(1.0, self.auto.effort / 4)
        # While nothing fits, all that the proof can still tell is that nothing does, and it does so early.
        proof = (planned.proof if self.sides.fits else _LITTLE) * scale * (_LARGE_PROOF if self.is_large else 1.0)
        limits = Limits(self._seconds_left(), proof, self.gap / 10, self._enough())
        hint = self.claims.about.ops_outward(self.prover.hint)
        known = self.claims.about.inward(self.sides.schedule) if self.sides.fits else None
        proving = None if self.prover.problem is None or self.prover.done else self.prover.advance(limits, known)
        for start, work in self._searches(planned):
            # The last planner of the list has looked for less memory already.
            self._search(start, int(work * scale if self.sides.fits else _LITTLE * work * scale), hint)
        if proving is not None:
            self.claims.note(proving().bound)
            self._follow()
        if self.sides.fits:
            self.left.append(self._left())
        self._report()

    def begin_glance(self) -> None:
        """Begin a first glance at what can be proved."""
        if self.glancing is None and self.num_ops <= _MOST_OPS and not self.claims.impossible:
            self.prover.turn_to(self.claims.about.problem)
            self.glancing = self.prover.glance(seconds=self._seconds_left())

    def _glance(self) -> None:
        """Let the proof be about the order of the best schedule if the given one is behind and seems to stay there."""
        behind = self.sides.given_is_behind
        if behind:
            self.begin_glance()
        if self.glancing is None:
            return
        if behind:
            self._search(Start.BEST, int(_GLANCE * min(1.0, self.auto.effort)), ())
        self.claims.note(self.glancing().bound)
        if behind and self.claims.latest >= _NEARLY * self.sides.overhead:
            self._turn()

    def _turn(self) -> None:
        """Let the proof be about the order of the best schedule from now on."""
        self.claims.turn(self.sides.view)
        self.prover.turn_to(None)
        self.left.clear()

    def polish(self) -> None:
        """Search on where the best schedule is, as long as that brings much: the rounds need not have ended there."""
        failures = 0
        for _ in range(_MOST_POLISH - (_MORE if self.is_large else 0)):
            before = self.sides.overhead
            left = self._left()
            if not self.sides.fits or left <= EQUAL or time.perf_counter() >= self.deadline():
                return
            self.sides.improve(int(_POLISH * min(1.0, self.auto.effort)), best=True, until=self.deadline())
            self._let_wait()
            failures += before - self.sides.overhead < _WORTH * left
            if failures > (left > rounds.FAR) + (left > _WIDE) or left <= max(
                self.gap, rounds.little_gap(self.num_ops)
            ):
                return

    def proposal(self) -> Proposal:
        """Return the answer."""
        best = self.sides.schedule
        if not self.sides.fits:
            return Proposal(best, impossible=self.claims.impossible)
        overhead, order = self.sides.overhead, first_runs(best)
        optimal = not best.num_recomputed or self.claims.is_optimal(order, overhead)
        bound, given = self.claims.bound(order, overhead), self.claims.given_bound
        return Proposal(best, bound=bound, given_bound=given, optimal=optimal)

    def _must_turn(self) -> bool:
        """Whether there is nothing left to prove about the order so far, but there is about that of the search."""
        if self.claims.about is self.sides.view or self.claims.num_turns == _MOST_TURNS:
            return False
        overhead = self.sides.overhead if self.sides.fits else math.inf
        met = self.claims.is_about_given or overhead - self.claims.latest <= EQUAL
        return met and self.claims.beats_given(overhead)

    def _searches(self, planned: Round) -> list[tuple[Start, int]]:
        """Return the searches of a round; where the gap is wide, the proof takes long, and there are more of them."""
        wide = self.sides.fits and self._left() > _WIDE
        chosen = rounds.searches_in_large_graphs(planned, wide=wide) if self.is_large else [*planned.searches]
        more = _MORE if self.is_large and self.claims.is_about_given and not self.left else 1
        return [*chosen, *[(Start.BEST, _POLISH)] * more] if wide else chosen

    def _search(self, start: Start, work: int, hint: Collection[OpId]) -> None:
        before = self.sides.overhead if self.sides.fits else math.inf
        # Once the proof is about the order of the best schedule, others have had their turns.
        best = self.rises or not self.claims.is_about_given
        if start is Start.PROOF and hint and not self.rises:
            self.sides.improve(work, hint=hint, best=best, until=self.deadline())
        else:
            anew = start is not Start.BEST and not self.rises
            self.sides.improve(work, anew=anew, best=best, until=self.deadline())
        self._let_wait()
        onward = self.rises or start is Start.BEST
        self.rises = onward and math.inf > before > (1 + _RISING) * self.sides.overhead

    def _follow(self) -> None:
        """Take what the solution behind the proof does, mended: where few moments decide, it is close to the best."""
        suggestion = self.prover.suggestion
        if suggestion is not None and self.sides.fits and time.perf_counter() < self.deadline():
            self.sides.mend(self.claims.about, suggestion)
            self._let_wait()

    def _let_wait(self) -> None:
        """Let ops wait where they may as well, which changes the order, unless the proof is about that by now."""
        if self.claims.is_about_given:
            self.sides.let_wait()

    def _num_rounds(self) -> int:
        if self.auto.effort <= 1 and (self.num_ops > _LARGE or not self.sides.fits):
            return 1
        return max(1, round(len(ROUNDS) * min(self.auto.effort, 2.0))) + self._num_more()

    def _num_more(self) -> int:
        """Return how many rounds more there are where much is left, unless they are dear."""
        if self.auto.effort > 1 or self.is_large:
            return 0
        gap = self._gap() if self.sides.fits else math.inf
        return (gap > rounds.FAR) + (gap > _WIDE)

    @property
    def is_large(self) -> bool:
        """Whether rounds are dear, and not wanted all the same."""
        return self.auto.effort <= 1 and self.num_ops > rounds.MANY

    def _enough(self) -> float:
        """Return the bound with which the search may end; a little more, so that rounding does not matter."""
        return self.sides.overhead - 0.999 * self.gap if self.sides.fits else float("inf")

    def deadline(self) -> float:
        """Return when to end, in seconds of `time.perf_counter`."""
        return float("inf") if self.auto.time_limit is None else self.started + self.auto.time_limit

    def _seconds_left(self) -> float:
        return max(0.1, self.deadline() - time.perf_counter())

    def _left(self) -> float:
        """Return what the best schedule has above what the proof has come to so far; infinite if none fits.

        Once it is about another order, what is known about the given one does not count: the next search may beat it.
        """
        return self.sides.overhead - self.claims.latest if self.sides.fits else math.inf

    def _gap(self) -> float:
        """Return what the best schedule has above what is known about its order or, if it is no better, the given."""
        return self.sides.overhead - self.claims.bound(first_runs(self.sides.schedule), self.sides.overhead)

    def _is_done(self) -> bool:
        close = self._left() <= max(self.gap, EQUAL)
        hopeless = math.isinf(self.claims.latest) or (self.claims.impossible and self.claims.is_about_given)
        return close or hopeless or time.perf_counter() > self.deadline()

    def _report(self) -> None:
        seconds = time.perf_counter() - self.started
        if not self.sides.fits:
            self.progress(f"auto: nothing fits yet, least peak {self.sides.peak_bytes} bytes, {seconds:.1f} s")
            return
        best, gap = self.sides.overhead, self._gap()
        self.progress(
            f"auto: best overhead {best:.2%}, bound {best - gap:.2%}, gap {gap:.2%} of a step, {seconds:.1f} s"
        )
