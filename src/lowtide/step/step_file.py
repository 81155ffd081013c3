"""Plans of steps on disk: JSON in which every block's graph stands once, with all the plans of its menu.

Loading trusts nothing, as for plans of one graph: in addition, every variant must take what its plan takes, the choice
must be a legal one, and the step must peak where the file says.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

from lowtide.errors import PlanFileError
from lowtide.graph.io import read_fields, read_float, read_ids, read_int, read_list, read_str
from lowtide.plan.core.account import MemoryAccount, account_of
from lowtide.plan.core.plan_file import (
    STEP_FORMAT,
    check_header,
    cut_to_dict,
    graph_and_costs,
    loading,
    read_bound,
    read_cut,
    read_graph_and_costs,
    read_json,
    read_outcome,
    record_from_dict,
    record_to_dict,
    write_json_file,
)
from lowtide.plan.core.result import OUTCOMES, Outcome, Plan
from lowtide.step.plan_variant import plan_variant, same_price
from lowtide.step.problem import Block, Choice, Gap, StepProblem, Variant
from lowtide.step.verify import check_choice, step_peak

VERSION = 1
OVER = (Outcome.OVER_BUDGET, Outcome.IMPOSSIBLE)


@dataclass(frozen=True)
class StepRecord:
    """What a file holds of the plan of a step; see `StepPlan` for the meanings."""

    problem: StepProblem
    choice: Choice
    menus: tuple[tuple[Plan, ...], ...]
    planner: str
    outcome: Outcome
    bound: float | None
    min_peak_bytes: int
    baseline_seconds: float
    seconds: float
    account: MemoryAccount | None = None
    cut: str | None = None


_FIELDS = {
    *("format", "version", "planner", "outcome", "bound", "budget_bytes", "peak_bytes", "min_peak_bytes"),
    *("baseline_seconds", "seconds", "step", "blocks"),
}
_STEP_FIELDS = {"instances", "choice", "forward_gaps", "backward_gaps"}


def write_step(record: StepRecord, path: str | os.PathLike[str]) -> None:
    """Write `record` to `path`; a reader sees the old file or the whole new one, never a part."""
    problem = record.problem
    write_json_file(
        {
            "format": STEP_FORMAT,
            "version": VERSION,
            "planner": record.planner,
            "outcome": record.outcome.name,
            "bound": record.bound,
            "budget_bytes": problem.budget_bytes,
            "peak_bytes": step_peak(problem, record.choice),
            "min_peak_bytes": record.min_peak_bytes,
            "baseline_seconds": record.baseline_seconds,
            "seconds": record.seconds,
            **({} if record.account is None else {"account": record.account.to_dict()}),
            **cut_to_dict(record.cut),
            "step": {
                "instances": list(problem.instances),
                "choice": list(record.choice),
                "forward_gaps": [[gap.peak, gap.after] for gap in problem.forward_gaps],
                "backward_gaps": [[gap.peak, gap.after] for gap in problem.backward_gaps],
            },
            "blocks": {
                f"block {number}": _block_to_dict(block, menu)
                for number, (block, menu) in enumerate(zip(problem.blocks, record.menus, strict=True))
            },
        },
        path,
    )


def read_step(path: str | os.PathLike[str]) -> StepRecord:
    """Return what the file at `path` holds; raise `PlanFileError` if anything in it is not as it must be."""
    with loading(path):
        return step_from_dict(read_json(path))


def step_from_dict(data: object) -> StepRecord:
    """Return the record that `data` describes."""
    check_header(data, STEP_FORMAT, VERSION)
    fields = read_fields(data, "The plan", _FIELDS, {"account", "cut"})
    step = read_fields(fields["step"], "The step", _STEP_FIELDS)
    blocks = fields["blocks"]
    if not isinstance(blocks, dict) or list(blocks) != [f"block {number}" for number in range(len(blocks))]:
        raise PlanFileError('its blocks are not "block 0", "block 1" and so on.')
    read = [_block_from_dict(each, name) for name, each in blocks.items()]
    problem = StepProblem(
        blocks=tuple(block for block, _ in read),
        instances=read_ids(step["instances"], "instances"),
        forward_gaps=_gaps(step["forward_gaps"], "forward_gaps"),
        backward_gaps=_gaps(step["backward_gaps"], "backward_gaps"),
        budget_bytes=read_int(fields["budget_bytes"], "budget_bytes"),
    )
    choice = read_ids(step["choice"], "choice")
    return StepRecord(
        problem=problem,
        choice=choice,
        menus=tuple(menu for _, menu in read),
        planner=read_str(fields["planner"], "planner"),
        outcome=_checked_outcome(fields, problem, choice),
        bound=read_bound(fields["bound"]),
        min_peak_bytes=read_int(fields["min_peak_bytes"], "min_peak_bytes"),
        baseline_seconds=read_float(fields["baseline_seconds"], "baseline_seconds"),
        seconds=read_float(fields["seconds"], "seconds"),
        account=account_of(fields.get("account")),
        cut=read_cut(fields.get("cut")),
    )


def _checked_outcome(fields: dict[str, Any], problem: StepProblem, choice: Choice) -> Outcome:
    """Return how planning ended; raise unless the choice is legal, has the peak stated, and ended so."""
    check_choice(problem, choice)
    peak = step_peak(problem, choice)
    if read_int(fields["peak_bytes"], "peak_bytes") != peak:
        raise PlanFileError(f"it states a peak of {fields['peak_bytes']} bytes, but its step has {peak}.")
    outcome = Outcome[read_outcome(fields["outcome"], OUTCOMES)]
    if (outcome in OVER) != (peak > problem.budget_bytes):
        raise PlanFileError(
            f"its outcome is {outcome.name}, but its peak is {peak} bytes and its budget {problem.budget_bytes}."
        )
    return outcome


def _block_to_dict(block: Block, menu: Sequence[Plan]) -> dict[str, Any]:
    data: dict[str, Any] = {"name": block.name, "variants": [list(astuple(each)) for each in block.variants]}
    if block.as_run:
        data["as_run"] = True
    if menu:
        problem = menu[0].problem
        plans = {f"plan {number}": record_to_dict(plan.to_record()) for number, plan in enumerate(menu)}
        data |= {"fingerprint": problem.graph.fingerprint, "plans": plans} | graph_and_costs(problem)
    return data


def _block_from_dict(data: object, what: str) -> tuple[Block, tuple[Plan, ...]]:
    of_graph = {"fingerprint", "plans", "graph", "costs"}
    fields = read_fields(data, what.capitalize(), {"name", "variants"}, of_graph | {"as_run"})
    variants = tuple(_variant(each, what) for each in read_list(fields["variants"], f"{what}: variants"))
    block = Block(read_str(fields["name"], f"{what}: name"), variants, as_run=fields.get("as_run") is True)
    if "plans" not in fields:
        return block, ()
    fields = read_fields(data, what.capitalize(), {"name", "variants"} | of_graph, {"as_run"})
    graph, costs = read_graph_and_costs(fields["graph"], fields["costs"], fields["fingerprint"])
    plans = fields["plans"]
    if not isinstance(plans, dict) or list(plans) != [f"plan {number}" for number in range(len(variants))]:
        raise PlanFileError(f'the plans of {what} are not "plan 0", "plan 1" and so on, one for each variant.')
    menu = tuple(Plan.from_record(record_from_dict(each, graph, costs, OUTCOMES)) for each in plans.values())
    check_menu(block, menu)
    return block, menu


def check_menu(block: Block, menu: Sequence[Plan]) -> None:
    """Raise `PlanFileError` unless every variant of a block takes what its plan takes."""
    for number, (variant, plan) in enumerate(zip(block.variants, menu, strict=True)):
        own = plan_variant(plan.problem, plan.trace)
        if block.as_run:
            own = replace(own, forward_peak=variant.forward_peak, backward_peak=variant.backward_peak)
            own = replace(own, backward_after=variant.backward_after)
        if not same_price(variant, own):
            raise PlanFileError(
                f"variant {number} of block {block.name!r} does not take what its plan takes: it says "
                f"{astuple(variant)[:5]}, the plan {astuple(own)[:5]}. It was edited or damaged."
            )


def _variant(data: object, what: str) -> Variant:
    numbers = read_list(data, f"{what}: variant")
    if len(numbers) != 7:
        raise PlanFileError(f"a variant of {what} has {len(numbers)} numbers; it must have 7.")
    rising, after, falling, end, seconds, bound, floor = numbers
    return Variant(
        forward_peak=read_int(rising, "forward_peak"),
        forward_after=read_int(after, "forward_after"),
        backward_peak=read_int(falling, "backward_peak"),
        backward_after=_signed(end, "backward_after"),
        seconds=read_float(seconds, "seconds"),
        bound_seconds=read_float(bound, "bound_seconds"),
        floor_bytes=read_int(floor, "floor_bytes"),
    )


def _gaps(data: object, what: str) -> tuple[Gap, ...]:
    found = []
    for pair in read_list(data, what):
        if not isinstance(pair, list) or len(pair) != 2:
            raise PlanFileError(f"{what} has {pair!r:.40}; each gap must be two numbers, its peak and its end.")
        found.append(Gap(read_int(pair[0], what), _signed(pair[1], what)))
    return tuple(found)


def _signed(data: object, what: str) -> int:
    """Return `data` if it is a whole number, below zero or not."""
    if isinstance(data, int) and not isinstance(data, bool) and data < 0:
        return -read_int(-data, what)
    return read_int(data, what)
