"""Is planned training exact, is the predicted peak the measured one, and is the budget kept?

For every model and budget: three AdamW steps on fresh batches, planned against plain, from equal copies and seeds.
`exact` means that every loss, every gradient of every step, and at the end every parameter, buffer, optimizer state
and the global random state are equal to the last bit. The peak is measured with the profiler's allocator events over
one whole step (forward, backward, no gradients before it). Shares are of the planned graph's own unplanned peak. A
budget that cannot be met must say which one can, and that one is then tried in a row of its own.

    python benchmarks/exact.py                          # all models, 100, 70, 50 and 35 %
    python benchmarks/exact.py --only gpt --budgets 50
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lowtide
import zoo
from common import (
    RESULTS,
    Row,
    describe_machine,
    emit,
    kept_rows,
    mib,
    number,
    refuse_unknown,
    run_child,
    table,
    text,
    write_results,
)
from lowtide.errors import InfeasibleBudgetError

STEPS = 3
SEED = 7
TOLERANCE = 0.01
TOLERANCE_BYTES = 64 * 1024


@dataclass
class Record:
    """Everything a training run leaves behind that must be equal to the last bit."""

    tensors: dict[str, Any] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)

    def differences(self, other: Record) -> list[str]:
        """Return the names of what differs."""
        if self.tensors.keys() != other.tensors.keys():
            return sorted(self.tensors.keys() ^ other.tensors.keys())
        return [name for name, value in self.tensors.items() if not _same(value, other.tensors[name])]


def _same(left: Any, right: Any) -> bool:
    if left is None or right is None:
        return left is right
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)


def train(model: nn.Module, call: Callable[..., Any], work: zoo.Workload) -> Record:
    """Return the record of a few training steps of `model`, run through `call`."""
    record = Record()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    torch.manual_seed(SEED)
    for step in range(STEPS):
        args, kwargs = work.batch(step)
        start = time.perf_counter()
        output = call(*args, **kwargs)
        loss = work.loss(output)
        loss.backward()
        record.seconds.append(time.perf_counter() - start)
        record.tensors[f"loss {step}"] = loss.detach().clone()
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            record.tensors[f"gradient {step} {name}"] = None if gradient is None else gradient.clone()
        del output, loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    record.tensors["random state"] = torch.get_rng_state()
    _record_state(record, model, optimizer)
    return record


def _record_state(record: Record, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for name, value in model.state_dict().items():
        record.tensors[f"state {name}"] = value.clone()
    for index, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            record.tensors[f"optimizer {index} {name}"] = value.clone()


def step_peak(model: nn.Module, work: zoo.Workload) -> int:
    """Return the measured peak of one whole step without gradients before it; outputs live until after backward."""
    args, kwargs = work.batch(STEPS)
    model.zero_grad(set_to_none=True)

    def step() -> None:
        output = model(*args, **kwargs)
        work.loss(output).backward()

    peak = lowtide.measure_peak(step)
    model.zero_grad(set_to_none=True)
    return peak


def agreed_record(work: zoo.Workload, reference: str) -> Record:
    """Return the record of plain training on which two runs agree: a reference must reproduce itself.

    On a busy machine a threaded kernel has been seen to round otherwise once in many runs.
    """
    last = plain_record(work, reference)
    for _ in range(5):
        record = plain_record(work, reference)
        if not record.differences(last):
            return record
        last = record
    raise RuntimeError(f"plain training ({reference}) does not reproduce itself on this machine")


def plain_record(work: zoo.Workload, reference: str) -> Record:
    """Return the record of plain training: eager, or through PyTorch's own `aot_eager` backend."""
    model = copy.deepcopy(work.model)
    call = model if reference == "eager" else torch.compile(model, backend=reference, dynamic=False)
    record = train(model, call, work)
    torch._dynamo.reset()
    return record


