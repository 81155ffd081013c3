"""A plan that the user gives: it serves the graph that it was made for, and no other."""

from __future__ import annotations

from lowtide.capture.program import Program
from lowtide.errors import PlanFileError
from lowtide.plan.core.result import Plan


def is_made_for(plan: Plan, program: Program) -> bool:
    """Return True if `plan` was made for the graph of `program`: the same ops, sizes and order."""
    return plan.problem.graph.fingerprint == program.graph.fingerprint


def made_for_another_graph(plan: Plan, program: Program) -> PlanFileError:
    """Return the error for a plan that is given for a graph it was not made for."""
    graph = plan.problem.graph
    return PlanFileError(
        f"The plan was made for another graph: it has {len(graph.ops)} ops and fingerprint {graph.fingerprint}, "
        f"this call has {len(program.graph.ops)} ops and fingerprint {program.graph.fingerprint}. Model, input "
        "shapes, dtypes, train mode and PyTorch version must be those the plan was made with; plan again, or pass "
        "budget= as well to plan other graphs."
    )
