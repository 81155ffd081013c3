"""Choosing moments: one where most is alive, then one after the other where the solution so far would overflow."""

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


@dataclass(frozen=True, slots=True)
class Proof:
    """A bound on the overhead and the program that proves it.

    Attributes:
        bound: No schedule has less overhead; infinite if none fits.
        moments: The moments of the program.
        hint: The best solution of the program that was found, or None.
        complete: Whether the hint is a schedule that fits, so that it is optimal but for the gap between both.
    """

    bound: float
    moments: tuple[OpId, ...]
    hint: Hint | None = None
    complete: bool = False


def refinements(problem: Problem, limits: Limits, *, stages: int) -> Iterator[Proof]:
    """Yield ever stronger proofs, one for each set of moments tried.

    Args:
        problem: The problem; its budget is below the peak of plain training.
        limits: Limits of each stage but for the time, which all stages share.
        stages: How many sets of moments to try at most.
    """
    deadline = time.perf_counter() + limits.seconds
    timeline = Timeline.of(problem)
    moments = [int(np.argmax(problem.baseline.bytes_during))]
    best = 0.0
    for stage in range(stages):
        cutter = Cutter(Window(timeline, moments))
        relaxed = cutter.relax(seconds=deadline - time.perf_counter())
        best = max(best, relaxed.bound)
        if relaxed.infeasible or best >= limits.enough or relaxed.point is None:
            yield Proof(best, tuple(moments))
            return
        left = deadline - time.perf_counter()
        share = left if stage == stages - 1 else left / 3
        answer = cutter.solve(Limits(share, limits.nodes, limits.gap, limits.enough))
        best = max(best, answer.bound)
        hint = cutter.hint(answer)
        following = None if hint is None else _overflow(problem, hint)
        yield Proof(best, tuple(moments), hint, hint is not None and following is None)
        if following is None or answer.infeasible or best >= limits.enough or time.perf_counter() > deadline:
            return
        moments = sorted([*moments, following])


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
