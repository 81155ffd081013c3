"""Choosing moments: one after the other, each time the one with which the linear relaxation says most."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lowtide.graph.ir import OpId
from lowtide.plan.bounds.cutting import Cutter
from lowtide.plan.bounds.hints import Hint, schedule_of
from lowtide.plan.bounds.program import Limits
from lowtide.plan.bounds.timeline import Timeline
from lowtide.plan.bounds.window import Window
from lowtide.plan.problem import Problem


# How many candidates for moments each of both measures gives, and their least distance.
_CANDIDATES = 8
_DISTANCE = 4
# How many candidates are left after each stage.
_NARROW = (8, 6, 5, 4, 4, 4, 4, 4)


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


def refinements(problem: Problem, limits: Limits, *, stages: int) -> Iterator[Proof]:
    """Yield ever stronger proofs, one for each set of moments tried.

    Args:
        problem: The problem; its budget is below the peak of plain training.
        limits: Limits of each stage but for the time, which all stages share.
        stages: How many moments to use at most.
    """
    deadline = time.perf_counter() + limits.seconds
    timeline = Timeline.of(problem)
    promising = _candidates(problem, timeline)
    proof = Proof(0.0, ())
    for stage in range(stages):
        relaxed: dict[OpId, tuple[float, Cutter]] = {}
        overflow = None if proof.hint is None else _overflow(problem, proof.hint)
        for candidate in dict.fromkeys([*([] if overflow is None else [overflow]), *promising]):
            if relaxed and time.perf_counter() > deadline:
                break
            cutter = Cutter(Window(timeline, (*proof.moments, candidate)))
            answer = cutter.relax(seconds=deadline - time.perf_counter())
            if answer.bound >= limits.enough:
                yield Proof(answer.bound, cutter.window.moments)
                return
            relaxed[candidate] = answer.bound, cutter
        order = sorted(relaxed, key=lambda candidate: -relaxed[candidate][0])
        chosen = dict.fromkeys([*order[:1], *([overflow] if overflow in relaxed else [])])
        found: list[Proof] = []
        for candidate in chosen:
            left = deadline - time.perf_counter()
            share = left / (len(chosen) - len(found)) / (1 if stage == stages - 1 else 3)
            cutter = relaxed[candidate][1]
            answer = cutter.solve(Limits(share, limits.work, limits.gap, limits.enough))
            bound = max(answer.bound, relaxed[candidate][0], proof.bound)
            found.append(Proof(bound, cutter.window.moments, cutter.hint(answer)))
            if bound >= limits.enough:
                break
        if not found:
            return
        proof = max(found, key=lambda each: each.bound)
        yield proof
        if proof.bound >= limits.enough or time.perf_counter() > deadline:
            return
        promising = [candidate for candidate in order if candidate not in proof.moments][: _NARROW[stage]]


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
            if count == _CANDIDATES:
                break
    return chosen


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
