"""Choosing moments: ever more of them, each time the one with which the linear relaxation says most."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from lowtide.graph.ir import OpId
from lowtide.plan.bounds.integer_program import FREE, Answer, Limits
from lowtide.plan.bounds.lifetimes import Floats, Timeline
from lowtide.plan.bounds.moment_program import Window
from lowtide.plan.bounds.relaxed_solution import Hint, schedule_of
from lowtide.plan.bounds.row_generation import Cutter
from lowtide.plan.core.problem import Problem
from lowtide.schedule.steps import Schedule

# How many candidates for moments each of both measures gives, and their least distance, in ops and as a share of all:
# neighbours say the same.
_CANDIDATES = 8
_DISTANCE, _SPREAD = 4, 1 / 100
# The least distance of further moments that are tried, from those of the proof and from each other, as such a share.
_APART = 1 / 30
# The more ops beyond this number, the fewer candidates.
_FEW_OPS = 500
# How many candidates are tried at most for each further moment, fewer in large graphs.
_TRIED = 5
# How many of them are where the last solution exceeds the budget.
_OVERFLOWS = 2
# The share of the budget from which on a schedule has next to nothing to spare.
_SCARCE = 0.97
# How many moments one stage adds at most, and by how much, as a share of the step, the relaxation must rise with each
# but the first of them; a third of it if whole numbers add nothing.
_MOST_AT_ONCE = 3
_MUCH = 0.003
# A stage adds no moment that brings less than this.
_LITTLE = 2e-4
# About the seconds that the relaxation of a program takes, in terms of its rows to the power of 1.5, and how many times
# the work of whole numbers all relaxations of a stage may take.
_SECONDS_OF_ROWS = 2.5e-7
_RELAXING = 1.5
# A program with more rows than this says too little for its time: no further moment is added to it.
_MOST_ROWS = 60_000
# First runs that need this share of what the neediest one needs may be moments so close to each other, in ops.
_NEEDY = 0.8
_CLOSE = 2
# How many times the work of another program one gets in whole numbers to which no moment can be added, once, where the
# schedule is farther from the bound than a share of the step.
_WORK_AGAIN = 1.7
_FAR = 0.02
# How many moments a glance has.
_GLANCED = 4
# How far below the bound a relaxation may be for its program to be solved: whole numbers can add as much.
_NEARLY = 0.005
# Where whole numbers have added less, they are left out if the schedule is farther than this from the relaxation and
# they have been tried with several moments, or if the graph has more ops than this and the program many rows.
_WIDE = 0.04
_MANY_OPS = 1_000
# Where whole numbers have added this share of the step to a relaxation, they get more work and leave more to gain.
_WHOLE = 0.01
_WORK_WHOLE = 1.0
# How many moments are added at once with which the relaxation says no more, where whole numbers have added much.
_UNSEEN = 2
# Programs with several moments and more rows than this get less work in whole numbers, which does little for them.
_MANY_ROWS = 5_000


@dataclass(frozen=True, slots=True)
class Proof:
    """A bound on the overhead and the program that proves it.

    Attributes:
        bound: No schedule has less overhead; infinite if none fits.
        moments: The moments of the program.
        hint: The solution of the latest program that has one, or None.
    """

    bound: float
    moments: tuple[OpId, ...]
    hint: Hint | None = None


@dataclass(frozen=True, slots=True)
class _Relaxed:
    """A program and its relaxation."""

    cutter: Cutter
    answer: Answer

    @property
    def moments(self) -> tuple[OpId, ...]:
        return self.cutter.window.moments

    @property
    def num_rows(self) -> int:
        return len(self.cutter.window.program.rows)


class Refiner:
    """Ever stronger proofs for one problem, whose budget is below the peak of plain training: more moments each time.

    Attributes:
        proof: The best proof so far.
        done: Whether another stage would bring nothing.
    """

    def __init__(self, problem: Problem) -> None:
        self.proof = Proof(0.0, ())
        self.done = False
        self._problem = problem
        self._timeline = Timeline.of(problem)
        candidates = _candidates(problem, self._timeline)
        # What the relaxation gained with each candidate when it was last tried.
        self._gains = dict.fromkeys(candidates, FREE)
        own = self._timeline.own
        most = max(own[op] for op in candidates)
        needy = _scarcest(problem, own, _CLOSE, candidates)
        self._needy = frozenset(op for op in (*candidates, *needy) if own[op] > _NEEDY * most)
        self._gains |= {op: FREE for op in needy if op in self._needy}
        self._latest: _Relaxed | None = None
        self._again = False
        # What whole numbers have added to a relaxation, and whether they were tried with several moments.
        self._whole, self._tried = 0.0, False

    def glance(self, *, seconds: float) -> Proof:
        """Return what the relaxation says with a few moments that are likely to matter, without trying others."""
        own, during = self._timeline.own, self._problem.baseline.bytes_during
        needy = sorted(self._gains, key=lambda op: -own[op])
        full = sorted(self._gains, key=lambda op: -during[op])
        moments = self._apart([needy[0], full[0], *needy], ())[:_GLANCED]
        bound = self._relax(moments, time.perf_counter() + seconds).answer.bound
        if bound > self.proof.bound:
            self.proof = Proof(bound, tuple(sorted(moments)), self.proof.hint)
        return self.proof

    def advance(self, limits: Limits, known: Schedule | None = None) -> Proof:
        """Add moments, and return the best proof; the time of `limits` is for all of it.

        Where a `known` schedule, the best one there is, has no memory to spare, a moment may say much.
        """
        deadline = time.perf_counter() + limits.seconds
        for op in [] if known is None else _scarce(self._problem, known):
            self._gains.setdefault(op, FREE)
        before = self._latest
        if before is None:
            self._begin(limits, deadline)
        else:
            self._grow(before, limits, deadline)
            if self._latest is before and self._whole > _WHOLE:
                self._grow_unseen(before, limits, deadline)
        latest = self._latest
        assert latest is not None, "there is at least one candidate"
        work = self._work(latest, limits)
        if latest is before:
            work = None if work is None else _WORK_AGAIN * work
            self.done = self._again or not _FAR < limits.enough - self.proof.bound < FREE
            self._again = True
        if not self.done:
            self._solve(latest, replace(limits, work=work), deadline)
        self.done |= self._is_enough(limits)
        return self.proof

    def _begin(self, limits: Limits, deadline: float) -> None:
        """Take the candidate whose relaxation says most."""
        for candidate in self._gains:
            relaxed = self._relax((candidate,), deadline)
            self._gains[candidate] = relaxed.answer.bound
            if self._latest is None or relaxed.answer.bound > self._latest.answer.bound:
                self._latest = relaxed
            if relaxed.answer.bound >= limits.enough or time.perf_counter() > deadline:
                break

    def _grow(self, latest: _Relaxed, limits: Limits, deadline: float) -> None:
        """Add those of the candidates with which the relaxation says most, one by one."""
        left = FREE if limits.work is None else _RELAXING * limits.work
        for number in range(_MOST_AT_ONCE):
            best: _Relaxed | None = None
            for candidate in self._to_try(latest):
                # With more moments a candidate rarely brings more than it did before.
                if best is not None and self._gains.get(candidate, FREE) < best.answer.bound - latest.answer.bound:
                    continue
                relaxed = self._relax((*latest.cutter.window.history, candidate), deadline)
                left -= _SECONDS_OF_ROWS * relaxed.num_rows**1.5
                self._gains[candidate] = relaxed.answer.bound - latest.answer.bound
                if best is None or relaxed.answer.bound > best.answer.bound:
                    best = relaxed
                if left <= 0 or time.perf_counter() > deadline or relaxed.answer.bound >= limits.enough:
                    break
            needed = _LITTLE if not number else _MUCH if self._whole > _NEARLY else _MUCH / 3
            if best is None or best.answer.bound < min(limits.enough, latest.answer.bound + needed):
                return
            self._latest = latest = best
            if left <= 0 or time.perf_counter() > deadline or latest.answer.bound >= limits.enough:
                return

    def _grow_unseen(self, latest: _Relaxed, limits: Limits, deadline: float) -> None:
        """Add the neediest of the candidates, far from the bound: whole numbers can say more where fractions do not."""
        if limits.enough - self.proof.bound > _FAR and self._can_grow(latest, _UNSEEN):
            needy = self._apart(sorted(self._gains, key=lambda op: -self._timeline.own[op]), latest.moments)
            if needy:
                self._latest = self._relax((*latest.cutter.window.history, *needy[:_UNSEEN]), deadline)

    def _can_grow(self, latest: _Relaxed, count: int) -> bool:
        """Whether the program would still say enough for its time with as many moments more."""
        return latest.num_rows / len(latest.moments) * (len(latest.moments) + count) <= _MOST_ROWS

    def _to_try(self, latest: _Relaxed) -> list[OpId]:
        """Return where a further moment may say most: where the last solution goes wrong, and where it said most."""
        if not self._can_grow(latest, 1):
            return []
        hint = self.proof.hint
        overflow = [] if hint is None else _overflow(self._problem, hint)
        order = sorted(self._gains, key=lambda candidate: -self._gains[candidate])
        return self._apart((*overflow, *order), latest.moments)[: max(2, _fewer(_TRIED, self._problem))]

    def _apart(self, candidates: Iterable[OpId], moments: Iterable[OpId]) -> list[OpId]:
        """Return those of the candidates that are not close to a moment or to a candidate before them."""
        least = _APART * len(self._problem.graph.ops)
        taken, found = list(moments), []
        for candidate in dict.fromkeys(candidates):
            distance = _CLOSE if candidate in self._needy else least
            if all(abs(candidate - other) >= distance for other in taken):
                taken.append(candidate)
                found.append(candidate)
        return found

    def _relax(self, moments: Iterable[OpId], deadline: float) -> _Relaxed:
        cutter = Cutter(Window(self._timeline, moments))
        return _Relaxed(cutter, cutter.relax(seconds=max(0.1, deadline - time.perf_counter())))

    def _work(self, latest: _Relaxed, limits: Limits) -> float | None:
        """Return how much work the program gets in whole numbers."""
        if limits.work is None or len(latest.moments) == 1:
            return limits.work
        if self._whole > _WHOLE:
            return _WORK_WHOLE * limits.work
        return limits.work * min(1.0, _MANY_ROWS / max(1, latest.num_rows))

    def _solve(self, latest: _Relaxed, limits: Limits, deadline: float) -> None:
        """Solve a program in whole numbers if that may say more than is known."""
        simple, answer = latest.answer, latest.answer
        nearly = simple.bound + max(_NEARLY, self._whole) >= self.proof.bound
        large = len(self._problem.graph.ops) > _MANY_OPS and latest.num_rows > _MANY_ROWS
        wide = self._tried and limits.enough - simple.bound > _WIDE
        in_vain = len(latest.moments) > 1 and self._whole < _NEARLY and (large or wide)
        if nearly and simple.bound < limits.enough and not in_vain:
            answer = latest.cutter.solve(replace(limits, seconds=max(0.1, deadline - time.perf_counter())))
            self._whole = max(self._whole, min(1.0, answer.bound) - simple.bound)
            self._tried |= len(latest.moments) > 1
        # A solution with fewer moments tells the search more than the rounded one of a solver that ran out of work.
        hint = latest.cutter.hint(answer) or self.proof.hint or latest.cutter.hint(simple)
        bound = max(answer.bound, simple.bound)
        if bound > self.proof.bound:
            self.proof = Proof(bound, latest.moments, hint)
        else:
            self.proof = replace(self.proof, hint=hint)

    def _is_enough(self, limits: Limits) -> bool:
        return self.proof.bound >= limits.enough or self.proof.bound == FREE


def _candidates(problem: Problem, timeline: Timeline) -> list[OpId]:
    """Return first runs at which memory is scarce: most is alive in plain training, or most is needed whatever is kept.

    Of neighbours only the one where it is scarcest counts.
    """
    during = np.array(problem.baseline.bytes_during, dtype=np.float64)
    chosen = [int(np.argmax(during))]
    distance = max(_DISTANCE, _SPREAD * len(during))
    for bytes_at in (timeline.own, during):
        chosen += _scarcest(problem, bytes_at, distance, chosen)
    return chosen


def _scarcest(problem: Problem, bytes_at: Floats, distance: float, chosen: Sequence[OpId]) -> list[OpId]:
    """Return some first runs with most `bytes_at`, each so far from the others and from those `chosen` already.

    Where plain training is within the budget, there is nothing to say.
    """
    during, found = problem.baseline.bytes_during, list[OpId]()
    for op in np.argsort(-bytes_at, kind="stable").tolist():
        if during[op] <= problem.budget_bytes or any(abs(op - other) < distance for other in (*chosen, *found)):
            continue
        found.append(op)
        if len(found) == _fewer(_CANDIDATES, problem):
            break
    return found


def _fewer(count: int, problem: Problem) -> int:
    """Return `count`, or less for a large graph, whose programs take long."""
    return max(1, min(count, count * _FEW_OPS // max(1, len(problem.graph.ops))))


def _overflow(problem: Problem, hint: Hint) -> list[OpId]:
    """Return the first runs at which the schedule of `hint` exceeds the budget most, between two moments each."""
    highest = _highest(problem, schedule_of(problem.graph, hint))
    highest[list(hint.moments)] = 0
    ends = [0, *sorted(hint.moments), len(highest)]
    worst = [start + int(np.argmax(highest[start:end])) for start, end in pairwise(ends) if start < end]
    over = [op for op in worst if highest[op] > problem.budget_bytes]
    return sorted(over, key=lambda op: -highest[op])[:_OVERFLOWS]


def _scarce(problem: Problem, schedule: Schedule) -> list[OpId]:
    """Return the first runs at which `schedule` has next to nothing to spare, the last ones first.

    Of neighbours only the one where it has least counts.
    """
    highest = _highest(problem, schedule)
    distance = max(_DISTANCE, _SPREAD * len(highest))
    chosen: list[OpId] = []
    for op in np.argsort(-highest, kind="stable").tolist():
        if highest[op] < _SCARCE * problem.budget_bytes:
            break
        if all(abs(op - other) >= distance for other in chosen):
            chosen.append(op)
    return sorted(chosen, reverse=True)


def _highest(problem: Problem, schedule: Schedule) -> Floats:
    """Return the highest bytes of `schedule` at every first run; a repeated run counts for the next first one."""
    during, steps = problem.price(schedule).bytes_during, schedule.steps
    highest = np.zeros(len(problem.graph.ops))
    is_first = [False] * len(steps)
    seen: set[OpId] = set()
    for step, op in enumerate(steps):
        is_first[step] = op not in seen
        seen.add(op)
    owner = steps[-1]
    for step in range(len(steps) - 1, -1, -1):
        owner = steps[step] if is_first[step] else owner
        highest[owner] = max(highest[owner], during[step])
    return highest
