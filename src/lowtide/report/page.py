"""The report as one HTML file: styles, scripts, the chart library and the data are inside, nothing is fetched.

Charts are drawn in the browser by Apache ECharts, of which the file carries the common build as its authors publish it;
the page itself is a Jinja template with automatic escaping, and the data are JSON in which no tag can begin.
"""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING, Any

from lowtide.report.data import KINDS, report_data
from lowtide.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lowtide.analysis.compare import Comparison
    from lowtide.plan.core.result import Plan


def html_page(plan: Plan, comparison: Comparison | None = None) -> str:
    """Return the whole page for `plan`."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    data = report_data(plan, comparison)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    # The kinds of memory keep their order: that of the layers in the chart.
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}
    template = environment.from_string(_asset("templates/report.html.jinja"))
    return template.render(
        data=data | {"kinds": KINDS},
        summary=data["summary"],
        tiles=_tiles(data["summary"]),
        peak=data["peak"],
        tradeoff=data["tradeoff"],
        proved=any(overhead > 0 for _, overhead in data["tradeoff"]["bounds"]),
        account=_account(plan),
        format_bytes=format_bytes,
        style=Markup(_asset("assets/report.css")),
        script=Markup(_asset("assets/report.js")),
        library=Markup(_asset("assets/echarts.common.min.js")),
    )


def _asset(name: str) -> str:
    return files("lowtide.report").joinpath(*name.split("/")).read_text(encoding="utf-8")


def _account(plan: Plan) -> list[tuple[str, int]]:
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
