"""Why the peak of a step of several blocks is what it is, and what less memory would cost."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

from lowtide.analysis.explain_peak import Explanation, explain_plan
from lowtide.files import write_json
from lowtide.plan import registry
from lowtide.plan.core.planner import AbstractPlanner
from lowtide.plan.core.result import Plan
from lowtide.plan.menu import menu_planner
from lowtide.progress import Progress, silent
from lowtide.step.peak import plan_at_peak, step_parts
from lowtide.step.plan import StepPlan
from lowtide.step.replan import with_budget, with_menus
from lowtide.text_table import text_table
from lowtide.units import format_bytes

FORMAT = "lowtide-step-explanation"
VERSION = 1


@dataclass(frozen=True, slots=True)
class PeakPart:
    """Bytes of one cause at the peak of a step."""

    cause: str
    bytes: int
    words: str


@dataclass(frozen=True, slots=True)
class LessMemory:
    """What the step would take within less memory.

    Attributes:
        share: The budget as a share of plain training's peak.
        budget_bytes: The budget.
        fits: Whether a choice of the blocks' plans keeps it.
        overhead: Extra seconds as a share of plain training's.
        bound: Proved lower bound on the overhead, or None.
    """

    share: str
    budget_bytes: int
    fits: bool
    overhead: float
    bound: float | None


@dataclass(frozen=True)
class StepExplanation:
    """What `explain` returns for a step of several blocks.

    Attributes:
        planner: Who made the plans of the blocks.
        peak_bytes: The peak of the step.
        baseline_peak_bytes: Peak of plain training.
        place: Where the peak is, in words.
        parts: What is there, by cause, largest first; together they are the peak.
        blocks: Names of the block runs.
        block: What is alive in the block that runs at the peak; None if code between blocks runs, or a block that has
            no graph.
        less: What each further 10 % of plain training's peak would cost, down to the first budget that is not met.
        cut: Why the model is cut into these blocks, or None if the plan does not say so.
    """

    planner: str
    peak_bytes: int
    baseline_peak_bytes: int
    place: str
    parts: tuple[PeakPart, ...]
    blocks: tuple[str, ...]
    block: Explanation | None
    less: tuple[LessMemory, ...] = ()
    cut: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return everything as lists, numbers and strings, for JSON."""
        data = asdict(self) | {"block": None if self.block is None else self.block.to_dict()}
        return {"format": FORMAT, "version": VERSION, **data}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the explanation to `path` as JSON, replacing what is there."""
        write_json(path, self.to_dict())

    def __str__(self) -> str:
        """Return the peak, what is there, the block that runs, and the price of less memory."""
        share = 100 * self.peak_bytes / max(self.baseline_peak_bytes, 1)
        rows = [
            (format_bytes(part.bytes), f"{100 * part.bytes / max(self.peak_bytes, 1):.1f} %", part.words)
            for part in self.parts
        ]
        return "\n".join(
            [
                f"The peak of {format_bytes(self.peak_bytes)} ({share:.1f} % of plain training's) is reached in "
                f"{self.place}.",
                *([] if self.cut is None else [f"Blocks: {self.cut}."]),
                "",
                *text_table(("bytes", "of the peak", "what"), rows, left=(2,)),
                *self._block_lines(),
                *self._price(),
            ]
        )

    def _block_lines(self) -> list[str]:
        return [] if self.block is None else ["", "In the block that runs there:", str(self.block)]

    def _price(self) -> list[str]:
        cells = [
            (
                row.share,
                format_bytes(row.budget_bytes),
                f"+{100 * row.overhead:.2f} %" if row.fits else "not met",
                "-" if row.bound is None else f"{100 * row.bound:.2f} %",
            )
            for row in self.less
        ]
        if not cells:
            return []
        return ["", "What less memory costs:", *text_table(("memory", "bytes", "step time", "at least"), cells)]


def explain_any(
    plan: Plan | StepPlan,
    *,
    planner: str | AbstractPlanner = "auto",
    less: bool = True,
    progress: Progress = silent,
) -> Explanation | StepExplanation:
    """Return what is alive at the peak of a plan of either kind, and why; see `explain_plan`."""
    if isinstance(plan, Plan):
        return explain_plan(plan, planner=planner, less=less, progress=progress)
    return explain_step(plan, planner=planner, less=less, progress=progress)


def explain_step(
    step: StepPlan, *, planner: str | AbstractPlanner = "auto", less: bool = True, progress: Progress = silent
) -> StepExplanation:
    """Return what is there at the peak of a step, and what less memory would cost.

    Args:
        step: The plan.
        planner: Who makes menus for less memory, if the plan has none.
        less: Whether to ask for that.
        progress: Receives a line of text now and then.
    """
    inside = plan_at_peak(step)
    return StepExplanation(
        planner=step.planner,
        peak_bytes=step.peak_bytes,
        baseline_peak_bytes=step.baseline_peak_bytes,
        place=step.peak_place,
        parts=tuple(PeakPart(part.cause.value, part.bytes, part.words) for part in step_parts(step)),
        blocks=step.blocks,
        block=None if inside is None else explain_plan(inside, less=False),
        less=_price_of_less(step, planner, progress) if less else (),
        cut=step.cut,
    )


def _price_of_less(step: StepPlan, planner: str | AbstractPlanner, progress: Progress) -> tuple[LessMemory, ...]:
    """Return what 10 % steps of the unplanned peak below the plan's cost, until one is not met."""
    if all(len(menu) < 2 for menu in step.menus):
        asked = menu_planner(registry.get(planner) if isinstance(planner, str) else planner)
        step = with_menus(step, asked, registry.name_of(asked), progress)
    rows: list[LessMemory] = []
    share = step.peak_bytes / max(step.baseline_peak_bytes, 1)
    for percent in range(90, 0, -10):
        if percent / 100 >= share:
            continue
        progress(f"a choice for {percent} %")
        found = with_budget(step, max(percent * step.baseline_peak_bytes // 100, 1))
        rows.append(LessMemory(f"{percent}%", found.budget_bytes, found.fits, found.overhead, found.bound))
        if not found.fits:
            break
    return tuple(rows)
