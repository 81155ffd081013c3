"""Planning seconds against the size of the graph, from 100 to 50,000 ops, for every planner that finishes.

The graphs are training graphs of transformers of growing depth, made without PyTorch; with `--deep`, also real GPTs of
that many layers, captured without data and with analytic costs. The budget is half the unplanned peak. A planner that
runs out of time is not tried on larger graphs. The exponent is the slope of a line through the logarithms of ops and
seconds, without graphs that take less than 50 ms or whose schedule does not fit.

    python benchmarks/scaling.py --sizes 100 1000 --planners auto dtr
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import linear_regression

import matplotlib as mpl
from matplotlib import pyplot as plt

from common import (
    RESULTS,
    Row,
    describe_machine,
    emit,
    kept_rows,
    number,
    refuse_unknown,
    run_child,
    table,
    text,
    write_results,
)
from limits import Job, planned, run_jobs
from lowtide.graph.samples import transformer
from lowtide.plan import registry
from lowtide.plan.core.problem import Problem
from problems import FOLDER, problem_of, write

mpl.use("Agg")
SIZES = (100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000)
PERCENT = 50
LIMIT_SECONDS = 150.0
# Beside what takes for ever or plans nothing, the thorough strength of `auto`: it is not another planner.
LEFT_OUT = {"brute_force", "keep_all", "auto_thorough"}
BEST = "auto"
# Ops of a layer of the made transformer, and seconds that are allowed for graphs of at most so many ops.
LAYER_OPS = 38
ALLOWED = {2_000: 10.0, 50_000: 120.0}
LEAST_SECONDS = 0.05
ROUNDING = 1e-9


def made(ops: int) -> Problem:
    """Return the problem of a transformer of about `ops` ops."""
    graph, costs = transformer(max(1, round(ops / LAYER_OPS)))
    peak = Problem(graph, costs, 1).baseline.peak_bytes
    return Problem(graph, costs, peak * PERCENT // 100)


def captured(layers: int) -> Problem:
    """Return the problem of a real GPT of so many layers, captured in a child process and kept."""
    name = f"gpt_{layers}_layers"
    if not (FOLDER / f"{name}.json").exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        for row in run_child(__file__, ["--child", str(layers)]):
            if "error" in row:
                raise RuntimeError(row["error"])
    problem, _ = problem_of(name)  # type: ignore[misc]
    return Problem(problem.graph, problem.costs, problem.budget_bytes * PERCENT // 100)


def capture(layers: int) -> None:
    """Capture a GPT on the meta device and write its problem; runs in a child process."""
    import torch  # only this process needs it

    import lowtide
    from lowtide.testing.models import gpt

    with torch.device("meta"):
        model, args, kwargs = gpt(layers=layers, dim=64, heads=4, tokens=64, batch=2)
    plan = lowtide.plan(model, args, kwargs, budget="100%", planner="keep_all", costs="t4")
    write(plan.problem, FOLDER / f"gpt_{layers}_layers.json")
    emit({"ops": len(plan.problem.graph.ops)})


def jobs(problem: Problem, name: str, planners: Sequence[str], given_up: set[str], limit: float) -> Iterator[Job]:
    """Yield the jobs of one graph."""
    for planner in planners:
        if planner not in given_up:
            key = {"graph": name, "ops": len(problem.graph.ops), "planner": planner}
            yield Job(key, partial(planned, problem, planner), limit)


def run(options: argparse.Namespace) -> list[Row]:
    """Return the rows of all graphs."""
    rows: list[Row] = []
    for kind, sizes, make in (("made", options.sizes, made), ("gpt", options.deep, captured)):
        given_up: set[str] = set()
        for size in sizes:
            problem = make(size)
            for row in run_jobs(jobs(problem, kind, options.planners, given_up, options.limit)):
                rows.append(row)
                print(describe(row), flush=True)
                if "out_of_time" in row or "error" in row:
                    given_up.add(row["planner"])
    return rows


def describe(row: Row) -> str:
    """Return the progress line of a row."""
    head = f"{row['graph']:<5} {row['ops']:>6} ops  {row['planner']:<15}"
    if "planning_seconds" not in row:
        return f"{head} {note(row)[:90]}"
    return f"{head} {row['planning_seconds']:>8.2f} s  {row['overhead']:.2%}{'' if row['fits'] else '  does not fit'}"


def note(row: Row) -> str:
    """Return why a row has no figures, or that its schedule does not fit."""
    if "out_of_time" in row:
        return f"out of time after {row['out_of_time']:.0f} s"
    if "fits" in row:
        return "-" if row["fits"] else "does not fit"
    return str(row.get("refused") or row.get("error") or "-").replace("|", "/")


def exponent(rows: Sequence[Row]) -> float | None:
    """Return the slope of seconds over ops on logarithmic scales, or None with fewer than two sizes."""
    points = [
        (math.log(row["ops"]), math.log(row["planning_seconds"]))
        for row in rows
        if row.get("fits") and row["planning_seconds"] >= LEAST_SECONDS
    ]
    if len({ops for ops, _ in points}) < 2:
        return None
    return linear_regression([ops for ops, _ in points], [seconds for _, seconds in points]).slope


def violations(rows: Sequence[Row]) -> list[str]:
    """Return where auto is slower or worse than it must be."""
    found = []
    for row in rows:
        if row["planner"] != BEST:
            continue
        where = f"{row['graph']} of {row['ops']} ops"
        if "planning_seconds" not in row:
            found.append(f"{where}: {note(row)}")
            continue
        allowed = next((seconds for ops, seconds in ALLOWED.items() if row["ops"] <= 1.05 * ops), None)
        if allowed is not None and row["planning_seconds"] > allowed:
            found.append(f"{where}: {row['planning_seconds']:.1f} s of {allowed:.0f}")
        for other in rows:
            same = (other["graph"], other["ops"]) == (row["graph"], row["ops"]) and other.get("fits")
            if same and not (row["fits"] and row["overhead"] <= other["overhead"] + ROUNDING):
                found.append(f"{where}: {other['planner']} is better, {other['overhead']:.2%} to {row['overhead']:.2%}")
    return found


def draw(rows: Sequence[Row], path: Path) -> Path:
    """Write the picture to `path` and return it."""
    figure, axis = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for index, planner in enumerate(dict.fromkeys(row["planner"] for row in rows)):
        style = {"color": "#0b6e99", "linewidth": 2.2, "zorder": 3} if planner == BEST else {"color": f"C{index % 10}"}
        for kind, look in (("made", "o-"), ("gpt", "x")):
            mine = [row for row in rows if (row["planner"], row["graph"]) == (planner, kind) and "overhead" in row]
            if mine:
                points = [row["ops"] for row in mine], [row["planning_seconds"] for row in mine]
                label = planner if kind == "made" else f"{planner}, GPT"
                axis.plot(*points, look, markersize=3.5, label=label, **style)
    axis.set(xscale="log", yscale="log", xlabel="ops", ylabel="planning seconds")
    axis.grid(color="0.92")
    axis.legend(fontsize=7, ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


COLUMNS: dict[str, Callable[[Row], str]] = {
    "graph": text("graph"),
    "ops": text("ops"),
    "planning s": number("planning_seconds", ".2f"),
    "overhead": number("overhead", ".2%"),
    "bound": number("bound", ".2%"),
    "note": note,
}


def page(rows: Sequence[Row]) -> str:
    """Return the result page."""
    summary = []
    for planner in dict.fromkeys(row["planner"] for row in rows):
        mine = [row for row in rows if row["planner"] == planner and row["graph"] == "made"]
        done = [row["ops"] for row in mine if "planning_seconds" in row]
        summary.append({"planner": planner, "exponent": exponent(mine), "most": max(done, default=None)})
    ran = any(row["planner"] == BEST for row in rows)
    good = "auto is within its limits and no worse than any planner." if ran else "auto was not run."
    return "\n".join(
        [
            "# Planning seconds and graph size",
            "",
            "Written by `make bench-scaling`; " + describe_machine(),
            "",
            *(line.strip() for line in (__doc__ or "").split("\n\n")[1].splitlines()),
            "",
            *([f"- {each}" for each in violations(rows)] or [good]),
            "",
            "![planning seconds against ops](scaling.png)",
            "",
            table(
                summary,
                {"planner": text("planner"), "exponent": number("exponent", ".2f"), "largest graph": text("most")},
            ),
            "",
            f"The rows of {BEST}; those of all planners are in `scaling.jsonl`.",
            "",
            table([row for row in rows if row["planner"] == BEST], COLUMNS),
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code is 1 if auto is too slow or worse than another planner."""
    every = [name for name in registry.names() if name not in LEFT_OUT]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", nargs="*", type=int, default=list(SIZES), help="ops of the made graphs")
    parser.add_argument("--deep", nargs="*", type=int, default=[24], metavar="LAYERS", help="layers of real GPTs")
    parser.add_argument("--planners", nargs="+", metavar="NAME", default=every, help="planners; all by default")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="seconds that one call may take")
    parser.add_argument("--keep", action="store_true", help="keep the rows of the last run that are not run again")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory for scaling.md, .jsonl and .png")
    parser.add_argument("--child", type=int, metavar="LAYERS", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        capture(options.child)
        return 0
    refuse_unknown(parser, "planner", options.planners, registry.names())
    kept = kept_rows("scaling", directory=options.out) if options.keep else []
    found: dict[tuple[str, int, str], Row] = {}
    rows: list[Row] = []
    written: Sequence[Path] = ()
    for row in chain(kept, run(options)):
        found[row["graph"], row["ops"], row["planner"]] = row
        rows = [found[key] for key in sorted(found)]
        # After every row, for the last ones can take many minutes.
        written = write_results("scaling", rows=rows, markdown=page(rows), directory=options.out)
    for each in violations(rows):
        print(each)
    for path in written:
        print(f"Wrote {path}")
    print(f"Wrote {draw(rows, options.out / 'scaling.png')}")
    return 1 if violations(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
