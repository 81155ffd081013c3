"""Why the peak is what it is: the tensors alive there, who made and who needs them, and what less memory would cost."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any

from lowtide.analysis.planner_comparison import ComparisonRow, compare_planners
from lowtide.errors import InvalidOptionError
from lowtide.files import write_json
from lowtide.plan.core.planner import AbstractPlanner
from lowtide.plan.core.result import Plan
from lowtide.plan.diagnose.alive_tensors import (
    AliveTensor,
    at_source,
    op_at_peak,
    phase_at_peak,
    short_source,
    tensors_at_peak,
)
from lowtide.progress import Progress, silent
from lowtide.text_table import text_table
from lowtide.units import format_bytes

FORMAT = "lowtide-explanation"
VERSION = 1
NUM_BLAMED = 3
_MAX_ROWS = 10
# How much the share of forward counts for which forward itself still needs a tensor, beside the share of the step for
# which it is held: to drop such a tensor means to recompute it in forward and, as a rule, again in backward.
_FORWARD_WEIGHT = 2


@dataclass(frozen=True, slots=True)
class Share:
    """Part of the bytes alive at the peak.

    Attributes:
        name: The module or source line that they belong to.
        bytes: Their number.
        tensors: How many tensors they are.
    """

    name: str
    bytes: int
    tensors: int


@dataclass(frozen=True)
class Explanation:
    """What `explain` returns.

    Attributes:
        planner: Whose schedule this is about.
        peak_bytes: Its peak.
        baseline_peak_bytes: Peak of plain training.
        step: Number of the step at which the peak is first reached, from 1.
        num_steps: Number of steps of the schedule.
        phase: "forward" or "backward".
        op: What runs there, in words.
        workspace_bytes: Bytes that this op uses inside itself.
        tensors: What is alive, largest first.
        blamed: The tensors that stand most in the way of a lower peak: bytes times the share of the step for which
            they are held, and more where forward itself needs them for long.
        less: What each further 10 % of plain training's peak would cost, down to the first budget that is not met.
    """

    planner: str
    peak_bytes: int
    baseline_peak_bytes: int
    step: int
    num_steps: int
    phase: str
    op: str
    workspace_bytes: int
    tensors: tuple[AliveTensor, ...]
    blamed: tuple[AliveTensor, ...]
    less: tuple[ComparisonRow, ...] = ()

    @property
    def by_module(self) -> tuple[Share, ...]:
        """Bytes alive at the peak by module, largest first; what no module made is named after its origin."""
        return _shares(self.tensors, lambda tensor: tensor.place)

    @property
    def by_source(self) -> tuple[Share, ...]:
        """Bytes alive at the peak by the line that made them, largest first."""
        return _shares(self.tensors, lambda tensor: tensor.source or "(unknown)")

    def to_dict(self) -> dict[str, Any]:
        """Return everything as lists, numbers and strings, for JSON."""
        data = asdict(self)
        shares = {"by_module": self.by_module, "by_source": self.by_source}
        return {"format": FORMAT, "version": VERSION, **data} | {
            name: [asdict(share) for share in each] for name, each in shares.items()
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the explanation to `path` as JSON, replacing what is there."""
        write_json(path, self.to_dict())

    def __str__(self) -> str:
        """Return the peak, the tensors to blame, tables by module and source line, and the price of less memory."""
        return "\n".join([*self._head(), "", *self._blame(), "", *self._tables(), *self._price()])

    def _head(self) -> list[str]:
        share = 100 * self.peak_bytes / max(self.baseline_peak_bytes, 1)
        alive = sum(tensor.bytes for tensor in self.tensors)
        return [
            f"The peak of {format_bytes(self.peak_bytes)} ({share:.1f} % of plain training's) is reached in "
            f"{self.phase}, at step {self.step} of {self.num_steps}: {self.op}.",
            f"Alive there: {len(self.tensors)} tensors of {format_bytes(alive)}, and "
            f"{format_bytes(self.workspace_bytes)} inside the op.",
        ]

    def _blame(self) -> list[str]:
        lines = ["Most to blame:"]
        for number, tensor in enumerate(self.blamed, 1):
            lines.append(f"  {number}. {format_bytes(tensor.bytes)}  {tensor.what}{at_source(tensor.source)}")
            lines.append(f"     {tensor.reason}")
        return lines

    def _tables(self) -> list[str]:
        return [
            *_share_table("module", self.by_module, self.peak_bytes),
            "",
            *_share_table(
                "source line", [replace(each, name=short_source(each.name)) for each in self.by_source], self.peak_bytes
            ),
        ]

    def _price(self) -> list[str]:
        if not self.less:
            return []
        cells = [
            (
                row.budget,
                format_bytes(row.budget_bytes),
                f"+{100 * (row.overhead or 0):.2f} %" if row.fits else "not met",
                "-" if row.bound is None else f"{100 * row.bound:.2f} %",
            )
            for row in self.less
        ]
        header = ("memory", "bytes", "step time", "at least")
        return ["", f"What less memory costs, with planner {self.less[0].planner}:", *text_table(header, cells)]


