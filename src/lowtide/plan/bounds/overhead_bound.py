"""The entry point: the strongest lower bound on a problem's overhead that the effort allows."""

from __future__ import annotations

import time
from dataclasses import dataclass

from lowtide.graph.ir import OpId
from lowtide.plan.bounds.integer_program import Limits
from lowtide.plan.bounds.least_peak import least_peak_bytes
from lowtide.plan.bounds.moment_selection import MomentSelector, Proof
from lowtide.plan.bounds.policy import PROGRAM
from lowtide.plan.bounds.relaxed_solution import RelaxedSolution
from lowtide.plan.core.problem import Problem
from lowtide.progress import Progress, silent


@dataclass(frozen=True, slots=True)
class Bound:
    """What is proved about every schedule of a problem whose first runs are in the given order.

    Attributes:
        overhead: No such schedule that fits has less overhead; infinite if none fits.
        infeasible: Whether it is proved that no such schedule fits the budget.
        moments: The ops at whose first runs the proof looks at what is alive.
        certificate: What is proved and for which schedules, for people.
        solutions: Solutions of the programs behind the proof, best bound first.
        seconds: Time taken.
    """

    overhead: float
    infeasible: bool
    moments: tuple[OpId, ...]
    certificate: str
    solutions: tuple[RelaxedSolution, ...] = ()
    seconds: float = 0.0


def overhead_bound(
    problem: Problem, *, seconds: float | None = None, effort: float = 1.0, progress: Progress = silent
) -> Bound:
    """Return a proved lower bound on the overhead of every schedule for `problem`.

    Args:
        problem: Graph, costs and budget.
        seconds: Time limit; None for none, and then the same answer every time.
        effort: How much work to do, 1 by default; more adds moments.
        progress: Receives a line of text now and then.
    """
    started = time.perf_counter()
    if problem.fits(problem.baseline):
        return _bound(problem, Proof(0.0, ()), started)
    if least_peak_bytes(problem) > problem.budget_bytes:
        return _bound(problem, Proof(float("inf"), ()), started)
    deadline = float("inf") if seconds is None else started + seconds
    selector = MomentSelector(problem)
    for _ in range(max(1, round(PROGRAM.bound_stages * effort))):
        selector.advance(
            Limits(seconds=deadline - time.perf_counter(), work=PROGRAM.bound_work * effort, gap=PROGRAM.bound_gap)
        )
        progress(f"bound: {selector.proof.bound:.2%} with {len(selector.proof.moments)} moments")
        if selector.done or time.perf_counter() > deadline:
            break
    return _bound(problem, selector.proof, started)


def certificate(problem: Problem, overhead: float, moments: tuple[OpId, ...]) -> str:
    """Return what is proved and for which schedules, for people."""
    infeasible = overhead == float("inf")
    what = (
        "no schedule fits the budget" if infeasible else f"no schedule that fits has less than {overhead:.2%} overhead"
    )
    where = ", ".join(problem.graph.ops[op].name for op in moments)
    text = (
        f"Within {problem.budget_bytes} bytes, {what}. This covers every schedule in which ops first run in the given "
        f"order, each in its own phase, and run again any number of times anywhere, at the given costs "
        f"({problem.costs.source})."
    )
    return f"{text} Proved by what is alive at the first run of {where}." if where else text


def _bound(problem: Problem, proof: Proof, started: float) -> Bound:
    return Bound(
        proof.bound,
        proof.bound == float("inf"),
        proof.moments,
        certificate(problem, proof.bound, proof.moments),
        (proof.solution,) if proof.solution else (),
        time.perf_counter() - started,
    )
