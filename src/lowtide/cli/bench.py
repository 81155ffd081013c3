"""Run training steps of a model, plain and planned, and show measured memory and time beside the predicted.

Steps of both ways take turns, so that a busy machine slows both. Gradients and outputs must be equal to the last bit
and the measured peak must be within the budget; otherwise the command fails. Needs the memory of plain training.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from statistics import median
from typing import Any

import lowtide
from lowtide.cli.common import add_model, add_output, add_planning, budget, check_files, show, whole_number, wrote
from lowtide.cli.models import load_case
from lowtide.errors import InvalidInputError, InvalidModelError
from lowtide.files import replace_text
from lowtide.text_table import text_table
from lowtide.units import format_bytes, format_seconds

EXAMPLES = """
lowtide bench my_model.py:make
lowtide bench my_model.py:make --budgets 65% 50% 35% --steps 20 --out bench.json
"""
Row = dict[str, Any]
# What the caller allocates around the model: the loss's own gradient and the like.
_CALLER_BYTES = 1024


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of `lowtide bench`."""
    add_model(parser)
    parser.add_argument(
        "--budgets", nargs="+", type=budget, default=["65%", "50%"], metavar="BUDGET", help="default 65%% 50%%"
    )
    parser.add_argument("--steps", type=whole_number, default=5, help="timed steps of each way (default 5)")
    add_planning(parser)
    add_output(parser, out="save the table here, as JSON")


def run(options: argparse.Namespace) -> int:
    """Run the steps, print and write; return the exit code."""
    from torch import nn

    check_files([options.out], force=options.force)
    model, args, kwargs = load_case(options.model)
    if options.meta:
        raise InvalidInputError("--meta has no data to run on; leave it out, or use lowtide plan.")
    if not isinstance(model, nn.Module):
        raise InvalidModelError(f"{options.model} returned a function; lowtide bench runs an nn.Module.")
    rows = [measure(model, (args, kwargs), each, options) for each in options.budgets]
    data = {"format": "lowtide-bench", "version": 1, "model": options.model, "steps": options.steps, "rows": rows}
    if options.out is not None:
        replace_text(options.out, json.dumps(data, indent=1) + "\n")
    show(options, "\n".join(table(rows)), data)
    wrote(options, [options.out])
    if all(row["equal"] and row["within"] for row in rows):
        return 0
    print("lowtide bench: planned training differs from plain training, or is over its budget.", file=sys.stderr)
    return 1


def measure(model: Any, call: tuple[Any, Any], limit: str, options: argparse.Namespace) -> Row:
    """Return the figures of `model`, plain and planned within `limit`."""
    import copy

    plain, planned = copy.deepcopy(model), copy.deepcopy(model)
    lowtide.wrap(planned, budget=limit, planner=options.planner, costs=options.costs or "measured")
    equal = results(plain, call) == results(planned, call)
    peaks = [_peak(each, call) for each in (plain, planned)]
    seconds: list[tuple[float, float]] = []
    for number in range(options.steps):
        if sys.stderr.isatty():
            print(f"\rlowtide: budget {limit}, step {number + 1} of {options.steps}", end="\r", file=sys.stderr)
        seconds.append((_seconds(plain, call), _seconds(planned, call)))
    plan = max(lowtide.plans(planned), key=lambda each: each.peak_bytes)
    return {
        "budget": limit,
        "budget_bytes": plan.budget_bytes,
        "plain_peak_bytes": peaks[0],
        "predicted_peak_bytes": plan.peak_bytes,
        "measured_peak_bytes": peaks[1],
        "plain_seconds": median(one for one, _ in seconds),
        "predicted_overhead": plan.overhead,
        "measured_overhead": median(two / one for one, two in seconds) - 1,
        "equal": equal,
        "within": peaks[1] <= plan.budget_bytes + _CALLER_BYTES,
    }


def results(model: Any, call: tuple[Any, Any]) -> str:
    """Return a hash of the loss and all gradients of one step; gradients are gone afterwards."""
    import hashlib

    import torch

    with torch.random.fork_rng():
        torch.manual_seed(0)
        loss = step(model, call)
    digest = hashlib.sha256(_bytes(loss.detach()))
    for parameter in model.parameters():
        if parameter.grad is not None:
            digest.update(_bytes(parameter.grad))
    model.zero_grad(set_to_none=True)
    return digest.hexdigest()


def step(model: Any, call: tuple[Any, Any]) -> Any:
    """Return the loss of one step, whose gradients are there."""
    args, kwargs = call
    loss = _loss(model(*args, **kwargs))
    loss.backward()
    return loss


def table(rows: list[Row]) -> list[str]:
    """Return the rows for people."""
    header = ("budget", "plain", "predicted", "measured", "plain step", "predicted", "measured", "results")
    cells = [
        (
            row["budget"],
            format_bytes(row["plain_peak_bytes"]),
            format_bytes(row["predicted_peak_bytes"]),
            format_bytes(row["measured_peak_bytes"]) + ("" if row["within"] else " OVER"),
            format_seconds(row["plain_seconds"]),
            f"+{100 * row['predicted_overhead']:.1f} %",
            f"{100 * row['measured_overhead']:+.1f} %",
            "equal" if row["equal"] else "DIFFERENT",
        )
        for row in rows
    ]
    return ["Peak bytes and time of a training step, plain and planned", "", *text_table(header, cells)]


def _loss(output: Any) -> Any:
    from lowtide.testing.models import loss_of

    loss = loss_of(output)
    return loss if loss.dim() == 0 else loss.sum()


def _peak(model: Any, call: tuple[Any, Any]) -> int:
    peak = lowtide.measure_peak(lambda: step(model, call))
    model.zero_grad(set_to_none=True)
    return peak


def _seconds(model: Any, call: tuple[Any, Any]) -> float:
    start = time.perf_counter()
    step(model, call)
    seconds = time.perf_counter() - start
    model.zero_grad(set_to_none=True)
    return seconds


def _bytes(tensor: Any) -> bytes:
    import torch

    return bytes(tensor.contiguous().cpu().flatten().view(torch.uint8).numpy())
