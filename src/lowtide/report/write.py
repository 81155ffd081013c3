"""A plan as a file for people: a page, a picture or plain text, by the suffix of the path.

All three show what `report.data` works out: `html_page` fills the template with it, `text_report` writes lines for a
terminal, and `report.picture` draws.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.analysis.explain_step import explain_any
from lowtide.errors import InvalidOptionError, ReportError
from lowtide.files import replace_file, replace_text
from lowtide.report.data import KINDS, report_data
from lowtide.report.image_file import Course, can_draw, draw, panel_of
from lowtide.report.step_data import shown_blocks, step_report_data
from lowtide.step.plan import StepPlan
from lowtide.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lowtide.analysis.planner_comparison import Comparison
    from lowtide.plan.core.result import Plan

PAGES = (".html", ".htm")
PICTURES = (".png", ".svg")
TEXTS = (".txt",)
# Letters of the chart in a text report: 72 and the scale beside it fit a terminal of 100 columns.
WIDTH, HEIGHT = 72, 14
PLANNED, PLAIN, BUDGET = "█", "░", "─"


def write_report(plan: Plan | StepPlan, path: str | os.PathLike[str], comparison: Comparison | None = None) -> None:
    """Write a report of `plan` to `path`, replacing what is there.

    Raises:
        InvalidOptionError: The suffix is none of .html, .png, .svg and .txt, or the comparison is of another graph.
        ReportError: The file cannot be written, or a picture is asked for and matplotlib is not installed.
    """
    suffix = check_report_path(path)
    try:
        if suffix in PICTURES:
            _write_picture(plan, path)
        elif suffix in PAGES:
            replace_text(path, page_of(plan, comparison))
        else:
            replace_text(path, text_report(plan, comparison) + "\n")
    except OSError as error:
        raise ReportError(
            f"Cannot write {os.fspath(path)!r}: {error.strerror}. Name a file in a folder that exists and that you may "
            "write to."
        ) from None


def check_report_path(path: str | os.PathLike[str]) -> str:
    """Return the suffix of `path` in small letters; raise `InvalidOptionError` if no report has it."""
    suffix = Path(path).suffix.lower()
    if suffix not in (*PAGES, *PICTURES, *TEXTS):
        found = f"the suffix {suffix!r}" if suffix else "no suffix"
        raise InvalidOptionError(
            f"{os.fspath(path)!r} has {found}; a report is a page (.html), a picture (.png, .svg) or plain text (.txt)."
        )
    return suffix


def _write_picture(plan: Plan | StepPlan, path: str | os.PathLike[str]) -> None:
    if not can_draw():
        raise ReportError("Pictures need matplotlib: pip install 'lowtide[picture]'. A page (.html) does not.")
    with replace_file(path) as temporary:
        draw([panel_of(plan)], temporary)


def page_of(plan: Plan | StepPlan, comparison: Comparison | None = None) -> str:
    """Return the whole page for a plan of either kind."""
    return step_page(plan, comparison) if isinstance(plan, StepPlan) else html_page(plan, comparison)


def html_page(plan: Plan, comparison: Comparison | None = None) -> str:
    """Return the whole page for `plan`."""
    data = report_data(plan, comparison)
    return _rendered(
        "report",
        data=data | {"kinds": KINDS},
        summary=data["summary"],
        tiles=_tiles(data["summary"]),
        sections=_sections(plan, data),
        **_assets(),
    )


def step_page(step: StepPlan, comparison: Comparison | None = None) -> str:
    """Return the whole page for a step of several blocks, with the plan of each of them inside."""
    from markupsafe import Markup

    data = step_report_data(step, comparison)
    shown = shown_blocks(step)
    plans = {each.id: report_data(each.plan) for each in shown}
    own = [
        {"id": each.id, "name": each.name, "data": plans[each.id] | {"kinds": KINDS}, "variant": each.variant}
        for each in shown
    ]
    return _rendered(
        "step",
        data=data | {"blocks": own},
        summary=data["summary"],
        tiles=_tiles(data["summary"]),
        rows=data["rows"],
        parts=data["parts"],
        comparison=_compared(comparison),
        account=_account(step),
        blocks=[vars(each) | {"sections": _sections(each.plan, plans[each.id])} for each in shown],
        step_script=Markup(_asset("assets/step.js")),
        **_assets(),
    )


def _sections(plan: Plan, data: dict[str, Any]) -> Any:
    """Return the sections of a page that are about one graph."""
    from markupsafe import Markup

    text = _rendered(
        "plan_sections",
        summary=data["summary"],
        peak=data["peak"],
        tradeoff=data["tradeoff"],
        proved=any(overhead > 0 for _, overhead in data["tradeoff"]["bounds"]),
        account=_account(plan),
        format_bytes=format_bytes,
    )
    return Markup(text)


def _assets() -> dict[str, Any]:
    from markupsafe import Markup

    return {
        "format_bytes": format_bytes,
        "format_seconds": format_seconds,
        "style": Markup(_asset("assets/report.css")),
        "script": Markup(_asset("assets/report.js")),
        "library": Markup(_asset("assets/echarts.common.min.js")),
    }


def _rendered(name: str, **values: Any) -> str:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    # The kinds of memory keep their order: that of the layers in the chart.
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}
    return environment.from_string(_asset(f"templates/{name}.html.jinja")).render(**values)


def _compared(comparison: Comparison | None) -> list[dict[str, str]]:
    return [
        {
            "budget": row.budget,
            "planner": row.planner,
            "peak": "-" if row.peak_bytes is None else format_bytes(row.peak_bytes),
            "overhead": "-" if row.overhead is None else f"{100 * row.overhead:.2f} %",
            "outcome": row.outcome.replace("_", " ").lower(),
        }
        for row in (comparison.rows if comparison is not None else ())
    ]


def _asset(name: str) -> str:
    return files("lowtide.report").joinpath(*name.split("/")).read_text(encoding="utf-8")


def _account(plan: Plan | StepPlan) -> list[tuple[str, int]]:
    """Return what training takes besides the step, part by part and in all; nothing if that is not known."""
    account = plan.account
    if account is None:
        return []
    update = account.gradient_bytes + account.update_bytes
    moment = (
        ("forward and backward, gradients included", account.step_bytes)
        if account.step_bytes >= update
        else ("gradients and the optimizer's update", update)
    )
    return [
        ("parameters", account.parameter_bytes),
        ("buffers", account.buffer_bytes),
        ("batch", account.batch_bytes),
        ("optimizer state", account.optimizer_bytes),
        *([("gradient buckets", account.bucket_bytes)] if account.bucket_bytes else []),
        moment,
        ("in all", account.peak_bytes),
    ]


def _tiles(summary: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return the figures at the top of the page: what, how much, and a remark."""
    base = max(summary["baseline_peak_bytes"], 1)
    within = "within" if summary["peak_bytes"] <= summary["budget_bytes"] else "over"
    extra = summary["step_seconds"] - summary["baseline_seconds"]
    saved = f"{format_bytes(summary['baseline_saved_bytes'])} in plain training"
    if summary["bound"]:
        proof = f"at least {100 * summary['bound']:.2f} % is proved to be needed"
    else:
        proof = f"{format_seconds(extra)} more on {format_seconds(summary['baseline_seconds'])}"
    return [
        (
            "Peak memory",
            format_bytes(summary["peak_bytes"]),
            f"{100 * summary['peak_bytes'] / base:.1f} % of {format_bytes(base)} in plain training",
        ),
        ("Budget", format_bytes(summary["budget_bytes"]), f"the peak is {within} it"),
        ("Extra time", f"{100 * summary['overhead']:.2f} %", proof),
        ("Recomputed", f"{summary['num_recomputed']} runs", f"of {summary['num_ops']} ops"),
        ("Kept for backward", format_bytes(summary["saved_bytes"]), saved),
    ]


def text_report(plan: Plan | StepPlan, comparison: Comparison | None = None) -> str:
    """Return the report of `plan` as lines of text."""
    parts = [str(plan), memory_chart(plan), str(explain_any(plan, less=False))]
    if comparison is not None:
        parts.append(str(comparison))
    return "\n\n".join(parts)


def memory_chart(plan: Plan | StepPlan, *, width: int = WIDTH, height: int = HEIGHT) -> str:
    """Return the memory of plain and planned training over time, drawn with block letters."""
    panel = panel_of(plan)
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
    levels = [level for _, level in course.points]
    found = []
    for column in range(width):
        first = bisect_left(times, end * column / width)
        last = bisect_left(times, end * (column + 1) / width)
        # Nothing changes within a part: the level of the change before it still holds, unless the course is over.
        inside = levels[max(first - 1, 0) : last]
        found.append(max(inside) if first < len(times) and inside else 0)
    return found
