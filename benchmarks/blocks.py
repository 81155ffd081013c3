"""Does one budget hold for the whole step of a model that is captured in several graphs?

For every model and share of eager's measured peak, training steps with SGD from one seed, plain and wrapped with the
budget in bytes. Bits are those of every loss, gradient, buffer and random state after every step. The peak is the
profiler's, of forward and backward from the second step on; the first step's is measured with a second fresh copy,
because the step that plans is not to run under a profiler. A budget that cannot be met must name one that is then kept.

    python benchmarks/blocks.py                              # what has no row yet; may be stopped and started again
    python benchmarks/blocks.py --only whisper --budgets 50 --again
    python benchmarks/blocks.py --layerdrop-steps 200        # Whisper with random layers: how often is it exceeded?
    python benchmarks/blocks.py --compare                    # the cost of blocks against the plan of the whole graph
    python benchmarks/blocks.py --first                      # seconds of the first step of deep models
    python benchmarks/blocks.py --meta                       # a model of 70 billion parameters, planned without data
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import lowtide
from block_models import COMPARED, META, MODELS, MakeCall, build, gpt_layers
from common import (
    RESULTS,
    Row,
    append_row,
    describe_machine,
    emit,
    number,
    read_rows,
    refuse_unknown,
    run_child,
    table,
    text,
    write_results,
)
from lowtide.blocks.policy import LayerPolicy
from lowtide.blocks.step.find_layers import repeated_layers
from lowtide.errors import InfeasibleBudgetError, LowtideWarning
from lowtide.testing.models import loss_of
from referee import Record, planner_of

STEPS = 3
TIMED_STEPS = 9
SEED = 7
RATE = 1e-2
COMPARED_SHARES = ("65", "50", "35")
DEPTHS = ("24", "48")
META_SHARE = "50"
WAYS = ("whole", "blocks")
# Gaps between blocks are known after the first step, and the choice for them is made in the second.
COMPARED_STEPS = 3
# ResNet's stages have so many blocks at least.
REPEATED = LayerPolicy(equal=3)


def predicted_peak(model: nn.Module) -> int | None:
    """Return the predicted peak of the whole step, or None if there is no prediction for several graphs."""
    plans = lowtide.plans(model)
    return plans[0].peak_bytes


def wrapped(model: nn.Module, budget: int, *, planner: Any = "auto", blocks: str | None = None) -> nn.Module:
    """Return the model wrapped: as one graph ("whole"), its repeated layers as blocks ("blocks"), or as by default."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    if blocks == "blocks":
        return lowtide.wrap(model, budget=budget, planner=planner, blocks=list(repeated_layers(model, REPEATED)))
    return lowtide.wrap(model, budget=budget, planner=planner, blocks=blocks or "auto")


def seed_all() -> None:
    """Set every random state that a model may read."""
    torch.manual_seed(SEED)
    random.seed(SEED)
    np.random.seed(SEED)


class Trainer:
    """Training steps of one model from the seed on, with what each left behind, its seconds and its peak."""

    def __init__(
        self, model: nn.Module, make_call: MakeCall, call: Callable[..., Any] | None = None, *, plans: bool = False
    ) -> None:
        self.model, self.make_call, self.call, self.plans = model, make_call, call or model, plans
        self.record = Record()
        self.seconds: list[float] = []
        self.peaks: list[int | None] = []
        self.predicted: list[int | None] = []
        self.graphs: list[int] = []
        self.optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)

    def run(self, steps: int, *, measured_from: int | None = None, kept: bool = True) -> Trainer:
        """Train for so many steps; `kept` says whether what they leave behind is recorded."""
        seed_all()
        for step in range(steps):
            self._step(step, measured=measured_from is not None and step >= measured_from, kept=kept)
        return self

    def _step(self, step: int, *, measured: bool, kept: bool) -> None:
        call = self.make_call(step)
        losses: list[Any] = []

        def run() -> None:
            output = call(self.call)  # lives until after backward, as in a training loop
            loss = loss_of(output)
            loss.backward()
            losses.append(loss.detach())

        start = time.perf_counter()
        self.peaks.append(lowtide.measure_peak(run) if measured else run())
        self.seconds.append(time.perf_counter() - start)
        self.graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        if measured and self.plans:
            self.predicted.append(predicted_peak(self.model))
        if kept:
            self._keep(step, losses[0])
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _keep(self, step: int, loss: Any) -> None:
        values = self.record.values
        values[f"loss {step}"] = loss.clone()
        for name, parameter in self.model.named_parameters():
            values[f"gradient {step} {name}"] = None if parameter.grad is None else parameter.grad.clone()
        values |= {f"buffer {step} {name}": value.clone() for name, value in self.model.named_buffers()}
        values[f"random state {step} of torch"] = torch.get_rng_state()
        values[f"random state {step} of Python"] = random.getstate()
        values[f"random state {step} of numpy"] = str(np.random.get_state(legacy=False))


