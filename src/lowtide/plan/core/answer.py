"""The answer of a plan without its question, as a plain dictionary for JSON: for who has the question already."""

from __future__ import annotations

from typing import Any

from lowtide.graph.io import read_fields, read_float, read_ids, read_int, read_str
from lowtide.plan.core.problem import Problem
from lowtide.plan.core.result import Outcome, Plan
from lowtide.schedule.steps import Schedule
from lowtide.schedule.verify import verify

FIELDS = {"planner", "outcome", "bound", "given_bound", "min_peak_bytes", "seconds", "forward", "backward"}


def answer_to_dict(plan: Plan) -> dict[str, Any]:
    """Return what `plan` says about its problem, as lists, numbers and strings."""
    return {
        "planner": plan.planner,
        "outcome": plan.outcome.name,
        "bound": plan.bound,
        "given_bound": plan.given_bound,
        "min_peak_bytes": plan.min_peak_bytes,
        "seconds": plan.seconds,
        "forward": list(plan.schedule.forward),
        "backward": list(plan.schedule.backward),
    }


def answer_from_dict(data: object, problem: Problem) -> Plan | None:
    """Return the plan that `data` describes as an answer to `problem`, verified and priced here.

    None if it says of itself that it fits and does not, or names an outcome that there is not.
    Raises `InvalidGraphError` or `InvalidScheduleError` if it is no answer at all.
    """
    fields = read_fields(data, "The answer", FIELDS)
    outcome = Outcome.__members__.get(read_str(fields["outcome"], "outcome"))
    if outcome is None:
        return None
    schedule = Schedule(read_ids(fields["forward"], "forward"), read_ids(fields["backward"], "backward"))
    verify(problem.graph, schedule)
    trace = problem.price(schedule)
    if outcome not in (Outcome.IMPOSSIBLE, Outcome.OVER_BUDGET) and not problem.fits(trace):
        return None
    bound, given = fields["bound"], fields["given_bound"]
    return Plan(
        problem=problem,
        schedule=schedule,
        trace=trace,
        planner=read_str(fields["planner"], "planner"),
        outcome=outcome,
        bound=None if bound is None else read_float(bound, "bound"),
        given_bound=None if given is None else read_float(given, "given_bound"),
        min_peak_bytes=read_int(fields["min_peak_bytes"], "min_peak_bytes"),
        seconds=read_float(fields["seconds"], "seconds"),
    )
