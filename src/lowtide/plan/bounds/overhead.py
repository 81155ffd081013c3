"""The entry point: the strongest lower bound on a problem's overhead that the effort allows."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from lowtide.graph.ir import OpId
from lowtide.plan.base import Progress, silent
from lowtide.plan.bounds.cutting import Cutter
from lowtide.plan.bounds.hints import Hint
from lowtide.plan.bounds.least_peak import least_peak_bytes
from lowtide.plan.bounds.program import Limits
from lowtide.plan.bounds.timeline import Timeline
from lowtide.plan.bounds.window import Window
from lowtide.plan.problem import Problem

_GAP = 5e-4
_WORK = 5.0


@dataclass(frozen=True, slots=True)
class Bound:
    """What is proved about every schedule of a problem whose first runs are in the given order.

    Attributes:
        overhead: No such schedule that fits has less overhead; infinite if none fits.
        infeasible: Whether it is proved that no such schedule fits the budget.
        moments: The ops at whose first runs the proof looks at what is alive.
        certificate: What is proved and for which schedules, for people.
        hints: Solutions of the programs behind the proof, best bound first.
        seconds: Time taken.
    """

    overhead: float
    infeasible: bool
    moments: tuple[OpId, ...]
    certificate: str
    hints: tuple[Hint, ...] = ()
    seconds: float = 0.0


def overhead_bound(
    problem: Problem, *, seconds: float | None = None, effort: float = 1.0, progress: Progress = silent
) -> Bound:
    """Return a proved lower bound on the overhead of every schedule for `problem`.

    Args:
        problem: Graph, costs and budget.
        seconds: Time limit; None for none, and then the same answer every time.
        effort: How much work to do beyond the least, 1 by default.
        progress: Receives a line of text now and then.
    """
    started = time.perf_counter()
    if problem.fits(problem.baseline):
        return _bound(problem, 0.0, (), (), started)
    if least_peak_bytes(problem) > problem.budget_bytes:
        return _bound(problem, float("inf"), (), (), started)
    deadline = float("inf") if seconds is None else started + seconds
    moment = int(np.argmax(problem.baseline.bytes_during))
    progress(f"bound: moment {moment}")
    cutter = Cutter(Window(Timeline.of(problem), [moment]))
    relaxed = cutter.relax(seconds=deadline - time.perf_counter())
    if relaxed.infeasible:
        return _bound(problem, float("inf"), (moment,), (), started)
    answer = cutter.solve(Limits(seconds=deadline - time.perf_counter(), work=_WORK * effort, gap=_GAP))
    hint = cutter.hint(answer)
    return _bound(problem, max(relaxed.bound, answer.bound), (moment,), (hint,) if hint else (), started)


def _bound(
    problem: Problem, overhead: float, moments: tuple[OpId, ...], hints: tuple[Hint, ...], started: float
) -> Bound:
    infeasible = overhead == float("inf")
    what = (
        "no schedule fits the budget" if infeasible else f"no schedule that fits has less than {overhead:.2%} overhead"
    )
    where = ", ".join(problem.graph.ops[op].name for op in moments)
    certificate = (
        f"Within {problem.budget_bytes} bytes, {what}. This covers every schedule in which ops first run in the given "
        f"order, each in its own phase, and run again any number of times anywhere, at the given costs "
        f"({problem.costs.source})."
    )
    if where:
        certificate += f" Proved by what is alive at the first run of {where}."
    return Bound(overhead, infeasible, moments, certificate, hints, time.perf_counter() - started)
