"""Seven points on published graphs, beside the best figures that a rival's code reached on them.

The graphs are those of Moccasin (Bartan et al. 2023): training graphs of Checkmate and random layered ones. Their
convention: a node is one op with one output; the peak counts live outputs and the one being computed; an output goes
after its last use; a budget is a share of the peak of the given order; the figure is the increase of the total duration
in percent. Random layered files carry their order; the others are sorted by generations, as Moccasin does. The rival's
figures come from its own code with two workers, and the seconds are what it needed on two cores.

    python benchmarks/published.py --graphs ../shared/graphs --only vgg16 --planner auto
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from common import RESULTS, Row, describe_machine, number, table, text, write_results
from limits import Job, planned, run_jobs
from lowtide.graph.build import GraphBuilder
from lowtide.graph.costs import Costs
from lowtide.graph.ir import Graph
from lowtide.plan.core.problem import Problem

GRAPHS = Path(__file__).parents[2] / "shared" / "graphs"
LIMIT_SECONDS = 60.0
# What is granted on top, so that a planner that is late still shows what it finds.
GRACE = 4
ROUNDING = 5e-4


@dataclass(frozen=True)
class Point:
    """One published point: a file, a budget, the rival's increase in percent and its seconds; None if it found none."""

    file: str
    percent: int
    rival: float | None
    rival_seconds: float | None

    @property
    def name(self) -> str:
        """The file's name without the family."""
        return self.file.removeprefix("checkmate_").removesuffix(".json").removesuffix("_train")


POINTS = (
    Point("checkmate_vgg16_train.json", 90, 1.968, 6),
    Point("checkmate_vgg_unet_train.json", 80, 1.984, 19),
    Point("checkmate_vgg_unet_train.json", 50, 6.967, 53),
    Point("random_layered_100.json", 90, 0.789, 57),
    Point("random_layered_100.json", 80, 2.296, 80),
    Point("random_layered_250.json", 90, 0.904, 390),
    Point("random_layered_250.json", 80, None, None),
)


def load(path: Path) -> tuple[Graph, Costs]:
    """Return the graph in the file at `path`, in its given order."""
    data = json.loads(path.read_text())
    layered = "order" in data["graph"]
    key, size, seconds = ("name", "out_cost", "duration") if layered else ("id", "cost_ram", "cost_cpu")
    start, end = ("0", "1") if layered else ("source", "target")
    nodes = {node[key]: node for node in data["nodes"]}
    before: dict[Any, list[Any]] = {node: [] for node in nodes}
    for link in data["links"]:
        before[link[end]].append(link[start])
    order = data["graph"]["order"] if layered else by_generations(list(nodes), before)
    builder = GraphBuilder()
    made: dict[Any, int] = {}
    for node in order:
        (made[node],) = builder.add_op(
            str(nodes[node].get("name", node)) if not layered else f"n{node}",
            [made[other] for other in before[node]],
            [(f"v{node}", int(nodes[node][size]))],
            seconds=float(nodes[node][seconds]),
        )
    last = [made[node] for node in order if not any(node in each for each in before.values())]
    return builder.build(outputs=last), builder.costs(path.name)


def by_generations(nodes: list[Any], before: dict[Any, list[Any]]) -> list[Any]:
    """Return `nodes` sorted: those that need nothing, then those that need only these, and so on."""
    after: dict[Any, list[Any]] = {node: [] for node in nodes}
    for node in nodes:
        for other in before[node]:
            after[other].append(node)
    waiting = {node: len(before[node]) for node in nodes}
    ready = [node for node in nodes if not waiting[node]]
    order: list[Any] = []
    while ready:
        order += ready
        following = []
        for node in ready:
            for other in after[node]:
                waiting[other] -= 1
                if not waiting[other]:
                    following.append(other)
        ready = following
    return order


