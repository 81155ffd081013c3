"""What is there at the peak of a step: the block that runs, what others keep, gradients, and the code between."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from lowtide.errors import InfeasibleBudgetError
from lowtide.graph.ir import Graph
from lowtide.plan.core.result import Outcome, Plan
from lowtide.plan.diagnose.infeasible import AskedBudget, budget_error
from lowtide.plan.diagnose.peak_parts import (
    Cause,
    Part,
    PeakFacts,
    graph_peak,
    op_in_words,
    peak_parts,
    sort_parts,
)
from lowtide.step.plan import StepPlan
from lowtide.units import counted, format_bytes


def plan_at_peak(step: StepPlan) -> Plan | None:
    """Return the plan of the block run in which the step peaks, as if its own peak were where the step's is.

    None if the step peaks in the code between blocks, or in a block that has no graph.
    """
    moment = step.trace.peak_moment
    plan = None if moment.kind == "gap" else step.plans[moment.index]
    if plan is None or not plan.schedule.steps:
        return None
    trace = plan.trace
    first, last = (0, trace.boundary) if moment.kind == "forward" else (trace.boundary, len(trace.bytes_during))
    at = max(range(first, last), key=lambda number: trace.bytes_during[number], default=None)
    if at is None:
        return None
    return replace(plan, trace=replace(trace, peak_step=at, peak_bytes=trace.bytes_during[at]))


def step_parts(step: StepPlan) -> tuple[Part, ...]:
    """Return what is there at the peak of a step by cause, largest first; the parts add up to the peak."""
    plan = plan_at_peak(step)
    own = list(peak_parts(plan)) if plan is not None else _opaque_part(step)
    kept = _kept_by_others(step)
    gradients = _gradients_behind(step)
    rest = step.peak_bytes - sum(part.bytes for part in own) - kept.bytes
    # What others keep is passed on between blocks as well: bytes must not be counted twice.
    behind = min(gradients, max(rest, 0))
    between = rest - behind
    if between < 0:
        kept = replace(kept, bytes=max(kept.bytes + between, 0))
    words = "parameter gradients of blocks whose backward has run"
    parts = [
        *own,
        kept,
        Part(Cause.GRADIENTS, behind, words, behind),
        Part(Cause.BETWEEN, max(between, 0), "held between blocks: their outputs, and what the code there makes"),
    ]
    return sort_parts(_merged(parts))


def step_peak_facts(step: StepPlan) -> PeakFacts:
    """Return the peak of the plan of a step."""
    plan = plan_at_peak(step)
    op = "the code there" if plan is None else op_in_words(plan)
    at = "" if plan is None else f", {op},"
    return PeakFacts(
        plan=step,
        peak_bytes=step.peak_bytes,
        parts=step_parts(step),
        planner=step.planner,
        op=op,
        moment=f"At that peak, in {step.peak_place}{at}",
        proved=step.outcome is Outcome.IMPOSSIBLE,
    )


def peak_facts(plan: Plan | StepPlan) -> PeakFacts:
    """Return the peak of a plan of either kind."""
    return step_peak_facts(plan) if isinstance(plan, StepPlan) else graph_peak(plan)


def infeasible_step(step: StepPlan, asked: AskedBudget) -> InfeasibleBudgetError:
    """Return the error that says why `step`, the plan of least peak known, does not fit the budget."""
    peak = step_peak_facts(step)
    whole = asked.whole_bytes or step.baseline_peak_bytes
    proof = f"The step has {counted(len(step.choice), 'block run')}; {_of_choices(peak.proved)}"
    return budget_error(asked, peak, least_bytes=step.peak_bytes, whole_bytes=whole, proof=proof)


def _of_choices(proved: bool) -> str:
    if proved:
        return "it is proved that no choice among the plans of its blocks fits."
    return "no choice among the plans of its blocks that fits was found."


def _opaque_part(step: StepPlan) -> list[Part]:
    """Return the block that runs at the peak, if it has no graph."""
    moment = step.trace.peak_moment
    if moment.kind == "gap":
        return []
    variant = step.variants[moment.index]
    size = variant.forward_peak if moment.kind == "forward" else variant.forward_after + variant.backward_peak
    return [Part(Cause.OP, size, f"{step.blocks[moment.index]} while it runs", 0)]


def _kept_by_others(step: StepPlan) -> Part:
    """Return what the blocks keep for backward whose backward is still to come, without the one that runs."""
    moment, count = step.trace.peak_moment, len(step.choice)
    # In a gap of backward, as many runs are left as gaps follow.
    left = moment.index if moment.kind != "gap" or moment.index <= count else 2 * count + 1 - moment.index
    kept = [variant.forward_after for variant in step.variants[:left]]
    largest = [g for g in step.groups if g.first < left]
    group = max(largest, key=lambda g: g.count * step.variants[g.first].forward_after, default=None)
    each = (
        ""
        if group is None
        else (
            f"; the most is {format_bytes(step.variants[group.first].forward_after)} each in {group.name}"
            if group.count > 1
            else f"; the most is {format_bytes(step.variants[group.first].forward_after)} in {group.name}"
        )
    )
    return Part(Cause.BLOCKS, sum(kept), f"kept for backward by {counted(left, 'other block run')}{each}")


def _gradients_behind(step: StepPlan) -> int:
    """Return the bytes of parameter gradients of the blocks whose backward has run at the peak."""
    moment, count = step.trace.peak_moment, len(step.choice)
    if moment.kind == "forward" or (moment.kind == "gap" and moment.index <= count):
        return 0
    done = moment.index + 1 if moment.kind == "backward" else 2 * count + 1 - moment.index
    return sum(_parameter_gradients(plan.problem.graph) for plan in step.plans[done:] if plan is not None)


def _parameter_gradients(graph: Graph) -> int:
    """Return the bytes of returned gradients that have the sizes of parameters."""
    parameters = Counter(value.bytes for value in graph.values if value.kind == "parameter")
    returned = Counter(graph.values[value].bytes for value in graph.held if graph.values[value].kind == "gradient")
    return sum(size * number for size, number in (parameters & returned).items())


def _merged(parts: list[Part]) -> list[Part]:
    """Return the parts with those of one cause as one."""
    found: dict[Cause, Part] = {}
    for part in parts:
        known = found.get(part.cause)
        if known is None or not known.bytes:
            found[part.cause] = part
        elif part.bytes:
            words = known.words if known.words == part.words else "parameter gradients, of this block and of others"
            total, floor = known.bytes + part.bytes, known.floor_bytes + part.floor_bytes
            found[part.cause] = Part(part.cause, total, words, floor)
    return list(found.values())