def explain_plan(
    plan: Plan,
    *,
    planner: str | AbstractPlanner = "auto",
    less: bool = True,
    progress: Progress = silent,
) -> Explanation:
    """Return what is alive at the peak of `plan` and why.

    Args:
        plan: The plan.
        planner: Who says what less memory would cost.
        less: Whether to ask for that, which takes a run of the planner for every 10 %.
        progress: Receives a line of text now and then.
    """
    trace, schedule = plan.trace, plan.schedule
    if not schedule.steps:
        raise InvalidOptionError("The plan has no steps, so it has no peak to explain.")
    tensors = tensors_at_peak(plan)
    return Explanation(
        planner=plan.planner,
        peak_bytes=plan.peak_bytes,
        baseline_peak_bytes=plan.baseline_peak_bytes,
        step=trace.peak_step + 1,
        num_steps=len(schedule.steps),
        phase=phase_at_peak(plan),
        op=op_at_peak(plan),
        workspace_bytes=plan.peak_bytes - sum(tensor.bytes for tensor in tensors),
        tensors=tensors,
        blamed=_blamed(plan, tensors),
        less=tuple(_price_of_less(plan, planner, progress)) if less else (),
    )


def _blamed(plan: Plan, tensors: Sequence[AliveTensor]) -> tuple[AliveTensor, ...]:
    seconds = plan.problem.costs.seconds
    clock = [0.0, *accumulate(seconds[op] for op in plan.schedule.steps)]
    step, forward = clock[-1] or 1.0, clock[plan.trace.boundary] or 1.0

    def weight(tensor: AliveTensor) -> float:
        held = clock[tensor.last_step] - clock[tensor.first_step - 1]
        needed = clock[tensor.last_forward_step] - clock[tensor.first_step - 1] if tensor.last_forward_step else 0.0
        return tensor.bytes * (held / step + _FORWARD_WEIGHT * needed / forward)

    return tuple(sorted(tensors, key=weight, reverse=True)[:NUM_BLAMED])


def _price_of_less(plan: Plan, planner: str | AbstractPlanner, progress: Progress) -> list[ComparisonRow]:
    """Return the planner's rows at 10 % steps of the unplanned peak below the plan's, until one is not met."""
    rows: list[ComparisonRow] = []
    share = plan.peak_bytes / max(plan.baseline_peak_bytes, 1)
    for percent in range(90, 0, -10):
        if percent / 100 >= share:
            continue
        problem = plan.problem
        (row,) = compare_planners(
            problem.graph, problem.costs, budgets=[f"{percent}%"], planners=[planner], progress=progress
        ).rows
        rows.append(row)
        if not row.fits:
            break
    return rows


def _shares(tensors: Sequence[AliveTensor], key: Callable[[AliveTensor], str]) -> tuple[Share, ...]:
    sizes: dict[str, list[int]] = defaultdict(list)
    for tensor in tensors:
        sizes[key(tensor)].append(tensor.bytes)
    found = [Share(name, sum(each), len(each)) for name, each in sizes.items()]
    return tuple(sorted(found, key=lambda share: (-share.bytes, share.name)))


def _share_table(what: str, shares: Sequence[Share], peak_bytes: int) -> list[str]:
    shown = list(shares)
    if len(shown) > _MAX_ROWS + 1:
        rest = shown[_MAX_ROWS:]
        total = Share(f"({len(rest)} more)", sum(each.bytes for each in rest), sum(each.tensors for each in rest))
        shown = [*shown[:_MAX_ROWS], total]
    cells = [
        (each.name, format_bytes(each.bytes), f"{100 * each.bytes / max(peak_bytes, 1):.1f} %", str(each.tensors))
        for each in shown
    ]
    return text_table((what, "alive", "of peak", "tensors"), cells)
