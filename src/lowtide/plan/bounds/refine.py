"""Choosing moments: one after the other, each time the one with which the linear relaxation says most."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from lowtide.graph.ir import OpId
from lowtide.plan.bounds.cutting import Cutter
from lowtide.plan.bounds.hints import Hint, schedule_of
from lowtide.plan.bounds.program import Answer, Limits
from lowtide.plan.bounds.timeline import Timeline
from lowtide.plan.bounds.window import Window
from lowtide.plan.problem import Problem
from lowtide.schedule.steps import Schedule

# How many candidates for moments each of both measures gives, and their least distance.
_CANDIDATES = 8
_DISTANCE = 4
# The least distance of a further moment from those of the proof, as a share of all ops: neighbours say the same.
_APART = 1 / 50
# How many candidates are looked at again in the second stage and in later ones: programs get harder with each moment.
_NARROW = (6, 3)
# Up to this number of ops; the more ops beyond it, the fewer candidates.
_FEW_OPS = 500
# A program with more rows than this says too little for its time: no further moment is added to it.
_MOST_ROWS = 12_000
# By how much, as a share of the step, a moment must raise the bound of the linear relaxation to count as much, and how
# many such are added at once.
_MUCH = 0.003
_MOST_AT_ONCE = 2
# Where the schedule is farther from the bound than this share of the step, memory is so scarce that single moments say
# little: several of the first runs that need most memory are moments at once.
_FAR = 0.02
_TOGETHER = 7
# How much of what the neediest first run needs the others of these need at least.
_NEEDY = 0.85
_MOST_ROWS_TOGETHER = 20_000
# How many times the work of another program theirs gets in whole numbers.
_WORK_TOGETHER = 1.7
# How far below the bound their relaxation may be: whole numbers can add as much.
_NEARLY = 0.005
# Programs with several moments and more rows than this get less work in whole numbers, which does little for them.
_MANY_ROWS = 5_000


@dataclass(frozen=True, slots=True)
class Proof:
    """A bound on the overhead and the program that proves it.

    Attributes:
        bound: No schedule has less overhead; infinite if none fits.
        moments: The moments of the program.
        hint: The best solution of the program that was found, or None.
    """

    bound: float
    moments: tuple[OpId, ...]
    hint: Hint | None = None


class Refiner:
    """Ever stronger proofs for one problem, whose budget is below the peak of plain training: a moment more each time.

    Attributes:
        proof: The best proof so far.
        done: Whether another stage would bring nothing.
    """

    def __init__(self, problem: Problem) -> None:
        self.proof = Proof(0.0, ())
        self.done = False
        self._problem = problem
        self._timeline = Timeline.of(problem)
        self._promising = _candidates(problem, self._timeline)
        own = self._timeline.own
        most = max(own[op] for op in self._promising)
        self._needy = sorted((op for op in self._promising if own[op] > _NEEDY * most), key=lambda op: -own[op])
        self._num_rows = 0

    @property
    def hint(self) -> frozenset[OpId]:
        """The ops that run again in the solution behind the best proof, as far as one is known."""
        return frozenset() if self.proof.hint is None else frozenset().union(*self.proof.hint.rerun)

    @property
    def suggestion(self) -> Schedule | None:
        """What the solution behind the best proof does, as a schedule, if one is known; it may not fit."""
        return None if self.proof.hint is None else schedule_of(self._problem.graph, self.proof.hint)

    def advance(self, limits: Limits) -> Proof:
        """Add the moment that seems best, and return the best proof; the time of `limits` is for all of it.

        While linear relaxations alone say much more with every moment, several are added.
        """
        deadline = time.perf_counter() + limits.seconds
        if len(self.proof.moments) > 1 and _FAR < limits.enough - self.proof.bound < float("inf"):
            together = self._look_together(limits, deadline)
            if together:
                return self._settle([together], limits)
        for _ in range(_MOST_AT_ONCE):
            overflow = None if self.proof.hint is None else _overflow(self._problem, self.proof.hint)
            relaxed = self._relax(overflow, deadline, limits.enough)
            order = sorted(relaxed, key=lambda candidate: -relaxed[candidate][0].bound)
            if not order:
                break
            answer, cutter = relaxed[order[0]]
            if answer.bound >= limits.enough:
                return self._settle([Proof(answer.bound, cutter.window.moments, cutter.hint(answer))], limits)
            much = answer.bound > self.proof.bound + _MUCH and self.proof.moments
            if not much or self._is_too_large(len(cutter.window.moments)) or time.perf_counter() > deadline:
                break
            self.proof = Proof(answer.bound, cutter.window.moments, cutter.hint(answer))
            self._promising = self._apart(order[1:])[:1]
        chosen = list(dict.fromkeys([*order[:1], *([overflow] if overflow in relaxed else [])]))
        found: list[Proof] = []
        work = limits.work
        if work is not None and self.proof.moments:
            work *= min(1.0, _MANY_ROWS / max(1, self._num_rows))
        for candidate in chosen:
            share = 1 / (len(chosen) - len(found))
            left = share * max(0.1, deadline - time.perf_counter())
            simple, cutter = relaxed[candidate]
            answer = cutter.solve(Limits(left, None if work is None else share * work, limits.gap, limits.enough))
            work = None if work is None else work - answer.work
            hint = cutter.hint(answer) or cutter.hint(simple)
            found.append(Proof(max(answer.bound, simple.bound), cutter.window.moments, hint))
            if found[-1].bound >= limits.enough:
                break
        count = _fewer(_NARROW[bool(self.proof.moments)], self._problem)
        proof = self._settle(found, limits)
        self._promising = self._apart([candidate for candidate in order if candidate not in chosen])[:count]
        return proof

    def _look_together(self, limits: Limits, deadline: float) -> Proof | None:
        """Return the better of the proof and what the neediest first runs as moments prove; None if that looks less."""
        needy, self._needy = self._needy, []
        rows_each = max(1.0, self._num_rows / len(self.proof.moments))
        moments = needy[: min(_TOGETHER, int(_MOST_ROWS_TOGETHER / rows_each))]
        if len(moments) <= len(self.proof.moments):
            return None
        cutter = Cutter(Window(self._timeline, moments))
        simple = cutter.relax(seconds=max(0.1, deadline - time.perf_counter()))
        if simple.bound < self.proof.bound - _NEARLY:
            return None
        work = None if limits.work is None else _WORK_TOGETHER * limits.work
        answer = cutter.solve(replace(limits, seconds=max(0.1, deadline - time.perf_counter()), work=work))
        bound = max(answer.bound, simple.bound)
        if bound <= self.proof.bound:
            return self.proof
        self._num_rows = len(cutter.window.program.rows)
        # A solution with fewer moments tells the search more than a rounded one.
        return Proof(bound, cutter.window.moments, cutter.hint(answer) or self.proof.hint)

    def _apart(self, candidates: list[OpId]) -> list[OpId]:
        """Return those of the candidates that are not close to a moment of the proof."""
        least = _APART * len(self._problem.graph.ops)
        return [one for one in candidates if all(abs(one - moment) >= least for moment in self.proof.moments)]

    def _relax(self, overflow: OpId | None, deadline: float, enough: float) -> dict[OpId, tuple[Answer, Cutter]]:
        """Return what the linear relaxation says with each candidate, up to the first that is enough."""
        relaxed: dict[OpId, tuple[Answer, Cutter]] = {}
        for candidate in dict.fromkeys([*([] if overflow is None else [overflow]), *self._promising]):
            if relaxed and time.perf_counter() > deadline:
                break
            cutter = Cutter(Window(self._timeline, (*self.proof.moments, candidate)))
            answer = cutter.relax(seconds=max(0.1, deadline - time.perf_counter()))
            relaxed[candidate] = answer, cutter
            self._num_rows = len(cutter.window.program.rows)
            if answer.bound >= enough:
                break
        return relaxed

    def _settle(self, found: list[Proof], limits: Limits) -> Proof:
        if not found:
            self.done = True
            return self.proof
        best = max(found, key=lambda proof: proof.bound)
        self.proof = Proof(max(best.bound, self.proof.bound), best.moments, best.hint)
        self.done = (
            self.proof.bound >= limits.enough
            or self.proof.bound == float("inf")
            or self._is_too_large(len(self.proof.moments))
        )
        return self.proof

    def _is_too_large(self, moments: int) -> bool:
        """Whether a program with one moment more than `moments` would have too many rows, judged by the last one."""
        return self._num_rows * (moments + 1) > _MOST_ROWS * moments


def _candidates(problem: Problem, timeline: Timeline) -> list[OpId]:
    """Return first runs at which memory is scarce: most is alive in plain training, or most is needed whatever is kept.

    Of neighbours only the one where it is scarcest counts.
    """
    during = np.array(problem.baseline.bytes_during, dtype=np.float64)
    chosen = [int(np.argmax(during))]
    for bytes_at in (timeline.own, during):
        order = np.argsort(-bytes_at, kind="stable").tolist()
        count = 0
        for op in order:
            if during[op] <= problem.budget_bytes or any(abs(op - other) < _DISTANCE for other in chosen):
                continue
            chosen.append(op)
            count += 1
            if count == _fewer(_CANDIDATES, problem):
                break
    return chosen


def _fewer(count: int, problem: Problem) -> int:
    """Return `count`, or less for a large graph, whose programs take long."""
    return max(1, min(count, count * _FEW_OPS // max(1, len(problem.graph.ops))))


def _overflow(problem: Problem, hint: Hint) -> OpId | None:
    """Return where the schedule of `hint` exceeds the budget most, as a first run that is not yet a moment."""
    schedule = schedule_of(problem.graph, hint)
    during = np.array(problem.price(schedule).bytes_during)
    steps = np.array(schedule.steps)
    _, first = np.unique(steps, return_index=True)
    # Every step counts for the next first run, so that repeated runs count where they are needed.
    owner = np.minimum(np.searchsorted(first, np.arange(len(steps))), len(first) - 1)
    highest = np.zeros(len(first))
    np.maximum.at(highest, owner, during)
    highest[list(hint.moments)] = 0
    worst = int(np.argmax(highest))
    return worst if highest[worst] > problem.budget_bytes else None
