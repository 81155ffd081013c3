"""Does the saving show in the process's maximum resident size, which knows nothing of our bookkeeping?

Every figure is the high-water mark of the resident set (VmHWM) of a child process of its own that builds the model,
trains three steps with AdamW, and ends; `built` only builds it. Plans are made and saved in another child, so that
measuring costs is not part of the figure, but capturing the graph from Python is: it counts against us. Only the
activations of a step are asked to shrink; interpreter, libraries, weights, gradients and optimizer state remain. A
budget that cannot be met (`asked`) is replaced by the least one that can.

All children run with `MALLOC_ARENA_MAX=1`, `MALLOC_MMAP_THRESHOLD_=262144` and `MALLOC_TRIM_THRESHOLD_=262144`: large
tensors are mapped and unmapped one by one, so that freed memory returns to the system at once. With glibc's default
settings (`--default-malloc`) the heap keeps some of it, plain and planned alike.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import lowtide
from common import MIB, RESULTS, Row, describe_machine, emit, mib, number, run_child, table, text, write_results
from lowtide.errors import InfeasibleBudgetError
from lowtide.testing.models import MODELS, Case, loss_of

SIZES: dict[str, dict[str, int]] = {"gpt": {"batch": 20}, "unet": {"batch": 40}}
BUDGETS = ("100", "50", "35")
STEPS = 3
MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}


def high_water_bytes() -> int:
    """Return the largest resident set this process has had.

    `ru_maxrss` alone would do, but Linux lets a child inherit it from the parent; VmHWM starts again from zero.
    """
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def make_plan(case: Case, budget: str, path: str) -> None:
    """Save a plan and emit its figures; a budget that cannot be met is replaced by the least one that can."""
    model, args, kwargs = case
    try:
        plan = lowtide.plan(model, args, kwargs, budget=f"{budget}%")
    except InfeasibleBudgetError as error:
        plan = lowtide.plan(model, args, kwargs, budget=error.least_bytes)
    plan.save(path)
    share = plan.budget_bytes / plan.baseline_peak_bytes
    emit({"run": f"planned, {share:.1%}", "predicted_bytes": plan.peak_bytes, "overhead": plan.overhead})


def train(case: Case, path: str | None) -> None:
    """Train a few steps, plain or with the plan at `path`, and emit the high-water mark and the losses."""
    model, args, kwargs = case
    torch.manual_seed(0)
    if path is not None:
        model = lowtide.wrap(model, plan=path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        loss = loss_of(model(*args, **kwargs))
        loss.backward()
        losses.append(loss.item())
        del loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    emit({"resident_bytes": high_water_bytes(), "losses": losses})


def child(name: str, mode: str, path: str | None) -> None:
    """Do what `mode` says: `built`, `plain`, `plan:<percent>` or `planned`."""
    case = MODELS[name](**SIZES[name])
    if mode == "built":
        emit({"resident_bytes": high_water_bytes()})
    elif mode.startswith("plan:"):
        make_plan(case, mode.removeprefix("plan:"), str(path))
    else:
        train(case, path)


def _one(name: str, mode: str, path: str | None, malloc: dict[str, str]) -> Row:
    arguments = ["--child", name, mode, *([path] if path else [])]
    rows = list(run_child(__file__, arguments, env=malloc))
    return rows[-1] if rows else {"error": "no figures"}


def rows_of(name: str, malloc: dict[str, str], folder: str) -> list[Row]:
    """Return the rows of one model: built, plain, and planned at each budget."""
    built, plain = (_one(name, mode, None, malloc) for mode in ("built", "plain"))
    rows: list[Row] = [{"model": name, "run": "built", **built}, {"model": name, "run": "plain", **plain}]
    for budget in BUDGETS:
        path = f"{folder}/{name}-{budget}.json"
        figures = _one(name, f"plan:{budget}", path, {})
        if "error" not in figures:
            figures |= _one(name, "planned", path, malloc)
        rows.append({"model": name, "run": f"planned, {budget}%", "asked": f"{budget}%", **figures})
    for row in rows[1:]:
        if "resident_bytes" in row and "resident_bytes" in plain:
            row["above_built"] = row["resident_bytes"] - built["resident_bytes"]
            row["saved"] = plain["resident_bytes"] - row["resident_bytes"]
            row["same_losses"] = row["losses"] == plain["losses"]
    return rows


def describe(row: Row) -> str:
    """Return the progress line of a row."""
    if "error" in row:
        return f"{row['model']:<6} {row['run']:<16} {row['error']}"
    saved = f", {row['saved'] / MIB:8.1f} MiB less than plain" if row["run"].startswith("planned") else ""
    return f"{row['model']:<6} {row['run']:<16} resident {row['resident_bytes'] / MIB:8.1f} MiB{saved}"


COLUMNS: dict[str, Callable[[Row], str]] = {
    "model": text("model"),
    "run": text("run"),
    "asked": text("asked"),
    "predicted step peak MiB": mib("predicted_bytes"),
    "max resident MiB": mib("resident_bytes"),
    "above built MiB": mib("above_built"),
    "less than plain MiB": mib("saved"),
    "of plain's rise": number("share", ".1%"),
    "same losses": text("same_losses"),
}


def _add_shares(rows: Sequence[Row]) -> None:
    plain = {row["model"]: row.get("above_built") for row in rows if row["run"] == "plain"}
    for row in rows:
        if row.get("above_built") and plain.get(row["model"]):
            row["share"] = row["above_built"] / plain[row["model"]]


def page(rows: Sequence[Row]) -> str:
    """Return the result page."""
    return "\n".join(
        [
            "# Maximum resident size",
            "",
            "Written by `make bench-resident`; " + describe_machine(),
            "",
            (__doc__ or "").split("\n\n", 1)[1].strip(),
            "",
            "Sizes: " + "; ".join(f"`{name}({sizes})`" for name, sizes in SIZES.items()),
            "",
            table(rows, COLUMNS),
        ]
    )


def wrong(row: Row) -> bool:
    """Whether a row failed, changed the losses, or saved nothing at a budget below 100 %."""
    if "error" in row or row.get("same_losses") is False:
        return True
    return row.get("asked") in {"50%", "35%"} and row["saved"] <= 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=tuple(SIZES), default=tuple(SIZES), help="models to run")
    parser.add_argument("--default-malloc", action="store_true", help="leave the allocator's settings alone")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory for resident.md and resident.jsonl")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        name, mode, *path = options.child
        child(name, mode, path[0] if path else None)
        return 0
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only:
            found = rows_of(name, {} if options.default_malloc else MALLOC, folder)
            rows += found
            print(*map(describe, found), sep="\n", flush=True)
    _add_shares(rows)
    for path in write_results("resident", rows=rows, markdown=page(rows), directory=options.out):
        print(f"Wrote {path}")
    return 1 if any(map(wrong, rows)) else 0


if __name__ == "__main__":
    sys.exit(main())
