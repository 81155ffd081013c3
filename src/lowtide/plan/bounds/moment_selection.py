"""Choosing the moments of the proof: ever more of them, each time the one with which the relaxation says most.

A `MomentSelector` goes through these stages:

- FIRST: it has no program. It takes the candidate whose relaxation proves most.
- GROWING: each call adds moments to the program as long as its relaxation rises, and solves it in integers.
- REPEATED: no moment could be added once, so the same program was solved again with more work.
- DONE: the bound is high enough, or no moment could be added a second time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import pairwise

import numpy as np

from lowtide.graph.ir import OpId
from lowtide.plan.bounds.integer_program import UNLIMITED, Answer, Limits
from lowtide.plan.bounds.lifetimes import Floats, Lifetimes
from lowtide.plan.bounds.moment_program import MomentProgram
from lowtide.plan.bounds.policy import CANDIDATES, GROWTH, INTEGERS
from lowtide.plan.bounds.relaxed_solution import RelaxedSolution, schedule_of
from lowtide.plan.bounds.row_generation import RowGenerator
from lowtide.plan.core.problem import Problem
from lowtide.schedule.steps import Schedule


@dataclass(frozen=True, slots=True)
class Proof:
    """A bound on the overhead and the program that proves it.

    Attributes:
        bound: No schedule has less overhead; infinite if none fits.
        moments: The moments of the program.
        solution: The solution of the latest program that has one, or None.
    """

    bound: float
    moments: tuple[OpId, ...]
    solution: RelaxedSolution | None = None


class Stage(Enum):
    """How far a `MomentSelector` has come; see the head of this file."""

    FIRST = auto()
    GROWING = auto()
    REPEATED = auto()
    DONE = auto()


@dataclass(frozen=True, slots=True)
class _Relaxed:
    """A program and the answer of its linear relaxation."""

    generator: RowGenerator
    answer: Answer

    @property
    def bound(self) -> float:
        return self.answer.bound

    @property
    def moments(self) -> tuple[OpId, ...]:
        return self.generator.moment_program.moments

    @property
    def history(self) -> tuple[OpId, ...]:
        return self.generator.moment_program.history

    @property
    def num_rows(self) -> int:
        return len(self.generator.moment_program.program.rows)

    def can_grow(self, count: int) -> bool:
        """Return whether the program would still say enough for its time with as many moments more."""
        return self.num_rows / len(self.moments) * (len(self.moments) + count) <= GROWTH.max_rows


@dataclass(frozen=True, slots=True)
class _IntegerGain:
    """What solving programs in integers has added to their relaxations.

    Attributes:
        most: The most that it has added.
        with_several: Whether a program of several moments was solved.
    """

    most: float = 0.0
    with_several: bool = False

    @property
    def is_much(self) -> bool:
        return self.most > INTEGERS.much_gain

    def after(self, program: _Relaxed, answer: Answer) -> _IntegerGain:
        """Return what is known after `program` had that `answer` in integers."""
        gained = min(1.0, answer.bound) - program.bound
        return _IntegerGain(max(self.most, gained), self.with_several or len(program.moments) > 1)

    def work(self, program: _Relaxed, work: float | None) -> float | None:
        """Return how much of the `work` the program gets: less if it is large and integers have added little."""
        if work is None or len(program.moments) == 1 or self.is_much:
            return work
        return work * min(1.0, INTEGERS.many_rows / max(1, program.num_rows))

    def may_help(self, program: _Relaxed, proof: Proof, enough: float, num_ops: int) -> bool:
        """Return whether solving `program` in integers may prove more than is proved, and is worth its time."""
        if program.bound >= enough or program.bound + max(INTEGERS.typical_gain, self.most) < proof.bound:
            return False
        large = num_ops > INTEGERS.many_ops and program.num_rows > INTEGERS.many_rows
        wide = self.with_several and enough - program.bound > INTEGERS.max_gap
        in_vain = len(program.moments) > 1 and self.most < INTEGERS.typical_gain
        return not (in_vain and (large or wide))


class MomentSelector:
    """Ever stronger proofs for one problem whose budget is below the peak of plain training.

    Attributes:
        proof: The best proof so far.
        stage: How far it has come.
    """

    def __init__(self, problem: Problem) -> None:
        self.proof = Proof(0.0, ())
        self.stage = Stage.FIRST
        self._problem = problem
        self._lifetimes = Lifetimes.of(problem)
        self._program: _Relaxed | None = None
        self._integers = _IntegerGain()
        candidates = _candidates(problem, self._lifetimes)
        own = self._lifetimes.own
        most = max(own[op] for op in candidates)
        needy = _scarcest(problem, own, CANDIDATES.needy_distance, candidates)
        self._needy = frozenset(op for op in (*candidates, *needy) if own[op] > CANDIDATES.needy_share * most)
        # What the relaxation gained with each candidate when it was last tried.
        self._gains = dict.fromkeys(candidates, UNLIMITED)
        self._gains |= {op: UNLIMITED for op in needy if op in self._needy}

    @property
    def done(self) -> bool:
        """Whether another call of `advance` would prove nothing more."""
        return self.stage is Stage.DONE

    def quick_bound(self, *, seconds: float) -> Proof:
        """Return what the relaxation proves with a few moments that are likely to matter, without trying others."""
        own, during = self._lifetimes.own, self._problem.baseline.bytes_during
        needy = sorted(self._gains, key=lambda op: -own[op])
        full = sorted(self._gains, key=lambda op: -during[op])
        moments = self._distant([needy[0], full[0], *needy], ())[: GROWTH.quick_moments]
        bound = self._relax(moments, time.perf_counter() + seconds).bound
        if bound > self.proof.bound:
            self.proof = Proof(bound, tuple(sorted(moments)), self.proof.solution)
        return self.proof

    def advance(self, limits: Limits, known: Schedule | None = None) -> Proof:
        """Add moments, solve the program, and return the best proof; the time of `limits` is for all of it.

        Where a `known` schedule, the best one there is, has no memory to spare, a moment may say much.
        """
        deadline = time.perf_counter() + limits.seconds
        for op in [] if known is None else _scarce(self._problem, known):
            self._gains.setdefault(op, UNLIMITED)
        before = self._program
        program = self._first(limits, deadline) if before is None else self._grown(before, limits, deadline)
        self._program = program
        work = self._integers.work(program, limits.work)
        if self.stage is Stage.FIRST:
            self.stage = Stage.GROWING
        elif program is before:
            work = None if work is None else INTEGERS.repeat_work * work
            is_far = INTEGERS.repeat_min_gap < limits.enough - self.proof.bound < UNLIMITED
            self.stage = Stage.REPEATED if is_far and self.stage is Stage.GROWING else Stage.DONE
        if not self.done:
            self._solve(program, replace(limits, work=work), deadline)
        if self.proof.bound >= limits.enough or self.proof.bound == UNLIMITED:
            self.stage = Stage.DONE
        return self.proof

    def _first(self, limits: Limits, deadline: float) -> _Relaxed:
        """Return the program of the candidate whose relaxation proves most."""
        best: _Relaxed | None = None
        for candidate in self._gains:
            relaxed = self._relax((candidate,), deadline)
            self._gains[candidate] = relaxed.bound
            if best is None or relaxed.bound > best.bound:
                best = relaxed
            if relaxed.bound >= limits.enough or time.perf_counter() > deadline:
                break
        assert best is not None, "there is at least one candidate"
        return best

    def _grown(self, program: _Relaxed, limits: Limits, deadline: float) -> _Relaxed:
        """Return the program with more moments, or the same if none is worth adding."""
        before, left = program, UNLIMITED if limits.work is None else GROWTH.relaxing_share * limits.work
        for number in range(GROWTH.max_added):
            best, left = self._best_addition(program, limits, left, deadline)
            if best is None or best.bound < min(limits.enough, program.bound + self._needed_gain(number)):
                break
            program = best
            if left <= 0 or time.perf_counter() > deadline or program.bound >= limits.enough:
                break
        if program is before and self._integers.is_much:
            return self._grown_unseen(program, limits, deadline)
        return program

    def _best_addition(
        self, program: _Relaxed, limits: Limits, left: float, deadline: float
    ) -> tuple[_Relaxed | None, float]:
        """Return the program with the candidate with which its relaxation proves most, and the work left."""
        best: _Relaxed | None = None
        for candidate in self._to_try(program):
            # With more moments a candidate rarely brings more than it did before.
            if best is not None and self._gains.get(candidate, UNLIMITED) < best.bound - program.bound:
                continue
            relaxed = self._relax((*program.history, candidate), deadline)
            left -= GROWTH.seconds_per_row * relaxed.num_rows**GROWTH.row_exponent
            self._gains[candidate] = relaxed.bound - program.bound
            if best is None or relaxed.bound > best.bound:
                best = relaxed
            if left <= 0 or time.perf_counter() > deadline or relaxed.bound >= limits.enough:
                break
        return best, left

    def _needed_gain(self, number: int) -> float:
        """Return how much the relaxation must rise for the moment with that `number` of a stage."""
        if not number:
            return GROWTH.min_first_gain
        return GROWTH.min_gain if self._integers.most > INTEGERS.typical_gain else GROWTH.min_gain_relaxed

    def _grown_unseen(self, program: _Relaxed, limits: Limits, deadline: float) -> _Relaxed:
        """Add the neediest candidates, far from the bound: integers can prove more where fractions do not."""
        if limits.enough - self.proof.bound > INTEGERS.repeat_min_gap and program.can_grow(GROWTH.unseen_moments):
            needy = self._distant(sorted(self._gains, key=lambda op: -self._lifetimes.own[op]), program.moments)
            if needy:
                return self._relax((*program.history, *needy[: GROWTH.unseen_moments]), deadline)
        return program

    def _to_try(self, program: _Relaxed) -> list[OpId]:
        """Return where a further moment may say most: where the last solution goes wrong, and where it said most."""
        if not program.can_grow(1):
            return []
        solution = self.proof.solution
        overflow = [] if solution is None else _overflow(self._problem, solution)
        order = sorted(self._gains, key=lambda candidate: -self._gains[candidate])
        return self._distant((*overflow, *order), program.moments)[: max(2, _fewer(CANDIDATES.tried, self._problem))]

    def _distant(self, candidates: Iterable[OpId], moments: Iterable[OpId]) -> list[OpId]:
        """Return those of the candidates that are not close to a moment or to a candidate before them."""
        usual = CANDIDATES.new_distance_share * len(self._problem.graph.ops)
        taken, found = list(moments), []
        for candidate in dict.fromkeys(candidates):
            distance = CANDIDATES.needy_distance if candidate in self._needy else usual
            if all(abs(candidate - other) >= distance for other in taken):
                taken.append(candidate)
                found.append(candidate)
        return found

    def _relax(self, moments: Iterable[OpId], deadline: float) -> _Relaxed:
        generator = RowGenerator(MomentProgram(self._lifetimes, moments))
        return _Relaxed(generator, generator.relax(seconds=max(0.1, deadline - time.perf_counter())))

    def _solve(self, program: _Relaxed, limits: Limits, deadline: float) -> None:
        """Take over what `program` proves, in integers if that may be more than is known."""
        answer = program.answer
        if self._integers.may_help(program, self.proof, limits.enough, len(self._problem.graph.ops)):
            answer = program.generator.solve(replace(limits, seconds=max(0.1, deadline - time.perf_counter())))
            self._integers = self._integers.after(program, answer)
        # A solution with fewer moments tells the search more than the rounded one of a solver that ran out of work.
        generator = program.generator
        solution = generator.solution(answer) or self.proof.solution or generator.solution(program.answer)
        bound = max(answer.bound, program.bound)
        if bound > self.proof.bound:
            self.proof = Proof(bound, program.moments, solution)
        else:
            self.proof = replace(self.proof, solution=solution)


def _candidates(problem: Problem, lifetimes: Lifetimes) -> list[OpId]:
    """Return first runs at which memory is scarce: most is alive in plain training, or most is needed whatever is kept.

    Of neighbours only the one where it is scarcest counts.
    """
    during = np.array(problem.baseline.bytes_during, dtype=np.float64)
    chosen = [int(np.argmax(during))]
    distance = max(CANDIDATES.min_distance, CANDIDATES.min_distance_share * len(during))
    for bytes_at in (lifetimes.own, during):
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
        if len(found) == _fewer(CANDIDATES.per_measure, problem):
            break
    return found


def _fewer(count: int, problem: Problem) -> int:
    """Return `count`, or less for a large graph, whose programs take long."""
    return max(1, min(count, count * CANDIDATES.few_ops // max(1, len(problem.graph.ops))))


def _overflow(problem: Problem, solution: RelaxedSolution) -> list[OpId]:
    """Return the first runs at which the schedule of `solution` exceeds the budget most, between two moments each."""
    highest = _highest(problem, schedule_of(problem.graph, solution))
    highest[list(solution.moments)] = 0
    ends = [0, *sorted(solution.moments), len(highest)]
    worst = [start + int(np.argmax(highest[start:end])) for start, end in pairwise(ends) if start < end]
    over = [op for op in worst if highest[op] > problem.budget_bytes]
    return sorted(over, key=lambda op: -highest[op])[: CANDIDATES.from_overflow]


def _scarce(problem: Problem, schedule: Schedule) -> list[OpId]:
    """Return the first runs at which `schedule` has next to nothing to spare, the last ones first.

    Of neighbours only the one where it has least counts.
    """
    highest = _highest(problem, schedule)
    distance = max(CANDIDATES.min_distance, CANDIDATES.min_distance_share * len(highest))
    chosen: list[OpId] = []
    for op in np.argsort(-highest, kind="stable").tolist():
        if highest[op] < CANDIDATES.scarce_share * problem.budget_bytes:
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
