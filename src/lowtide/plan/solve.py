"""From a problem to a plan: ask a planner, check its answer, price it."""

from __future__ import annotations

import time

from lowtide.errors import InvalidOptionError, InvalidScheduleError, PlannerRefusedError
from lowtide.graph.verify import check_graph
from lowtide.plan import registry
from lowtide.plan.core.planner import AbstractPlanner, Proposal
from lowtide.plan.core.problem import Problem
from lowtide.plan.core.result import Outcome, Plan
from lowtide.plan.diagnose.infeasible import AskedBudget, infeasible
from lowtide.progress import Progress, silent
from lowtide.schedule.steps import Schedule
from lowtide.schedule.verify import verify


def solve(
    problem: Problem,
    planner: str | AbstractPlanner | Schedule = "auto",
    progress: Progress = silent,
    *,
    throw: bool = True,
    asked: AskedBudget | None = None,
) -> Plan:
    """Return the plan that `planner` finds for `problem`.

    Example:
        ```python
        plan = solve(Problem(graph, costs, budget_bytes=6 * 2**30), planner="greedy")
        plan.overhead
        ```

    Args:
        problem: Graph, costs and budget.
        planner: The name of a planner, a planner, or a ready schedule to check and price.
        progress: Receives a line of text now and then.
        throw: Raise `InfeasibleBudgetError` if the budget is not met; otherwise the plan's outcome says so.
        asked: The budget in the user's words, for the error's message, if the problem's is what is left of it.
    """
    check_graph(problem.graph)
    name, found = _named(planner)
    started = time.perf_counter()
    proposal = Proposal(found) if isinstance(found, Schedule) else _ask(problem, name, found, progress)
    seconds = time.perf_counter() - started
    try:
        verify(problem.graph, proposal.schedule)
    except InvalidScheduleError as error:
        raise InvalidScheduleError(f"The schedule of planner {name!r} is not legal. {error}") from None
    trace = problem.price(proposal.schedule)
    plan = Plan(
        problem=problem,
        schedule=proposal.schedule,
        trace=trace,
        planner=name,
        outcome=_outcome(problem, proposal, fits=problem.fits(trace)),
        bound=proposal.bound,
        given_bound=proposal.given_bound,
        min_peak_bytes=min(trace.peak_bytes, problem.baseline.peak_bytes),
        seconds=seconds,
    )
    if throw and not plan.fits:
        raise infeasible(plan, asked)
    return plan


def _named(planner: str | AbstractPlanner | Schedule) -> tuple[str, AbstractPlanner | Schedule]:
    """Return the name of a planner or ready schedule, and itself."""
    if isinstance(planner, Schedule):
        return "ready schedule", planner
    if isinstance(planner, str):
        return registry.normalise(planner), registry.get(planner)
    if isinstance(planner, AbstractPlanner):
        return registry.name_of(planner), planner
    raise InvalidOptionError(
        f"The planner is {planner!r:.80}; it must be a planner, a Schedule or one of {', '.join(registry.names())}."
    )


def _ask(problem: Problem, name: str, planner: AbstractPlanner, progress: Progress) -> Proposal:
    reason = planner.supports(problem)
    if reason is not None:
        raise PlannerRefusedError(f"Planner {name!r} cannot serve this problem: {reason}.")
    return planner.propose(problem, progress)


def _outcome(problem: Problem, proposal: Proposal, *, fits: bool) -> Outcome:
    if not fits:
        return Outcome.IMPOSSIBLE if proposal.impossible else Outcome.OVER_BUDGET
    if proposal.schedule == Schedule.keep_all(problem.graph):
        return Outcome.NOTHING_TO_DO
    return Outcome.OPTIMAL if proposal.optimal else Outcome.FITS