def jobs(points: Sequence[Point], graphs: Path, planner: str) -> Iterator[Job]:
    """Yield the jobs of all points."""
    for point in points:
        graph, costs = load(graphs / point.file)
        peak = Problem(graph, costs, 1).baseline.peak_bytes
        key = {
            "graph": point.name,
            "percent": point.percent,
            "rival": point.rival,
            "rival_seconds": point.rival_seconds,
        }
        key |= {"ops": len(graph.ops), "unplanned_bytes": peak, "planner": planner}
        problem = Problem(graph, costs, peak * point.percent // 100)
        yield Job(key, partial(planned, problem, planner), GRACE * LIMIT_SECONDS)


def violations(row: Row) -> list[str]:
    """Return what is wrong with a row."""
    if "fits" not in row:
        return [note(row)]
    found = []
    proved = row["outcome"] == "IMPOSSIBLE"
    if not row["fits"] and not (row["rival"] is None and proved):
        found.append("no schedule fits and none is proved not to exist")
    if row["fits"] and row["rival"] is not None and 100 * row["overhead"] > row["rival"] + ROUNDING:
        found.append(f"{100 * row['overhead']:.3f} % is more than {row['rival']:.3f} %")
    if row["planning_seconds"] > LIMIT_SECONDS:
        found.append(f"it took {row['planning_seconds']:.1f} s of {LIMIT_SECONDS:.0f}")
    return found


def note(row: Row) -> str:
    """Return why a row has no figures."""
    if "out_of_time" in row:
        return f"out of time after {row['out_of_time']:.0f} s"
    return str(row.get("refused") or row.get("error") or "-")


def percent(key: str) -> Callable[[Row], str]:
    """Return a column that shows the share `key` in percent with the digits of the published figures."""
    return lambda row: "-" if row.get(key) is None else f"{100 * row[key]:.3f}"


COLUMNS: dict[str, Callable[[Row], str]] = {
    "graph": text("graph"),
    "ops": text("ops"),
    "budget": lambda row: f"{row['percent']} %",
    "ours, %": lambda row: percent("overhead")(row) + ("" if row.get("fits", True) else " (does not fit)"),
    "published, %": lambda row: "none found" if row["rival"] is None else f"{row['rival']:.3f}",
    "bound, %": percent("bound"),
    "gap, %": percent("gap"),
    "peak share": lambda row: f"{row['peak_bytes'] / row['unplanned_bytes']:.2%}" if "peak_bytes" in row else "-",
    "seconds": number("planning_seconds", ".1f"),
    "rival's seconds": number("rival_seconds", ".0f"),
    "note": lambda row: "; ".join(row["violations"]) or "-",
}


def page(rows: Sequence[Row]) -> str:
    """Return the result page."""
    return "\n".join(
        [
            "# Published graphs",
            "",
            "Written by `make bench-published`; " + describe_machine(),
            "",
            *(line.strip() for line in (__doc__ or "").split("\n\n")[1].splitlines()),
            "",
            table(rows, COLUMNS),
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code is 1 if a point is not reached in time."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--graphs", type=Path, default=GRAPHS, help="folder of the published graphs")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="graphs, such as vgg16; all by default")
    parser.add_argument("--planner", default="auto")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory for published.md and published.jsonl")
    options = parser.parse_args(argv)
    points = [point for point in POINTS if not options.only or point.name in options.only]
    if not points:
        parser.error(f"no such graph; there are {', '.join(dict.fromkeys(point.name for point in POINTS))}")
    if not options.graphs.is_dir():
        parser.error(f"{options.graphs} is not a folder; --graphs names the folder of the published graphs")
    rows: list[Row] = []
    for row in run_jobs(jobs(points, options.graphs, options.planner)):
        row["violations"] = violations(row)
        rows.append(row)
        print("  ".join(f"{name} {show(row)}" for name, show in COLUMNS.items()), flush=True)
    for path in write_results("published", rows=rows, markdown=page(rows), directory=options.out):
        print(f"Wrote {path}")
    return 1 if any(row["violations"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