def planned_row(work: zoo.Workload, budget: str | int, plain: Record, eager: Record) -> Row:
    """Return the row of one budget; raises `InfeasibleBudgetError` if there is no plan."""
    torch._dynamo.reset()
    model = lowtide.wrap(copy.deepcopy(work.model), budget=budget)
    record = train(model, model, work)
    differences = record.differences(plain)
    measured = step_peak(model, work)
    plans = lowtide.plans(model)
    plan = max(plans, key=lambda each: each.peak_bytes)
    return {
        "graphs": len(plans),
        "exact": not differences,
        "differences": differences[:5],
        "equals_eager": not record.differences(eager),
        "budget_bytes": plan.budget_bytes,
        "baseline_bytes": plan.baseline_peak_bytes,
        "predicted_bytes": plan.peak_bytes,
        "measured_bytes": measured,
        "ratio": measured / plan.peak_bytes,
        "met": measured <= plan.budget_bytes,
        "overhead": plan.overhead,
        "planner": plan.planner,
        "planning_seconds": max(0.0, record.seconds[0] - record.seconds[-1]),
    }


def run_model(name: str, budgets: Sequence[str]) -> None:
    """Emit the rows of one model; runs in a child process."""
    entry = zoo.ALL[name]
    head: Row = {"model": name, "package": entry.package, "reference": entry.reference}
    try:
        work = entry.build()
    except ImportError as error:
        emit({**head, "skipped": f"{entry.package} is not installed ({error})"})
        return
    eager = agreed_record(work, "eager")
    plain = eager if entry.reference == "eager" else agreed_record(work, entry.reference)
    head["eager_bytes"] = step_peak(copy.deepcopy(work.model), work)
    least_tried: set[int] = set()
    for budget in budgets:
        try:
            emit({**head, "budget": f"{budget}%", **planned_row(work, f"{budget}%", plain, eager)})
        except InfeasibleBudgetError as error:
            emit({**head, "budget": f"{budget}%", "least_bytes": error.least_bytes, "budget_bytes": error.budget_bytes})
            if error.least_bytes not in least_tried:
                least_tried.add(error.least_bytes)
                emit({**head, "budget": "least", **planned_row(work, error.least_bytes, plain, eager)})


def violations(row: Row) -> list[str]:
    """Return what is wrong with a row."""
    if "error" in row:
        return [row["error"]]
    if "skipped" in row or "least_bytes" in row:
        return []
    found = [] if row["exact"] else [f"not exact: {', '.join(row['differences'])}"]
    error = abs(row["predicted_bytes"] - row["measured_bytes"])
    if error > max(TOLERANCE * row["measured_bytes"], TOLERANCE_BYTES):
        found.append(f"prediction is off by {error} bytes")
    if not row["met"]:
        found.append(f"budget exceeded by {row['measured_bytes'] - row['budget_bytes']} bytes")
    return found


def describe(row: Row) -> str:
    """Return the progress line of a row."""
    head = f"{row['model']:<22} {row.get('budget', ''):>5}"
    if "skipped" in row:
        return f"{head}  skipped: {row['skipped']}"
    if "least_bytes" in row:
        return f"{head}  infeasible, least {mib('least_bytes')(row)} MiB"
    if row["violations"]:
        return f"{head}  VIOLATION: {'; '.join(row['violations'])}"
    return (
        f"{head}  exact, predicted {mib('predicted_bytes')(row)} MiB, measured {mib('measured_bytes')(row)} MiB, "
        f"budget {mib('budget_bytes')(row)} MiB, overhead {row['overhead']:.1%}, {row['planning_seconds']:.0f} s"
    )


def collect(name: str, budgets: Sequence[str]) -> list[Row]:
    """Return the rows of one model from a child process, printing each as it comes."""
    rows: list[Row] = []
    for row in run_child(__file__, ["--child", name, "--budgets", *budgets]):
        row.setdefault("model", name)
        row["violations"] = violations(row)
        print(describe(row), flush=True)
        rows.append(row)
    return rows


def _note(row: Row) -> str:
    if "skipped" in row:
        return f"skipped: {row['skipped']}"
    if "least_bytes" in row:
        return f"infeasible at {row['budget']}"
    return "; ".join(row["violations"]).replace("|", "/") or "-"


