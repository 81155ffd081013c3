"""Pictures for the planners' pages: memory against overhead on three networks, one picture for each planner.

Costs are analytic, so that the pictures do not depend on the machine. A planner that looks at the budget is asked for
every share from 95 to 15 %; the grey line is the best of all planners.

    python benchmarks/curves.py --planners feng --keep
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.ticker import PercentFormatter

import lowtide
from common import read_rows, write_rows
from lowtide.errors import PlannerRefusedError
from lowtide.plan import registry
from lowtide.plan.core.problem import Problem
from lowtide.plan.solve import solve
from lowtide.testing.models import MODELS

mpl.use("Agg")
NETWORKS = {"gpt": "GPT", "resnet50": "ResNet-50", "unet": "U-Net"}
SHARES = (95, 90, 85, 80, 75, 70, 65, 60, 55, 50, 45, 40, 35, 30, 25, 20, 15)
LEFT_OUT = {"brute_force", "keep_all", "auto_thorough"}
OUT = Path(__file__).parents[1] / "docs" / "images" / "planners"
COSTS = "t4"
Point = tuple[float, float]
# The points of each planner on each network.
Curves = dict[str, dict[str, list[Point]]]


def problem_of(name: str) -> Problem:
    """Return the training graph of one of our own models, for a T4."""
    model, args, kwargs = MODELS[name]()
    return lowtide.plan(model, args, kwargs, budget="100%", planner="keep_all", costs=COSTS).problem


def curve(problem: Problem, planner: str) -> list[Point]:
    """Return the points that `planner` reaches: share of the unplanned peak, overhead; none if it refuses."""
    found: set[Point] = {(1.0, 0.0)}
    base = problem.baseline.peak_bytes
    for share in SHARES:
        try:
            plan = solve(Problem(problem.graph, problem.costs, base * share // 100), planner, throw=False)
        except PlannerRefusedError:
            return []
        found.add((plan.peak_bytes / base, plan.overhead))
        if plan.peak_bytes > base * share / 100:
            break
    return front(found)


def front(points: set[Point]) -> list[Point]:
    """Return the points that no other beats in both, with falling memory."""
    kept: list[Point] = []
    for share, overhead in sorted(points):
        if not kept or overhead < kept[-1][1]:
            kept.append((share, overhead))
    return kept[::-1]


def read(path: Path) -> Curves:
    """Return the curves of an earlier run."""
    curves: Curves = {}
    for row in read_rows(path):
        curves.setdefault(row["network"], {})[row["planner"]] = [(share, overhead) for share, overhead in row["points"]]
    return curves


def write(path: Path, curves: Curves) -> None:
    """Write one line per network and planner."""
    rows = (
        {"network": name, "planner": planner, "points": points}
        for name, found in curves.items()
        for planner, points in found.items()
    )
    write_rows(path, rows, {"costs": COSTS, "point": ["share of the unplanned peak", "overhead"]})


def draw(planner: str, curves: Curves, path: Path) -> None:
    """Write the picture of one planner."""
    figure, axes = plt.subplots(1, len(NETWORKS), figsize=(10, 3.1), sharey=True, layout="constrained")
    for axis, (name, label) in zip(axes, NETWORKS.items(), strict=True):
        best = front({point for points in curves[name].values() for point in points})
        axis.plot(*zip(*best, strict=True), color="0.65", linewidth=1.2, label="best of all planners")
        points = curves[name].get(planner, [])
        if points:
            axis.plot(*zip(*points, strict=True), "o-", color="#0b6e99", markersize=4, label=planner)
        else:
            axis.text(0.5, 0.5, "not served", transform=axis.transAxes, ha="center", color="0.4")
        axis.set(title=label, xlabel="peak, share of the unplanned one", xlim=(1.03, 0), ylim=(-0.01, 0.5))
        axis.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axis.grid(color="0.92")
    axes[0].set_ylabel("extra time of a step")
    axes[-1].legend(fontsize=8, loc="upper left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw all pictures and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--planners", nargs="+", metavar="NAME", help="planners to draw; all by default")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--keep", action="store_true", help="keep the curves of other planners from an earlier run")
    options = parser.parse_args(argv)
    planners = options.planners or [name for name in registry.names() if name not in LEFT_OUT]
    data = options.out / "curves.jsonl"
    known = read(data) if options.keep else {}
    curves: Curves = {}
    for name in NETWORKS:
        problem = problem_of(name)
        curves[name] = dict(known.get(name, {}))
        for planner in planners:
            curves[name][planner] = curve(problem, planner)
            print(f"{name:<10} {planner:<16} {len(curves[name][planner])} points", flush=True)
    drawn = list(dict.fromkeys(planner for found in curves.values() for planner in found))
    for planner in drawn:
        draw(planner, curves, options.out / f"{planner}.png")
    write(data, curves)
    print(f"Wrote {len(drawn)} pictures to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
