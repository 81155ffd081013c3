"""Plans through Inductor beside eager PyTorch, stock `torch.compile` and Inductor's own memory budget.

Every variant of a model is a row: `stock`, `activation 0.9` to `0.1` (Inductor with PyTorch's
`activation_memory_budget`), and `lowtide 80%` to `35%`, percent of eager's measured peak. A row has the measured peak,
what the plan said, whether losses, gradients and buffers after three steps have the bits of stock Inductor, and times:
steps of eager, stock and the variant are taken in turn, and the medians are compared. `busy` says how many processes
wanted to run beside it per core. Rows that are there are kept, so a run that was ended goes on where it was.

    python benchmarks/inductor.py --only gpt unet --budgets 50 35
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

import lowtide
import zoo
from common import (
    RESULTS,
    Row,
    append_row,
    describe_machine,
    emit,
    mib,
    number,
    read_rows,
    refuse_unknown,
    run_child,
    table,
    text,
)

FILE = RESULTS / "inductor.jsonl"
MODELS = (
    *("gpt", "hf_llama", "hf_bert", "timm_vit_tiny", "hf_t5", "resnet50", "unet", "timm_convnext_atto"),
    *("diffusers_dit", "monai_unet3d"),
)
RATIOS = (0.9, 0.7, 0.5, 0.3, 0.1)
BUDGETS = (80, 65, 50, 40, 35)
STEPS = 3
ROUNDS = 5
SEED = 7


@dataclass
class Variant:
    """One way to train a model: the model itself, what is called, and what it was planned with."""

    model: nn.Module
    call: Callable[..., Any]

    def step(self, work: zoo.Workload) -> torch.Tensor:
        """Run one step and return its loss."""
        self.model.zero_grad(set_to_none=True)
        loss = work.loss(self.call(*work.args, **work.kwargs))
        loss.backward()
        return loss.detach()

    def peak(self, work: zoo.Workload) -> int:
        """Return the measured peak of a step."""
        self.model.zero_grad(set_to_none=True)
        gc.collect()
        return lowtide.measure_peak(lambda: (self.step(work), None)[1])

    def state(self, work: zoo.Workload) -> list[torch.Tensor]:
        """Return losses, gradients and buffers of some steps from the present weights."""
        torch.manual_seed(SEED)
        losses = [self.step(work).clone() for _ in range(STEPS)]
        gradients = [each.grad.clone() for each in self.model.parameters() if each.grad is not None]
        self.model.zero_grad(set_to_none=True)
        return [*losses, *gradients, *(each.clone() for each in self.model.buffers())]


def compiled(work: zoo.Workload, ratio: float = 1.0) -> Variant:
    """Return stock Inductor at a ratio of its memory budget, which is all there is by default; compiled by a step."""
    from torch._dynamo import config as dynamo
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    # Copies of one model share the compiler's count, and what was compiled for them unless the backend is another one.
    dynamo.recompile_limit = 64

    def backend(module: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        with config.patch(activation_memory_budget=ratio):
            found: Any = compile_fx(module, list(examples))
        return found

    model = copy.deepcopy(work.model)
    variant = Variant(model, torch.compile(model, backend=backend, dynamic=False))
    variant.step(work)
    return variant


def wrapped(work: zoo.Workload, budget_bytes: int) -> Variant:
    """Return the model as lowtide trains it within a budget, by Inductor's code."""
    model = copy.deepcopy(work.model)
    variant = Variant(model, lowtide.wrap(model, budget=budget_bytes, engine="inductor"))
    variant.step(work)
    return variant


def times(variants: Sequence[Variant], work: zoo.Workload) -> list[float]:
    """Return the median seconds of a step of each, taken in turn."""
    found: list[list[float]] = [[] for _ in variants]
    for _ in range(ROUNDS):
        for variant, seconds in zip(variants, found, strict=True):
            begin = time.perf_counter()
            variant.step(work)
            seconds.append(time.perf_counter() - begin)
    return [median(each) for each in found]


