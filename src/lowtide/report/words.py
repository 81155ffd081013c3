"""The report as plain text for terminals: the plan, its memory over the step as a drawing of letters, and the peak."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lowtide.analysis.explain import explain_plan
from lowtide.report.picture import Course, plan_panel
from lowtide.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lowtide.analysis.compare import Comparison
    from lowtide.plan.core.result import Plan

WIDTH, HEIGHT = 72, 14
PLANNED, PLAIN, BUDGET = "█", "░", "─"


def text_report(plan: Plan, comparison: Comparison | None = None) -> str:
    """Return the report of `plan` as lines of text."""
    parts = [str(plan), memory_chart(plan), str(explain_plan(plan, less=False))]
    if comparison is not None:
        parts.append(str(comparison))
    return "\n\n".join(parts)


def memory_chart(plan: Plan, *, width: int = WIDTH, height: int = HEIGHT) -> str:
    """Return the memory of plain and planned training over time, drawn with block letters."""
    panel = plan_panel(plan)
    plain, planned = panel.courses
    end = max(course.points[-1][0] for course in panel.courses)
    top = max(plan.baseline_peak_bytes, plan.peak_bytes, 1)
    columns = [_columns(course, end, width) for course in (plain, planned)]
    lines = ["memory above the start of the step"]
    for row in range(height, 0, -1):
        level = top * row / height
        budget_here = top * (row - 1) / height < plan.budget_bytes <= level
        cells = "".join(
            _cell(plain_bytes, planned_bytes, top * (row - 0.5) / height, budget_here)
            for plain_bytes, planned_bytes in zip(*columns, strict=True)
        )
        lines.append(f"{format_bytes(level):>11} |{cells}|{' budget' if budget_here else ''}")
    begin = min(width - 1, round((planned.backward_seconds or 0.0) / end * width)) if end else 0
    lines.append(f"{'':12}+{'forward'[:begin].ljust(begin, '-')}^{'backward'.ljust(width, '-')[: width - begin - 1]}+")
    lines.append(f"{'':13}0{format_seconds(end).rjust(width - 1)}")
    lines.append(f"{'':13}{PLANNED} planned   {PLAIN} plain   {BUDGET} budget {format_bytes(plan.budget_bytes)}")
    return "\n".join(lines)


def _cell(plain_bytes: int, planned_bytes: int, level: float, budget_here: bool) -> str:
    if planned_bytes >= level:
        return PLANNED
    if plain_bytes >= level:
        return PLAIN
    return BUDGET if budget_here else " "


def _columns(course: Course, end: float, width: int) -> list[int]:
    """Return the highest level of `course` in each of `width` equal parts of the time from 0 to `end`."""
    times = [seconds for seconds, _ in course.points]
    levels: Sequence[int] = [level for _, level in course.points]
    found = []
    for column in range(width):
        first = bisect_left(times, end * column / width)
        last = bisect_left(times, end * (column + 1) / width)
        # Nothing changes within a part: the level of the change before it still holds, unless the course is over.
        inside = levels[max(first - 1, 0) : last]
        found.append(max(inside) if first < len(times) and inside else 0)
    return found
