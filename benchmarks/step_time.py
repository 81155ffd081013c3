"""Step time of planned training over plain eager training, at 100 % and 50 % of the unplanned peak.

Plain and planned steps take turns in one process, so that a change in the machine's load hits both; the figure is the
median over the pairs of planned seconds over plain seconds. A step is forward, backward and clearing the gradients.

    python benchmarks/step_time.py --only gpt --pairs 20
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, quantiles

import torch
from torch import nn

import lowtide
import zoo
from common import RESULTS, Row, describe_machine, emit, number, refuse_unknown, run_child, table, text, write_results

DEFAULT = ("gpt", "resnet50", "unet", "hf_bert", "hf_gpt2")
BUDGETS = ("100", "50")
LIMIT = 1.05
WARM_UP = 3


def seconds_of(model: nn.Module, work: zoo.Workload, step: int) -> float:
    """Return the seconds of one training step without the optimizer."""
    args, kwargs = work.batch(step)
    torch.manual_seed(step)
    start = time.perf_counter()
    work.loss(model(*args, **kwargs)).backward()
    model.zero_grad(set_to_none=True)
    return time.perf_counter() - start


def time_model(work: zoo.Workload, budget: str, pairs: int) -> Row:
    """Return the timings of one budget, after a few steps of each to warm up."""
    torch._dynamo.reset()
    plain = copy.deepcopy(work.model)
    planned = lowtide.wrap(copy.deepcopy(work.model), budget=f"{budget}%")
    timings: list[tuple[float, float]] = []
    for step in range(WARM_UP + pairs):
        first, second = (plain, planned) if step % 2 else (planned, plain)
        taken = {id(model): seconds_of(model, work, step) for model in (first, second)}
        timings.append((taken[id(plain)], taken[id(planned)]))
    timings = timings[WARM_UP:]
    ratios = sorted(planned_s / plain_s for plain_s, planned_s in timings)
    plan = max(lowtide.plans(planned), key=lambda each: each.peak_bytes)
    quarter = quantiles(ratios, n=4)
    return {
        "budget": f"{budget}%",
        "pairs": pairs,
        "eager_seconds": median(plain_s for plain_s, _ in timings),
        "planned_seconds": median(planned_s for _, planned_s in timings),
        "ratio": median(ratios),
        "quartiles": [quarter[0], quarter[2]],
        "predicted_ratio": 1 + plan.overhead,
        "planner": plan.planner,
    }


def run_model(name: str, pairs: int) -> None:
    """Emit the rows of one model; runs in a child process."""
    entry = zoo.ALL[name]
    try:
        work = entry.build()
    except ImportError as error:
        emit({"model": name, "skipped": f"{entry.package} is not installed ({error})"})
        return
    for budget in BUDGETS:
        emit({"model": name, **time_model(work, budget, pairs)})


def describe(row: Row) -> str:
    """Return the progress line of a row."""
    if "error" in row or "skipped" in row:
        return f"{row['model']:<12} {row.get('error') or 'skipped: ' + row['skipped']}"
    low, high = row["quartiles"]
    return f"{row['model']:<12} {row['budget']:>5}  planned / eager = {row['ratio']:.3f} ({low:.3f} to {high:.3f})"


COLUMNS: dict[str, Callable[[Row], str]] = {
    "model": text("model"),
    "budget": text("budget"),
    "eager s": number("eager_seconds", ".4f"),
    "planned s": number("planned_seconds", ".4f"),
    "planned / eager": number("ratio", ".3f"),
    "quartiles": lambda row: " to ".join(f"{each:.3f}" for each in row.get("quartiles", [])) or "-",
    "predicted": number("predicted_ratio", ".3f"),
    "planner": text("planner"),
}


def page(rows: Sequence[Row], pairs: int) -> str:
    """Return the result page."""
    return "\n".join(
        [
            "# Step time",
            "",
            "Written by `make bench-time`; " + describe_machine(),
            "",
            *(__doc__ or "").split("\n\n")[1].splitlines(),
            f"{pairs} pairs after {WARM_UP} to warm up. `predicted` is the plan's own figure.",
            "",
            table(rows, COLUMNS),
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code is 1 if a model at 100 % is slower than the limit allows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0].replace("%", "%%"))
    parser.add_argument("--only", nargs="+", metavar="NAME", default=DEFAULT, help="models to run")
    parser.add_argument("--pairs", type=int, default=15, help="timed pairs of steps, at least 10")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory for step_time.md and step_time.jsonl")
    parser.add_argument("--child", metavar="NAME", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        run_model(options.child, options.pairs)
        return 0
    refuse_unknown(parser, "model", options.only, zoo.ALL)
    rows: list[Row] = []
    for name in options.only:
        for row in run_child(__file__, ["--child", name, "--pairs", str(options.pairs)]):
            rows.append({"model": name, **row})
            print(describe(rows[-1]), flush=True)
    for path in write_results("step_time", rows=rows, markdown=page(rows, options.pairs), directory=options.out):
        print(f"Wrote {path}")
    slow = [row for row in rows if row.get("budget") == "100%" and row["ratio"] > LIMIT]
    return 1 if slow or any("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
