"""Memory over time as a picture: plain against planned training, with the budget as a line.

Needs matplotlib (the extra `picture`), which is imported when something is drawn.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from lowtide.graph.costs import Costs
from lowtide.schedule.simulate import Trace
from lowtide.schedule.steps import Schedule
from lowtide.step.plan import StepPlan
from lowtide.step.simulate import StepTrace

if TYPE_CHECKING:
    from lowtide.plan.core.result import Plan

MIB = 2**20
COLOURS = ("#c2410c", "#0369a1", "#4d7c0f", "#7e22ce")


@dataclass(frozen=True, slots=True)
class Course:
    """The memory of one step over time.

    Attributes:
        label: What was run.
        points: Pairs of seconds since the step began and bytes above the level at its beginning.
        backward_seconds: When the backward pass began, or None if not known.
    """

    label: str
    points: Sequence[tuple[float, int]]
    backward_seconds: float | None = None

    @property
    def peak_bytes(self) -> int:
        """Highest level."""
        return max((level for _, level in self.points), default=0)


@dataclass(frozen=True, slots=True)
class Panel:
    """One model's courses, drawn in the same axes."""

    title: str
    courses: Sequence[Course]
    budget_bytes: int | None = None
    time_label: str = "time in the step (ms, with the profiler on)"


def can_draw() -> bool:
    """Return True if matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def plan_panel(plan: Plan) -> Panel:
    """Return the predicted memory over the step of plain training and of `plan`."""
    graph, costs = plan.problem.graph, plan.problem.costs
    plain = course_of("plain", Schedule.keep_all(graph), plan.problem.baseline, costs)
    planned = course_of("planned", plan.schedule, plan.trace, costs)
    return Panel(
        f"{plan.planner}: {100 * plan.overhead:.1f} % more time",
        (plain, planned),
        plan.budget_bytes,
        time_label="time in the step (ms, predicted)",
    )


def panel_of(plan: Plan | StepPlan) -> Panel:
    """Return the predicted memory over the step of plain training and of a plan of either kind."""
    return step_panel(plan) if isinstance(plan, StepPlan) else plan_panel(plan)


def step_panel(step: StepPlan) -> Panel:
    """Return the predicted memory over the step of plain training and of the plan of a step of several blocks."""
    chosen = [None if plan is None else (plan.trace, plan.problem.costs, plan.schedule) for plan in step.plans]
    plain = [
        None if plan is None else (plan.problem.baseline, plan.problem.costs, Schedule.keep_all(plan.problem.graph))
        for plan in step.plans
    ]
    return Panel(
        f"{step.planner}: {100 * step.overhead:.1f} % more time",
        (_step_course("plain", step.plain, plain), _step_course("planned", step.trace, chosen)),
        step.budget_bytes,
        time_label="time in the blocks of the step (ms, predicted)",
    )


def _step_course(label: str, trace: StepTrace, runs: Sequence[tuple[Trace, Costs, Schedule] | None]) -> Course:
    """Return the course of a step; code between blocks, and blocks without a graph, take no time here."""
    points: list[tuple[float, int]] = [(0.0, 0)]
    clock, begin, level = 0.0, None, 0
    for moment, peak, after in zip(trace.moments, trace.peaks, trace.levels, strict=True):
        if moment.kind == "gap":
            # The last gap of forward is the first moment after it.
            begin = clock if begin is None and moment.index > len(runs) else begin
            points += [(clock, max(peak, level)), (clock, after)]
            level = after
            continue
        run = runs[moment.index]
        if run is not None:
            own, costs, schedule = run
            first = 0 if moment.kind == "forward" else own.boundary
            last = own.boundary if moment.kind == "forward" else len(schedule.steps)
            base = level - (own.saved_bytes if moment.kind == "backward" else 0)
            for number in range(first, last):
                points.append((clock, base + own.bytes_during[number]))
                clock += costs.seconds[schedule.steps[number]]
        else:
            points.append((clock, peak))
        points.append((clock, after))
        level = after
    return Course(label, points, begin)


def course_of(label: str, schedule: Schedule, trace: Trace, costs: Costs) -> Course:
    """Return the simulated course of `schedule`, whose trace is `trace`."""
    clock = [0.0, *accumulate(costs.seconds[op] for op in schedule.steps)]
    levels = [*trace.bytes_during, trace.bytes_after[-1] if trace.bytes_after else 0]
    return Course(label, list(zip(clock, levels, strict=True)), clock[trace.boundary])


def draw(panels: Sequence[Panel], *paths: str | os.PathLike[str]) -> None:
    """Draw `panels` side by side into each of `paths`; the suffix of a path, such as .png or .svg, is its format."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6 * len(panels), 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    for panel, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        _draw_panel(axes, panel)
    for path in paths:
        figure.savefig(path, dpi=140, metadata={"Date": None} if str(path).endswith(".svg") else None)


def _draw_panel(axes: Any, panel: Panel) -> None:
    top = max(course.peak_bytes for course in panel.courses) / MIB
    for row, course in enumerate(panel.courses):
        _draw_course(axes, course, row, top)
    if panel.budget_bytes is not None:
        height = panel.budget_bytes / MIB
        axes.axhline(height, color="#111827", linestyle="--", linewidth=1.2, label=f"budget: {height:.1f} MiB")
    axes.set(
        title=panel.title,
        xlabel=panel.time_label,
        ylabel="memory above the start (MiB)",
        xlim=(0, None),
        ylim=(0, 1.65 * top),
    )
    axes.legend(loc="upper left", fontsize="small", framealpha=0.9)
    axes.grid(alpha=0.25)


def _draw_course(axes: Any, course: Course, row: int, top: float) -> None:
    colour = COLOURS[row % len(COLOURS)]
    times = [1e3 * seconds for seconds, _ in course.points]
    levels = [level / MIB for _, level in course.points]
    label = f"{course.label}: peak {course.peak_bytes / MIB:.1f} MiB"
    axes.step(times, levels, where="post", color=colour, linewidth=1.1, label=label)
    highest = levels.index(max(levels, default=0.0))
    axes.plot(times[highest], levels[highest], "o", color=colour, markersize=4)
    axes.fill_between(times, levels, step="post", color=colour, alpha=0.13)
    if course.backward_seconds is not None:
        begin = 1e3 * course.backward_seconds
        axes.vlines(begin, 0, 1.05 * top, color=colour, linestyle=":", linewidth=1.3)
        axes.annotate(
            f"forward | backward ({course.label})",
            (begin, 1.05 * top),
            color=colour,
            fontsize="x-small",
            ha="center",
            va="bottom",
            textcoords="offset points",
            xytext=(0, 1 + 10 * row),
        )
