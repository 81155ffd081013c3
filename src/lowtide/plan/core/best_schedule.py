"""The best of several schedules, for planners whose algorithm knows nothing of the true peak."""

from __future__ import annotations

from collections.abc import Iterable

from lowtide.plan.core.problem import Problem
from lowtide.schedule.simulate import Trace
from lowtide.schedule.steps import Schedule


def best_of(problem: Problem, schedules: Iterable[Schedule]) -> Schedule:
    """Return the fastest of `schedules` that fits the budget, or the one with the least peak if none does.

    The first of equals wins. Each schedule is priced by the simulator; there must be at least one.
    """
    return best_priced(problem, ((schedule, problem.price(schedule)) for schedule in dict.fromkeys(schedules)))


def best_priced(problem: Problem, candidates: Iterable[tuple[Schedule, Trace]]) -> Schedule:
    """Return the same as `best_of` for schedules that come with their trace."""
    best: tuple[bool, float, float] | None = None
    chosen: Schedule | None = None
    for schedule, trace in candidates:
        fits = problem.fits(trace)
        key = (False, trace.seconds, trace.peak_bytes) if fits else (True, trace.peak_bytes, trace.seconds)
        if best is None or key < best:
            best, chosen = key, schedule
    assert chosen is not None, "there must be at least one schedule"
    return chosen
