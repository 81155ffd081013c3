"""A plan that the user gives: it serves the graph, or the blocks, that it was made for, and no others."""

from __future__ import annotations

from lowtide.capture.program import Program
from lowtide.errors import PlanFileError
from lowtide.plan.core.result import Plan
from lowtide.plan.menu import Entry
from lowtide.step.plan import StepPlan


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


def given_menu(step: StepPlan, program: Program) -> tuple[Entry, ...] | None:
    """Return the plans that the plan of a step has for a block with the graph of `program`, or None if it has none.

    Which of them a run of the block takes is chosen again in every step, as what the code between blocks holds is seen
    only there.
    """
    for menu in step.menus:
        if menu and menu[0].problem.graph.fingerprint == program.graph.fingerprint:
            return tuple(Entry(plan, None, 0.0) for plan in menu)
    return None


def made_for_other_blocks(step: StepPlan, program: Program) -> PlanFileError:
    """Return the error for the plan of a step that has no plans for a graph of this call."""
    names = ", ".join(dict.fromkeys(name or "(top)" for name in step.blocks))
    return PlanFileError(
        f"The plan is of a step of other blocks: it has plans for {names:.200}, and this call has a block of "
        f"{len(program.graph.ops)} ops with fingerprint {program.graph.fingerprint}, which is none of them. Give the "
        "blocks= that the plan was made with; model, input shapes, dtypes, train mode and PyTorch version must be "
        "the same, too. Or plan again, or pass budget= as well to plan other blocks."
    )