def eager_facts(name: str, steps: int) -> tuple[Record, Row]:
    """Return the record of plain training, its highest peak, and its median seconds of a step after the first."""
    measured = Trainer(*build(name)).run(steps, measured_from=0)
    again = Trainer(*build(name)).run(steps)
    timed = Trainer(*build(name)).run(TIMED_STEPS, kept=False)
    facts = {
        "eager_bytes": max(peak or 0 for peak in measured.peaks),
        "eager_seconds": statistics.median(timed.seconds[1:]),
        "eager_repeats": again.record.difference(measured.record) is None,
    }
    return again.record, facts


def planned_row(name: str, budget: int, steps: int, eager: Record) -> Row:
    """Return what wrapped training within `budget` bytes does; raises what it raises."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, make_call = build(name)
        trainer = Trainer(wrapped(model, budget, planner=planner_of("auto")), make_call, plans=True)
        trainer.run(steps, measured_from=1)
        breaks = [" ".join(each.split())[:160] for each in torch._dynamo.utils.counters["graph_break"]]
        again = Trainer(model, make_call).run(TIMED_STEPS, kept=False)
    told = [str(each.message).splitlines()[0] for each in caught if issubclass(each.category, LowtideWarning)]
    peaks = [peak for peak in trainer.peaks if peak is not None]
    highest = max(range(len(peaks)), key=peaks.__getitem__, default=0)
    row = {
        "graphs": trainer.graphs[-1],
        "first_graphs": trainer.graphs[0],
        "plans": len(lowtide.plans(model)),
        "peaks": peaks,
        "budget_bytes": budget,
        "measured_bytes": max(peaks, default=None),
        "predicted_bytes": trainer.predicted[highest] if peaks else None,
        "first_seconds": trainer.seconds[0],
        "step_seconds": statistics.median(again.seconds[1:]),
        "breaks": breaks[:6],
        "warnings": list(dict.fromkeys(told)),
        **_bits(name, steps, trainer.record, eager),
    }
    model, make_call = build(name)
    first = Trainer(wrapped(model, budget, planner=planner_of("auto")), make_call).run(1, measured_from=0)
    return row | {"first_bytes": first.peaks[0]}


def _bits(name: str, steps: int, record: Record, eager: Record) -> Row:
    """Return whether the bits are eager's, else the first difference and whether PyTorch's `aot_eager` has it too."""
    found = record.difference(eager)
    if found is None:
        return {"exact": True}
    torch._dynamo.reset()
    model, make_call = build(name)
    try:
        stock = Trainer(model, make_call, torch.compile(model, backend="aot_eager", dynamic=False)).run(steps).record
    except Exception as error:  # then there is nothing to compare with
        return {"exact": False, "difference": found[0], "amount": found[1], "aot_eager": type(error).__name__}
    same = record.difference(stock) is None
    return {"exact": False, "difference": found[0], "amount": found[1], "aot_eager": "same" if same else "other"}


def run_budget(name: str, share: str, steps: int) -> Row:
    """Return the row of one model at one share of eager's peak, or at the least budget that the error names."""
    eager, row = eager_facts(name, steps)
    budget = int(float(share) / 100 * row["eager_bytes"])
    row["asked_bytes"] = budget
    try:
        try:
            return row | planned_row(name, budget, steps, eager)
        except InfeasibleBudgetError as error:
            row |= {"least_bytes": error.least_bytes, "of_bytes": error.budget_bytes}
            return row | planned_row(name, error.least_bytes, steps, eager)
    except Exception as error:  # whatever it is, eager trains
        return row | {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def run_layer_drop(share: str, steps: int) -> Row:
    """Return how often Whisper with random layers exceeds its budget; every step is measured, the first one too."""
    eager = Trainer(*build("whisper")).run(steps, measured_from=0, kept=False)
    peaks_of_eager = [peak or 0 for peak in eager.peaks]
    budget = int(float(share) / 100 * max(peaks_of_eager))
    model, make_call = build("whisper")
    trainer = Trainer(wrapped(model, budget, planner=planner_of("auto")), make_call)
    row: Row = {"steps": steps, "budget_bytes": budget, "eager_bytes": max(peaks_of_eager)}
    try:
        trainer.run(steps, measured_from=0, kept=False)
    except Exception as error:  # the row says after how many steps
        row["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    peaks = [peak or 0 for peak in trainer.peaks]
    same_end = "error" not in row and all(
        torch.equal(left, right) for left, right in zip(model.parameters(), eager.model.parameters(), strict=True)
    )
    return row | {
        "done": len(peaks),
        "violations": sum(peak > budget for peak in peaks),
        "worst": max(peaks, default=0) / budget,
        "same_parameters": same_end,
        "graphs": len(lowtide.plans(model)),
    }


def run_compared(name: str, share: str) -> Row:
    """Return the predicted overhead of the whole graph's plan and that of blocks, at a share of eager's peak."""
    _, row = eager_facts(name, 1)
    budget = int(float(share) / 100 * row["eager_bytes"])
    row["budget_bytes"] = budget
    for way in WAYS:
        model, make_call = build(name)
        try:
            trainer = Trainer(wrapped(model, budget, blocks=way), make_call)
            trainer.run(COMPARED_STEPS, measured_from=COMPARED_STEPS - 1, kept=False)
            row[f"{way}_overhead"] = lowtide.plans(model)[0].overhead
            row[f"{way}_bytes"] = trainer.peaks[-1]
        except InfeasibleBudgetError as error:
            row[f"{way}_note"] = f"least {error.least_bytes / row['eager_bytes']:.0%}"
        except Exception as error:  # one way must not hide the other
            row[f"{way}_note"] = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return row


def run_first(layers: str, way: str) -> Row:
    """Return the seconds of the first step of a transformer at half its peak, with nothing in the cache."""
    model, make_call = gpt_layers(int(layers))
    eager = Trainer(model, make_call).run(2, measured_from=1, kept=False)
    model, make_call = gpt_layers(int(layers))
    row: Row = {"eager_seconds": eager.seconds[0]}
    try:
        trainer = Trainer(wrapped(model, (eager.peaks[1] or 0) // 2, blocks=way), make_call).run(3, kept=False)
    except Exception as error:
        return row | {"note": f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"}
    return row | {"first_seconds": trainer.seconds[0], "step_seconds": trainer.seconds[-1]}


def run_meta(name: str, share: str) -> Row:
    """Return the seconds of planning a model without data, at a share of its unplanned step, from analytic costs."""
    model, inputs = META[name]()
    start = time.perf_counter()
    found = lowtide.plan(model, (), inputs, budget=f"{share}%", costs="analytic")
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "layers": len(repeated_layers(model, REPEATED)),
        "plan_seconds": time.perf_counter() - start,
        "eager_bytes": found.baseline_peak_bytes,
        "predicted_bytes": found.peak_bytes,
        "budget_bytes": found.budget_bytes,
        "overhead": found.overhead,
    }


def run_in_child(options: argparse.Namespace) -> None:
    """Emit the row of one job."""
    mode, name, budget = options.child
    signal.alarm(options.seconds)
    torch.set_num_threads(1)
    row = {
        "train": lambda: run_budget(name, budget, options.steps),
        "layerdrop": lambda: run_layer_drop(budget, options.layerdrop_steps),
        "compare": lambda: run_compared(name, budget),
        "first": lambda: run_first(name, budget),
        "meta": lambda: run_meta(name, budget),
    }[mode]()
    emit(row)


Job = tuple[str, str, str]


def source() -> str:
    """Return a digest of lowtide's source: rows of a resumed run may be of several versions."""
    files = sorted(Path(lowtide.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:8]


def jobs(options: argparse.Namespace) -> list[Job]:
    """Return the jobs asked for: mode, model and budget (of `--first`, layers and way)."""
    if options.first:
        return [("first", layers, way) for layers in DEPTHS for way in WAYS]
    if options.meta:
        return [("meta", name, META_SHARE) for name in META]
    if options.layerdrop_steps:
        return [("layerdrop", "whisper", share) for share in options.budgets]
    mode, models = ("compare", COMPARED) if options.compare else ("train", MODELS)
    shares = COMPARED_SHARES if options.compare else options.budgets
    return [(mode, name, share) for name in models if name in (options.only or models) for share in shares]


def collect(job: Job, options: argparse.Namespace) -> Row:
    """Return the row of one job from a process of its own, which begins with an empty cache."""
    arguments = ["--child", *job, "--steps", str(options.steps), "--seconds", str(options.seconds)]
    arguments += ["--layerdrop-steps", str(options.layerdrop_steps)]
    row: Row = {"mode": job[0], "model": job[1], "budget": job[2]}
    start, before = time.monotonic(), source()
    with tempfile.TemporaryDirectory() as folder:
        environment = {"OMP_NUM_THREADS": "1", "LOWTIDE_CACHE_DIR": folder}
        for found in run_child(__file__, ["--out", str(options.out), *arguments], env=environment):
            row |= found
    versions = list(dict.fromkeys((before, source())))
    return row | {"source": "-".join(versions), "job_seconds": round(time.monotonic() - start, 1)}


def read(path: Path) -> dict[Job, Row]:
    """Return the last row of every job."""
    return {(row["mode"], row["model"], row["budget"]): row for row in read_rows(path)}


def violations(row: Row) -> list[str]:
    """Return what is wrong with a row of training."""
    if "error" in row:
        return [row["error"]]
    if row["mode"] == "layerdrop":
        return [f"{row['violations']} steps above the budget"] if row["violations"] else []
    if row["mode"] != "train":
        return []
    found = [] if row["exact"] else [f"bits: {row['difference']} by {row['amount']:.1g}, aot_eager {row['aot_eager']}"]
    if not row["eager_repeats"]:
        found.append("eager differs from itself")
    for key, what in (("measured_bytes", "steps"), ("first_bytes", "first step")):
        if row[key] is not None and row[key] > row["budget_bytes"]:
            found.append(f"{what} above the budget")
    return found


def _ratio(over: str, under: str, form: str = ".3f") -> Callable[[Row], str]:
    return lambda row: format(row[over] / row[under], form) if row.get(over) and row.get(under) else "-"


def _note(row: Row) -> str:
    least = [f"least {row['least_bytes'] / row['eager_bytes']:.0%} of eager"] if "least_bytes" in row else []
    return "; ".join(least + violations(row)).replace("|", "/")[:140] or "-"


TRAINED: dict[str, Callable[[Row], str]] = {
    "model": text("model"),
    "%": text("budget"),
    "graphs": text("graphs"),
    "exact": text("exact"),
    "measured / budget": _ratio("measured_bytes", "budget_bytes"),
    "first step / budget": _ratio("first_bytes", "budget_bytes"),
    "predicted / measured": _ratio("predicted_bytes", "measured_bytes", ".4f"),
    "first step s": number("first_seconds", ".1f"),
    "step / eager": _ratio("step_seconds", "eager_seconds", ".2f"),
    "note": _note,
}
DROPPED: dict[str, Callable[[Row], str]] = {
    "model": text("model"),
    "%": text("budget"),
    "steps": text("done"),
    "above the budget": text("violations"),
    "worst / budget": number("worst", ".3f"),
    "parameters equal eager's": text("same_parameters"),
    "graphs": text("graphs"),
    "error": lambda row: row.get("error", "-").replace("|", "/")[:140],
}

PLANNED: dict[str, Callable[[Row], str]] = {
    "model": text("model"),
    "parameters": lambda row: f"{row['parameters'] / 1e9:.1f}e9" if "parameters" in row else "-",
    "layers": text("layers"),
    "%": text("budget"),
    "predicted / budget": _ratio("predicted_bytes", "budget_bytes"),
    "overhead": lambda row: f"{row['overhead']:.2%}" if "overhead" in row else "-",
    "plan s": number("plan_seconds", ".1f"),
}


def _beside(rows: Sequence[Row], show: Callable[[Row], dict[str, str]]) -> list[Row]:
    """Return one line per model, with what `show` says of each of its rows."""
    lines: dict[str, Row] = {}
    for row in rows:
        lines.setdefault(row["model"], {"model": row["model"]}).update(show(row))
    return list(lines.values())


def _by_model(rows: Sequence[Row]) -> list[Row]:
    """Return one line per model: what is the same at all shares once, the rest share by share."""
    cells: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        cells.setdefault(row["model"], []).append({name: show(row) for name, show in TRAINED.items()})
    return [{name: " / ".join(dict.fromkeys(one[name] for one in each)) for name in TRAINED} for each in cells.values()]


def _overheads(row: Row) -> dict[str, str]:
    def one(way: str) -> str:
        value = row.get(f"{way}_overhead")
        return f"{value:.2%}" if value is not None else row.get(f"{way}_note", "-")[:30]

    return {f"{row['budget']} %": " / ".join(map(one, WAYS)) if "error" not in row else "error"}


def _first(row: Row) -> dict[str, str]:
    said = row.get("note") or row.get("error")
    return {row["budget"]: said[:60] if said else f"{row['first_seconds']:.1f} s"}


def page(rows: Sequence[Row]) -> str:
    """Return the result page."""

    def of(mode: str) -> list[Row]:
        return [row for row in rows if row["mode"] == mode]

    trained = of("train")
    good = sum(not violations(row) for row in trained)
    versions = sorted({row["source"] for row in rows})
    lines = [
        "# A step of several graphs under one budget",
        "",
        "Written by `benchmarks/blocks.py`; " + describe_machine(),
        "",
        *(line.strip() for line in (__doc__ or "").split("\n\n")[1].splitlines()),
        "",
        f"{good} of {len(trained)} rows are exact and within the budget in every step. All is in `blocks.jsonl`.",
        f"Source of lowtide: {versions[0]}." if len(versions) == 1 else f"**Mixed sources: {', '.join(versions)}.**",
        "",
        table(_by_model(trained), {name: text(name) for name in TRAINED}),
    ]
    if found := of("layerdrop"):
        lines += ["", "Random layers, every step measured:", "", table(found, DROPPED)]
    if found := of("compare"):
        columns = {"whole / blocks": text("model")} | {f"{each} %": text(f"{each} %") for each in COMPARED_SHARES}
        lines += ["", "Predicted overhead:", "", table(_beside(found, _overheads), columns)]
    if found := of("first"):
        columns = {"layers": text("model")} | {way: text(way) for way in WAYS}
        lines += ["", "First step:", "", table(_beside(found, _first), columns)]
    if found := of("meta"):
        lines += ["", "Planned without data, on meta tensors:", "", table(found, PLANNED)]
    return "\n".join(lines)


def order(job: Job) -> tuple[int, ...]:
    """Return where the row of a job stands."""
    mode, name, budget = job
    names = [*MODELS, *COMPARED, *DEPTHS, *META]
    place = -int(float(budget)) if mode != "first" else WAYS.index(budget)
    return ("train", "layerdrop", "compare", "first", "meta").index(mode), names.index(name), place


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, write the page, and return 1 if a row of training is not good."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="models to run; all by default")
    parser.add_argument("--budgets", nargs="+", default=["70", "50"], metavar="PERCENT", help="of eager's peak")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help="training steps")
    parser.add_argument("--layerdrop-steps", type=int, default=0, metavar="N", help="so many steps of Whisper instead")
    parser.add_argument("--compare", action="store_true", help="blocks against the plan of the whole graph instead")
    parser.add_argument("--first", action="store_true", help="seconds of the first step of deep models instead")
    parser.add_argument("--meta", action="store_true", help="seconds of planning a large model without data instead")
    parser.add_argument("--again", action="store_true", help="also what has a row")
    parser.add_argument("--seconds", type=int, default=600, help="how long one row may take")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory for blocks.jsonl and blocks.md")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    if options.child:
        run_in_child(options)
        return 0
    refuse_unknown(parser, "model", options.only or (), MODELS | COMPARED)
    path = options.out / "blocks.jsonl"
    done = read(path)
    for job in jobs(options):
        if job in done and not options.again:
            continue
        row = collect(job, options)
        append_row(path, row)
        print(f"{job[0]:<9} {job[1]:<11} {job[2]:>5}  {_note(row)}  {row['job_seconds']:.0f} s", flush=True)
    rows = read(path)
    ordered = [rows[job] for job in sorted(rows, key=order)]
    for written in write_results("blocks", rows=ordered, markdown=page(ordered), directory=options.out):
        print(f"Wrote {written}")
    return 1 if any(violations(row) for row in ordered) else 0


if __name__ == "__main__":
    sys.exit(main())
