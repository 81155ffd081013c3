"""Pricing several plans of one family and taking the best."""

from __future__ import annotations

from collections.abc import Iterable

from lowtide.graph.ir import Graph, ValueId
from lowtide.plan.base import Progress
from lowtide.plan.problem import Problem
from lowtide.schedule.expand import expand
from lowtide.schedule.steps import Schedule

_WORK = 400_000
_FEW = 8


def affordable(graph: Graph, plans: int) -> int:
    """Return how many of `plans` plans to price: all on ordinary graphs, fewer on graphs of many thousand ops."""
    return min(plans, max(_FEW, _WORK // max(1, len(graph.ops))))


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