def rows_of(name: str, wanted: Sequence[str]) -> Iterator[Row]:
    """Yield a row for each of the variants that are wanted of one model; runs in a child process."""
    work = zoo.ALL[name].build()
    eager = Variant(copy.deepcopy(work.model), None)  # type: ignore[arg-type]
    eager.call = eager.model
    eager.step(work)
    eager_bytes = eager.peak(work)
    stock = compiled(work)
    oracle = stock.state(work)
    for variant in wanted:
        begin = time.perf_counter()
        yield {"variant": variant, **_row(variant, work, eager, stock, oracle, eager_bytes, begin)}


def _row(
    name: str,
    work: zoo.Workload,
    eager: Variant,
    stock: Variant,
    oracle: Sequence[torch.Tensor],
    eager_bytes: int,
    begin: float,
) -> Row:
    kind, _, size = name.partition(" ")
    row: Row = {"eager_bytes": eager_bytes, "busy": round(os.getloadavg()[0] / (os.cpu_count() or 1), 1)}
    if kind == "lowtide":
        row["budget_bytes"] = int(size.removesuffix("%")) * eager_bytes // 100
    try:
        made = wrapped(work, row["budget_bytes"]) if kind == "lowtide" else compiled(work, float(size or 1.0))
    except lowtide.InfeasibleBudgetError as error:
        return {**row, "least_bytes": error.least_bytes, "first_seconds": time.perf_counter() - begin}
    row["first_seconds"] = time.perf_counter() - begin
    row["same_bits"] = all(map(torch.equal, made.state(work), oracle))
    row["measured_bytes"] = max(made.peak(work) for _ in range(2))
    if kind == "lowtide":
        (plan,) = lowtide.plans(made.model)
        row |= {"planned_bytes": plan.peak_bytes, "overhead": plan.overhead, "tuning": plan.tuning}
    seconds = times((eager, stock, made), work)
    return {
        **row,
        "eager_seconds": seconds[0],
        "of_eager": seconds[2] / seconds[0],
        "of_stock": seconds[2] / seconds[1],
    }


def page(rows: Sequence[Row]) -> str:
    """Return the summary of all rows."""
    columns = {
        "model": text("model"),
        "variant": text("variant"),
        "eager MiB": mib("eager_bytes"),
        "planned": mib("planned_bytes"),
        "measured": mib("measured_bytes"),
        "least seen": mib("least_bytes"),
        "x eager's time": number("of_eager", ".2f"),
        "x stock's": number("of_stock", ".2f"),
        "bits of stock": text("same_bits"),
        "busy": text("busy"),
    }
    shown = [row for row in rows if row["variant"] in ("stock", "activation 0.5", "activation 0.1")]
    shown += [row for row in rows if row["variant"].startswith("lowtide")]
    shown.sort(key=lambda row: row["model"])
    head = f"# Plans through Inductor\n\n{describe_machine()} What the columns mean is in `benchmarks/inductor.py`;"
    return f"{head} all rows are in the file beside this page.\n\n{table(shown[:50], columns)}"


def main() -> None:
    """Run what is missing, one model per child process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(MODELS), metavar="MODEL")
    parser.add_argument("--budgets", nargs="*", type=int, default=list(BUDGETS))
    parser.add_argument("--ratios", nargs="*", type=float, default=list(RATIOS))
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    refuse_unknown(parser, "models", given.only, zoo.ALL)
    if given.child:
        for row in rows_of(given.only[0], given.child):
            emit(row)
        return
    there = {(row["model"], row["variant"]) for row in read_rows(FILE) if "error" not in row}
    names = ["stock", *(f"activation {each}" for each in given.ratios), *(f"lowtide {each}%" for each in given.budgets)]
    for model in given.only:
        missing = [name for name in names if (model, name) not in there]
        for row in run_child(__file__, ["--only", model, "--child", *missing]) if missing else ():
            append_row(FILE, {"model": model, "variant": "?", **row})
            print(row, file=sys.stderr)
    FILE.with_suffix(".md").write_text(page([row for row in read_rows(FILE) if "error" not in row]) + "\n")


if __name__ == "__main__":
    main()
