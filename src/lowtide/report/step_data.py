"""What the report of a step of several blocks shows, as plain lists, numbers and strings."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from lowtide.analysis.planner_comparison import Comparison
from lowtide.errors import InvalidOptionError
from lowtide.plan.core.result import Plan
from lowtide.step.peak import step_parts
from lowtide.step.plan import SENTENCES, StepPlan
from lowtide.step.words import moment_in_words
from lowtide.units import counted


@dataclass(frozen=True)
class ShownBlock:
    """A block with one of its plans, which runs in the step.

    Attributes:
        id: Its place in the page.
        name: The block.
        block: Its number.
        variant: Which plan of its menu it is.
        plan: The plan; its budget is its own peak.
    """

    id: str
    name: str
    block: int
    variant: int
    plan: Plan


def shown_blocks(step: StepPlan) -> tuple[ShownBlock, ...]:
    """Return the distinct pairs of block and plan of a step, in the order of their first runs."""
    pairs = dict.fromkeys(zip(step.problem.instances, step.choice, strict=True))
    found = []
    for block, variant in pairs:
        menu = step.menus[block]
        if menu and menu[variant].schedule.steps:
            plan = menu[variant]
            own = replace(plan, problem=replace(plan.problem, budget_bytes=max(plan.peak_bytes, 1)))
            name = step.problem.blocks[block].name or "(top)"
            found.append(ShownBlock(f"block-{block}-{variant}", name, block, variant, own))
    return tuple(found)


def step_report_data(step: StepPlan, comparison: Comparison | None = None) -> dict[str, Any]:
    """Return everything that a report of `step` shows, but the plans of its blocks.

    Raises:
        InvalidOptionError: `comparison` is about another step or graph.
    """
    if comparison is not None and comparison.fingerprint != step.fingerprint:
        raise InvalidOptionError(
            f"The comparison is about another step, of {comparison.num_ops} ops ({comparison.fingerprint}); this one "
            f"has {step.num_ops} ({step.fingerprint}). Compare planners on the model that was planned."
        )
    return {
        "summary": _summary(step),
        "moments": [moment_in_words(step.blocks, moment) for moment in step.trace.moments],
        # A gap before and after every run of forward.
        "boundary": 2 * len(step.choice) + 1,
        "planned": list(step.trace.peaks),
        "plain": list(step.plain.peaks),
        "rows": _rows(step),
        "parts": [{"cause": part.cause.value, "bytes": part.bytes, "words": part.words} for part in step_parts(step)],
    }


def _summary(step: StepPlan) -> dict[str, Any]:
    return {
        "planner": step.planner,
        "outcome": step.outcome.name,
        "cut": step.cut,
        "sentence": SENTENCES[step.outcome],
        "runs": counted(len(step.choice), "block run"),
        "peak_place": step.peak_place,
        "peak_bytes": step.peak_bytes,
        "baseline_peak_bytes": step.baseline_peak_bytes,
        "budget_bytes": step.budget_bytes,
        "min_peak_bytes": step.min_peak_bytes,
        "saved_bytes": step.saved_bytes,
        "baseline_saved_bytes": step.plain.levels[2 * len(step.choice)],
        "overhead": step.overhead,
        "bound": step.bound,
        "gap": step.gap,
        "step_seconds": step.baseline_seconds + step.extra_seconds,
        "baseline_seconds": step.baseline_seconds,
        "num_ops": step.num_ops,
        "num_recomputed": step.num_recomputed,
        "planning_seconds": step.seconds,
        "costs": step.costs_source,
        "fingerprint": step.fingerprint,
    }


def _rows(step: StepPlan) -> list[dict[str, Any]]:
    places = {(each.block, each.variant): each.id for each in shown_blocks(step)}
    pairs = zip(step.rows, step.groups, strict=True)
    return [asdict(row) | {"id": places.get((group.block, group.variant))} for row, group in pairs]
