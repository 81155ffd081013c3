"""The picture of the table of planners: overhead against budget, one panel for each model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from checks import BEST
from common import Row

mpl.use("Agg")
ACROSS = 4
CEILING = 0.6


def draw(rows: Sequence[Row], path: Path) -> Path:
    """Write the picture to `path` and return it."""
    models = list(dict.fromkeys(row["model"] for row in rows if row.get("fits")))
    down = max(1, -(-len(models) // ACROSS))
    figure, grid = plt.subplots(
        down, ACROSS, figsize=(12, 2.4 * down), sharex=True, layout="constrained", squeeze=False
    )
    panels = [axis for line in grid for axis in line]
    for axis, model in zip(panels, models, strict=False):
        _panel(axis, model, [row for row in rows if row["model"] == model and row.get("fits")])
    for axis in panels[len(models) :]:
        axis.set_axis_off()
    handles, labels = panels[0].get_legend_handles_labels() if models else ([], [])
    if handles:
        figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), fontsize=8)
    figure.supylabel("extra time of a step", fontsize=9)
    figure.supxlabel("budget, share of the unplanned peak", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    plt.close(figure)
    return path


def _panel(axis: Axes, model: str, rows: Sequence[Row]) -> None:
    planners = [name for name in dict.fromkeys(row["planner"] for row in rows) if name != BEST]
    for index, planner in enumerate(planners):
        label = "other planners" if not index else None
        axis.plot(
            *_curve(rows, planner, "overhead"), color="0.75", linewidth=0.9, marker=".", markersize=3, label=label
        )
    best: dict[int, float] = {}
    for row in rows:
        if row["planner"] != BEST:
            best[row["percent"]] = min(best.get(row["percent"], row["overhead"]), row["overhead"])
    points = sorted(best.items())
    axis.plot(
        [percent / 100 for percent, _ in points],
        [overhead for _, overhead in points],
        color="#b5651d",
        linewidth=1.2,
        label="best of the others",
    )
    axis.plot(*_curve(rows, BEST, "bound"), color="#0b6e99", linestyle=":", linewidth=1.4, label="bound")
    axis.plot(*_curve(rows, BEST, "overhead"), "o-", color="#0b6e99", markersize=3.5, linewidth=1.6, label=BEST)
    top = max([row["overhead"] for row in rows if row["planner"] == BEST] + list(best.values()), default=0.0)
    axis.set(title=model, xlim=(0.85, 0.15), ylim=(-0.004, min(CEILING, 1.15 * top + 0.01)))
    axis.title.set_fontsize(9)
    axis.tick_params(labelsize=8)
    axis.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axis.grid(color="0.92")


def _curve(rows: Sequence[Row], planner: str, key: str) -> tuple[list[float], list[float]]:
    points = sorted(
        (row["percent"] / 100, row[key]) for row in rows if row["planner"] == planner and row.get(key) is not None
    )
    return [share for share, _ in points], [overhead for _, overhead in points]
