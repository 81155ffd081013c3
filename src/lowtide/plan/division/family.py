"""Pricing several plans of one family and taking the best."""

from __future__ import annotations

from collections.abc import Iterable

from lowtide.graph.ir import ValueId
from lowtide.plan.base import Progress
from lowtide.plan.problem import Problem
from lowtide.schedule.expand import expand
from lowtide.schedule.steps import Schedule


def best_of(problem: Problem, choices: Iterable[set[ValueId]], progress: Progress) -> Schedule:
    """Return the fastest schedule that fits the budget, else the one with the least peak, among sets of kept values.

    Of equal ones the first is returned. The budget decides which one wins but not which are tried.
    """
    best: Schedule | None = None
    best_key = (True, 0.0, 0.0)
    tried: set[frozenset[ValueId]] = set()
    for kept in choices:
        if frozenset(kept) in tried:
            continue
        tried.add(frozenset(kept))
        schedule = expand(problem.graph, kept)
        trace = problem.price(schedule)
        if problem.fits(trace):
            key = (False, trace.seconds, float(trace.peak_bytes))
        else:
            key = (True, float(trace.peak_bytes), trace.seconds)
        if best is None or key < best_key:
            best, best_key = schedule, key
    progress(f"priced {len(tried)} ways to divide forward")
    assert best is not None, "there is at least one choice"
    return best
