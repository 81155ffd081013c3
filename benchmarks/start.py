"""How long does the first planned step take?

For every model, seconds of the first training step (forward and backward) from a process of its own: in eager mode,
with PyTorch's `aot_eager`, and wrapped with 60 % of the unplanned step: with cold caches, with warm ones, and with
patience="full". Ways of one model run one after the other, so that a ratio compares like with like. What a planned
first step consists of is timed beside: capture by PyTorch, what lowtide makes of it, costs, planning, lowering.

    python benchmarks/start.py                       # what has no row yet
    python benchmarks/start.py --only gpt2 --again
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn

import lowtide
from common import (
    RESULTS,
    Row,
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
from lowtide.runtime import improvements, model_plans, pipeline
from lowtide.testing.models import loss_of
from lowtide.testing.models.convolutions import resnet50, unet
from lowtide.testing.models.sequences import gpt

Case = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
BUDGET = "60%"


def llama() -> Case:
    """Return a LLaMA of 12 layers."""
    hf = importlib.import_module("transformers")
    config = hf.LlamaConfig(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        use_cache=False,
    )
    tokens = torch.randint(8192, (2, 256))
    return hf.LlamaForCausalLM(config), (), {"input_ids": tokens, "labels": tokens}


class Tiny(nn.Module):
    """A model with very many very small parameters."""

    def __init__(self, count: int = 1500) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(16)) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale in self.scales:
            x = x * scale
        return x.square().mean()


MODELS: dict[str, Callable[[], Case]] = {
    "gpt2": lambda: gpt(layers=12, dim=768, heads=12, tokens=512, batch=2, vocab=50257),
    "resnet50": lambda: resnet50(size=224, batch=16, classes=1000),
    "llama": llama,
    "unet": lambda: unet(levels=4, width=32, size=192, batch=4),
    "parameters": lambda: (Tiny(), (torch.randn(4, 16),), {}),
}
WAYS = ("eager", "aot_eager", "cold", "warm", "full")


class Clock:
    """Seconds by phase; a phase inside of another counts for itself alone."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner = [0.0]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add what runs inside."""
        start = time.perf_counter()
        self._inner.append(0.0)
        try:
            yield
        finally:
            took = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + took - self._inner.pop()
            self._inner[-1] += took

    def watch(self, place: Any, attribute: str, name: str) -> None:
        """Add what a function takes from now on."""
        function = getattr(place, attribute)

        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return function(*args, **kwargs)

        setattr(place, attribute, timed)


def watched() -> Clock:
    """Return a clock of the phases of a planned first step."""
    clock = Clock()
    clock.watch(pipeline, "capture", "normalising")
    clock.watch(model_plans, "resolve_costs", "costs")
    clock.watch(improvements.Improvements, "solve", "planning")
    clock.watch(pipeline, "lower_graph", "lowering")
    clock.watch(pipeline, "lower_staged", "lowering")
    return clock


def run_way(name: str, way: str) -> Row:
    """Return the row of one first step."""
    torch.manual_seed(0)
    model, args, kwargs = MODELS[name]()
    if way == "aot_eager":
        model = torch.compile(model, backend="aot_eager", dynamic=False)  # type: ignore[assignment]
    clock = watched()
    if way in ("cold", "warm", "full"):
        lowtide.wrap(model, budget=BUDGET, patience="full" if way == "full" else None)
    with clock.phase("capture and step"):
        loss_of(model(*args, **kwargs)).backward()
    row: Row = {"model": name, "way": way, "seconds": sum(clock.seconds.values()), "phases": clock.seconds}
    if way in ("cold", "warm", "full"):
        plan = lowtide.plans(model)[0]
        row |= {"stage": str(getattr(plan, "stage", "")), "overhead": plan.overhead, "ops": plan.num_ops}
    if way == "cold":
        start = time.perf_counter()
        row["settled_overhead"] = lowtide.plans(model, wait=True)[0].overhead
        row["settled_seconds"] = time.perf_counter() - start
    return row


def run_model(name: str, seconds: int) -> Row:
    """Return the row of a model: all ways, one after the other."""
    found: Row = {"model": name}
    with tempfile.TemporaryDirectory() as warm:
        for way in WAYS:
            with tempfile.TemporaryDirectory() as cold:
                # The way with cold caches fills those of the warm one; "full" has cold ones again.
                folder = warm if way in ("cold", "warm") else cold
                arguments = ["--child", name, way, "--seconds", str(seconds)]
                for row in run_child(__file__, arguments, env={"LOWTIDE_CACHE_DIR": folder}):
                    found |= {f"{way}_{key}": value for key, value in row.items() if key not in ("model", "way")}
    return found


def _ratio(way: str) -> Callable[[Row], str]:
    def show(row: Row) -> str:
        if f"{way}_seconds" not in row or "aot_eager_seconds" not in row:
            return "-"
        return f"{row[f'{way}_seconds'] / row['aot_eager_seconds']:.2f}"

    return show


def _phases(row: Row) -> str:
    return ", ".join(f"{name} {seconds:.1f}" for name, seconds in row.get("cold_phases", {}).items())


def page(rows: Sequence[Row]) -> str:
    """Return the page."""
    columns = {
        "model": text("model"),
        "eager s": number("eager_seconds", ".1f"),
        "aot_eager s": number("aot_eager_seconds", ".1f"),
        "cold": _ratio("cold"),
        "warm": _ratio("warm"),
        "full": _ratio("full"),
        "ops": number("cold_ops", ",d"),
        "overhead first": number("cold_overhead", ".2%"),
        "then": number("cold_settled_overhead", ".2%"),
        "full's": number("full_overhead", ".2%"),
        "after s": number("cold_settled_seconds", ".0f"),
    }
    return "\n".join(
        [
            "# The first step",
            "",
            f"Seconds of the first training step. {describe_machine()}",
            "Cold, warm and full are lowtide's, as a multiple of aot_eager's in the same run: with the default",
            "patience and cold or warm caches, and with patience=full and cold ones. Overheads are predicted:",
            "of the plan of the first step, of the one from the background, and of the one of the waiting call.",
            "",
            table(rows, columns),
            "",
            "What a cold first step consists of, in seconds:",
            "",
            *(f"- {row['model']}: {_phases(row) or row.get('cold_error', '-')}" for row in rows),
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(MODELS))
    parser.add_argument("--again", action="store_true", help="measure what has a row already, too")
    parser.add_argument("--seconds", type=int, default=1800)
    parser.add_argument("--child", nargs=2)
    options = parser.parse_args(argv)
    if options.child:
        emit(run_way(*options.child))
        return 0
    refuse_unknown(parser, "model", options.only, MODELS)
    rows = {row["model"]: row for row in read_rows(RESULTS / "start.jsonl")}
    for name in options.only:
        if options.again or name not in rows:
            rows[name] = run_model(name, options.seconds)
            print(page([rows[name]]), flush=True)
            ordered = [rows[each] for each in MODELS if each in rows]
            write_results("start", rows=ordered, markdown=page(ordered))
    return 0


if __name__ == "__main__":
    sys.exit(main())
