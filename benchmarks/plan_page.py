"""The page of the table of planners: its checks, one line per model, and where auto is furthest from its bound."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from checks import BEST, checks
from common import Row, describe_machine, number, table, text

SHOWN_BUDGETS = (80, 50, 30)
LARGEST_GAPS = 6


def page(rows: Sequence[Row], about: str) -> str:
    """Return the result page; `about` says how the rows come about."""
    planned = [row for row in rows if "percent" in row]
    return "\n".join(
        [
            "# Planners, models, budgets",
            "",
            "Written by `make bench-plan`; " + describe_machine(),
            "",
            about,
            "",
            f"{len({row['model'] for row in planned})} models, {len({row['planner'] for row in planned})} planners, "
            f"{len(planned)} points; every one is a line of `plan.jsonl`.",
            "",
            *(f"- {check}" for check in checks(rows)),
            "",
            *_exceptions(rows),
            "",
            "![overhead against budget](plan.png)",
            "",
            table(_model_lines(planned), COLUMNS),
        ]
    )


def _exceptions(rows: Sequence[Row]) -> list[str]:
    """Return what has no figures, and where the gap is largest."""
    slow = sorted({f"{row['planner']} on {row['model']}" for row in rows if "out_of_time" in row})
    broken = [
        f"{row['model']}: {row.get('skipped') or row['error']}" for row in rows if {"skipped", "error"} & set(row)
    ]
    known = [row for row in rows if row.get("planner") == BEST and row.get("fits") and row.get("gap") is not None]
    worst = sorted(known, key=lambda row: -row["gap"])[:LARGEST_GAPS]
    gaps = (f"{row['model']} at {row['percent']} % {row['gap']:.2%} ({row['planning_seconds']:.1f} s)" for row in worst)
    return [
        f"Out of time: {', '.join(slow) or 'none'}. Not run or failed: {'; '.join(broken) or 'none'}.",
        f"Largest gaps: {', '.join(gaps) or 'none'}.",
    ]


def _model_lines(rows: Sequence[Row]) -> list[Row]:
    """Return one line per model: auto's overheads, and medians over the budgets at which it fits."""
    return [_model_line(name, [row for row in rows if row["model"] == name]) for name in _models(rows)]


def _model_line(name: str, rows: Sequence[Row]) -> Row:
    auto = {row["percent"]: row for row in rows if row["planner"] == BEST}
    fitting = {percent: row for percent, row in auto.items() if row.get("fits")}
    line: Row = {"model": name, "ops": rows[0].get("ops"), "fits": f"{len(fitting)} of {len(auto)}"}
    line |= {f"overhead at {percent}": fitting.get(percent, {}).get("overhead") for percent in SHOWN_BUDGETS}
    line["gap"] = _median([row["gap"] for row in fitting.values() if row.get("gap") is not None])
    line["seconds"] = _median([row["planning_seconds"] for row in fitting.values()])
    line["overhead"], line["other"] = _beside_the_best_other(rows, fitting)
    return line


def _beside_the_best_other(rows: Sequence[Row], fitting: dict[int, Row]) -> tuple[float | None, float | None]:
    """Return the median overheads of auto and of the best other planner, over the budgets at which both fit."""
    others: dict[int, float] = {}
    for row in rows:
        if row["planner"] != BEST and row.get("fits"):
            others[row["percent"]] = min(row["overhead"], others.get(row["percent"], row["overhead"]))
    both = fitting.keys() & others.keys()
    return _median([fitting[each]["overhead"] for each in both]), _median([others[each] for each in both])


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _models(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["model"] for row in rows))


COLUMNS = {
    "model": text("model"),
    "ops": text("ops"),
    "auto fits": text("fits"),
    **{f"at {percent} %": number(f"overhead at {percent}", ".2%") for percent in SHOWN_BUDGETS},
    "median gap": number("gap", ".2%"),
    "median overhead": number("overhead", ".2%"),
    "best other's": number("other", ".2%"),
    "median planning s": number("seconds", ".1f"),
}