def model_lines(rows: Sequence[Row]) -> list[Row]:
    """Return one line per model, over all its budgets."""
    return [
        model_line([row for row in rows if row["model"] == name])
        for name in dict.fromkeys(row["model"] for row in rows)
    ]


def model_line(rows: Sequence[Row]) -> Row:
    """Return what the rows of one model say together."""
    planned = [row for row in rows if "predicted_bytes" in row]
    line: Row = {key: rows[0].get(key) for key in ("model", "reference", "eager_bytes")}
    line |= {f"overhead {row['budget']}": row["overhead"] for row in planned}
    least = [row["budget_bytes"] / row["baseline_bytes"] for row in planned if row["budget"] == "least"]
    line["least"] = ", ".join(f"{share:.1%}" for share in least) or None
    line["note"] = "; ".join(note for note in map(_note, rows) if note != "-") or "-"
    if planned:
        line["unplanned_bytes"] = planned[0]["baseline_bytes"]
        line["exact"] = all(row["exact"] for row in planned)
        line["equals_eager"] = all(row["equals_eager"] for row in planned)
        line["met"] = all(row["met"] for row in planned)
        line["off"] = max(abs(row["ratio"] - 1) for row in planned)
        line["seconds"] = max(row["planning_seconds"] for row in planned)
    return line


COLUMNS: dict[str, Callable[[Row], str]] = {
    "model": text("model"),
    "exact": text("exact"),
    "reference": text("reference"),
    "= eager": lambda row: "-" if row.get("equals_eager") is None else ("yes" if row["equals_eager"] else "no"),
    "budgets met": text("met"),
    "prediction off by at most": number("off", ".2%"),
    "plain eager MiB": mib("eager_bytes"),
    "unplanned MiB": mib("unplanned_bytes"),
    **{f"overhead at {budget} %": number(f"overhead {budget}%", ".1%") for budget in (70, 50, 35)},
    "least budget tried": text("least"),
    "planning s, at most": number("seconds", ".1f"),
    "note": text("note"),
}


def page(rows: Sequence[Row]) -> str:
    """Return the result page."""
    planned = [row for row in rows if "predicted_bytes" in row]
    bad = sum(bool(row["violations"]) for row in rows)
    lines = [
        "# Exactness and peak memory",
        "",
        "Written by `make bench-exact`; " + describe_machine(),
        "",
        *(line.strip() for line in (__doc__ or "").split("\n\n")[1].splitlines()),
        "`reference` is the plain run that must be equaled; where stock PyTorch's own `aot_eager` already differs from",
        "eager in the last bits, it is the reference, and `= eager` says whether the result also equals eager.",
        "`planning s` is the first step's extra time: capture, costs and planning. `overhead` is predicted.",
        "",
        f"{len({row['model'] for row in planned})} models, {len(planned)} planned rows, {bad} violations. A line is a",
        "model at all its budgets; every row is in `exact.jsonl`.",
        "",
        table(model_lines(rows), COLUMNS),
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="models to run; all by default")
    parser.add_argument("--budgets", nargs="+", default=["100", "70", "50", "35"], metavar="PERCENT")
    parser.add_argument("--jobs", type=int, default=1, help="child processes at once")
    parser.add_argument("--keep", action="store_true", help="keep the rows of the last run of models not run again")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory for exact.md and exact.jsonl")
    parser.add_argument("--child", metavar="NAME", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        run_model(options.child, options.budgets)
        return 0
    refuse_unknown(parser, "model", options.only or (), zoo.ALL)
    models = options.only or list(zoo.ALL)
    with ThreadPoolExecutor(max_workers=max(1, options.jobs)) as pool:
        per_model = pool.map(lambda name: collect(name, options.budgets), models)
        rows = [row for rows in per_model for row in rows]
    rows += kept_rows("exact", models, options.out) if options.keep else []
    rows.sort(key=lambda row: list(zoo.ALL).index(row["model"]))
    for path in write_results("exact", rows=rows, markdown=page(rows), directory=options.out):
        print(f"Wrote {path}")
    return 1 if any(row["violations"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
