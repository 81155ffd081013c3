"""The best of several schedules, for planners whose algorithm knows nothing of the true peak."""

from __future__ import annotations

from collections.abc import Iterable

from lowtide.plan.problem import Problem
from lowtide.schedule.steps import Schedule


def best_of(problem: Problem, schedules: Iterable[Schedule]) -> Schedule:
    """Return the fastest of `schedules` that fits the budget, or the one with the least peak if none does.

    The first of equals wins. Each schedule is priced by the simulator; there must be at least one.
    """
    best: tuple[bool, float, float] | None = None
    chosen: Schedule | None = None
    for schedule in dict.fromkeys(schedules):
        trace = problem.price(schedule)
        fits = problem.fits(trace)
        key = (False, trace.seconds, trace.peak_bytes) if fits else (True, trace.peak_bytes, trace.seconds)
        if best is None or key < best:
            best, chosen = key, schedule
    assert chosen is not None, "best_of needs at least one schedule"
    return chosen
