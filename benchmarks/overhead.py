"""Predicted overhead against measured step times, at 65 and 40 % of the unplanned peak.

Plain eager steps, unplanned steps and planned steps of one model take turns in one process, each round in another
order, so that a change in the machine's load hits all of them. The measured overhead is the median over the rounds of
the planned step's seconds over the unplanned one's, less one; both run the same captured graph in the same way. The
difference to the plan's own figure is given in points, that is in hundredths of a step. Ops are measured again: cached
costs may be of a day on which the machine had other work. The C library is told to keep freed memory, as PyTorch's
own allocator for accelerators does: fresh pages in every step take time that no op has, most in the unplanned step.

    python benchmarks/overhead.py --only gpt --rounds 20
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, quantiles

import torch
from torch import nn

import lowtide
import zoo
from common import RESULTS, Row, describe_machine, emit, number, refuse_unknown, run_child, table, text, write_results

DEFAULT = ("gpt", "resnet50", "unet", "hf_vit")
BUDGETS = (65, 40)
LIMIT_POINTS = 5.0
WARM_UP = 3
# Settings of the GNU C library; others do not know them.
KEEP_PAGES = {"MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_MMAP_THRESHOLD_": str(2**40), "MALLOC_TOP_PAD_": str(2**26)}


def seconds_of(model: nn.Module, work: zoo.Workload, step: int) -> float:
    """Return the seconds of one training step without the optimizer."""
    args, kwargs = work.batch(step)
    torch.manual_seed(step)
    start = time.perf_counter()
    work.loss(model(*args, **kwargs)).backward()
    model.zero_grad(set_to_none=True)
    return time.perf_counter() - start


def variants_of(work: zoo.Workload, planner: str) -> dict[str, nn.Module]:
    """Return the model plain, unplanned and planned at each budget."""
    found = {"eager": copy.deepcopy(work.model)}
    found["100"] = lowtide.wrap(copy.deepcopy(work.model), budget="100%", planner="keep_all")
    for percent in BUDGETS:
        found[str(percent)] = lowtide.wrap(copy.deepcopy(work.model), budget=f"{percent}%", planner=planner)
    return found


def rounds_of(variants: dict[str, nn.Module], work: zoo.Workload, rounds: int) -> list[dict[str, float]]:
    """Return the seconds of every variant in every round, after a few rounds to warm up."""
    names = list(variants)
    taken = []
    for step in range(WARM_UP + rounds):
        order = names[step % len(names) :] + names[: step % len(names)]
        order = order if step // len(names) % 2 else order[::-1]
        taken.append({name: seconds_of(variants[name], work, step) for name in order})
    return taken[WARM_UP:]


def run_model(name: str, rounds: int, planner: str) -> None:
    """Emit the rows of one model; runs in a child process."""
    entry = zoo.ALL[name]
    try:
        work = entry.build()
    except ImportError as error:
        emit({"skipped": f"{entry.package} is not installed ({error})"})
        return
    variants = variants_of(work, planner)
    taken = rounds_of(variants, work, rounds)
    for percent in BUDGETS:
        plan = max(lowtide.plans(variants[str(percent)]), key=lambda each: each.baseline_peak_bytes)
        ratios = sorted(each[str(percent)] / each["100"] for each in taken)
        low, _, high = quantiles(ratios, n=4)
        emit(
            {
                "budget": f"{percent}%",
                "rounds": rounds,
                "unplanned_seconds": median(each["100"] for each in taken),
                "predicted_seconds": plan.problem.baseline.seconds,
                "predicted": plan.overhead,
                "measured": median(ratios) - 1,
                "quartiles": [low - 1, high - 1],
                "against_eager": median(each[str(percent)] / each["eager"] for each in taken) - 1,
                "points": 100 * (median(ratios) - 1 - plan.overhead),
                "planner": plan.planner,
            }
        )


COLUMNS: dict[str, Callable[[Row], str]] = {
    "model": text("model"),
    "budget": text("budget"),
    "predicted": number("predicted", ".1%"),
    "measured": number("measured", ".1%"),
    "quartiles": lambda row: " to ".join(f"{each:.1%}" for each in row.get("quartiles", [])) or "-",
    "difference, points": number("points", "+.1f"),
    "over eager": number("against_eager", ".1%"),
    "unplanned s": number("unplanned_seconds", ".4f"),
    "sum of op costs s": number("predicted_seconds", ".4f"),
    "note": lambda row: row.get("skipped") or row.get("error") or "-",
}


def page(rows: Sequence[Row]) -> str:
    """Return the result page."""
    worst = max((abs(row["points"]) for row in rows if "points" in row), default=0.0)
    return "\n".join(
        [
            "# Predicted and measured overhead",
            "",
            "Written by `make bench-overhead`; " + describe_machine(),
            "",
            *(line.strip() for line in (__doc__ or "").split("\n\n")[1].splitlines()),
            f"The largest difference is {worst:.1f} points; at most {LIMIT_POINTS:.0f} are allowed.",
            "",
            table(rows, COLUMNS),
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code is 1 if a prediction is off by more than the limit allows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0].replace("%", "%%"))
    parser.add_argument("--only", nargs="+", metavar="NAME", default=DEFAULT, help="models to run")
    parser.add_argument("--rounds", type=int, default=20, help="timed rounds, at least 2")
    parser.add_argument("--planner", default="auto")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory for overhead.md and overhead.jsonl")
    parser.add_argument("--child", metavar="NAME", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        run_model(options.child, options.rounds, options.planner)
        return 0
    refuse_unknown(parser, "model", options.only, zoo.ALL)
    rows: list[Row] = []
    for name in options.only:
        asked = ["--child", name, "--rounds", str(options.rounds), "--planner", options.planner]
        with tempfile.TemporaryDirectory() as empty:
            for row in run_child(__file__, asked, env={"LOWTIDE_CACHE_DIR": empty, **KEEP_PAGES}):
                rows.append({"model": name, **row})
                print("  ".join(show(rows[-1]) for show in COLUMNS.values()), flush=True)
    for path in write_results("overhead", rows=rows, markdown=page(rows), directory=options.out):
        print(f"Wrote {path}")
    far = [row for row in rows if abs(row.get("points", 0.0)) > LIMIT_POINTS]
    return 1 if far or any("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
