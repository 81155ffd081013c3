"""Train a small GPT and a small U-Net, plain and inside a budget, and show that nothing but memory and time differs.

Both runs start from equal copies and see the same batches and random numbers. Losses, parameters and the random state
must be equal to the last bit, and the measured peak must be within the budget; otherwise the command fails.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import lowtide
from lowtide.api import main_plan
from lowtide.errors import InvalidBudgetError
from lowtide.measure import memory_timeline
from lowtide.report.image_file import Course, Panel, can_draw, draw
from lowtide.testing.models import MODELS, loss_of, new_batch
from lowtide.units import format_bytes, parse_budget

EXAMPLES = """
lowtide demo
lowtide demo --budget 35% --steps 20 --out out/demo --force
"""
NAMES = {"gpt": "GPT", "unet": "U-Net"}
SIZES: dict[str, dict[str, dict[str, int]]] = {
    "small": {"gpt": {"layers": 6, "dim": 128, "heads": 4, "tokens": 192}, "unet": {}},
    "tiny": {
        "gpt": {"layers": 2, "dim": 32, "heads": 2, "tokens": 64, "vocab": 64},
        "unet": {"levels": 3, "width": 4, "size": 64},
    },
}

RECORDINGS = 3
Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Runner:
    """A model with its optimizer, and the example call its batches are made from."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    example: Call

    @staticmethod
    def make(model: nn.Module, example: Call) -> Runner:
        """Return a runner that trains `model` with AdamW."""
        return Runner(model, torch.optim.AdamW(model.parameters(), lr=1e-3), example)

    def train(self, step: int) -> tuple[Tensor, float]:
        """Return the loss of a whole training step, and its seconds."""
        args, kwargs = new_batch(self.example, seed=step)
        torch.manual_seed(step)
        start = time.perf_counter()
        loss = loss_of(self.model(*args, **kwargs))
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach(), time.perf_counter() - start

    def course(self, label: str, step: int) -> Course:
        """Return the measured memory of one step, from the quickest of a few recordings: peaks agree, clocks do not."""
        return min((self._record(label, step) for _ in range(RECORDINGS)), key=lambda course: course.points[-1][0])

    def _record(self, label: str, step: int) -> Course:
        args, kwargs = new_batch(self.example, seed=step)
        clock: list[float] = []

        def gradients() -> None:
            # The timeline begins with the first allocation: let that be here, where the clock begins too.
            torch.empty(1)
            clock.append(time.perf_counter())
            output = self.model(*args, **kwargs)
            clock.append(time.perf_counter())
            loss_of(output).backward()  # type: ignore[no-untyped-call]

        points = memory_timeline(gradients, "cpu")
        self.optimizer.zero_grad(set_to_none=True)
        return Course(label, points, clock[1] - clock[0])


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of `lowtide demo`."""
    parser.add_argument("--budget", type=_budget, default="50%", help='such as "50%%" (default) or "40MiB"')
    parser.add_argument("--steps", type=_steps, default=8, help="training steps of each run (default 8)")
    parser.add_argument("--size", choices=tuple(SIZES), default="small", help="size of the models")
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="where pictures and plans go")
    parser.add_argument("--force", action="store_true", help="overwrite files of an earlier run")


def run(options: argparse.Namespace) -> int:
    """Run the demo and return its exit code."""
    picture = options.out / "memory.png"
    if picture.exists() and not options.force:
        print(f"lowtide demo: {picture} exists; use --force to overwrite it.", file=sys.stderr)
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    outcomes = [compare(name, options) for name in NAMES]
    draw_outcomes([panel for panel, _ in outcomes], options.out)
    if not all(succeeded for _, succeeded in outcomes):
        print("lowtide demo: planned training differs from plain training, or is over its budget.", file=sys.stderr)
        return 1
    return 0


def compare(name: str, options: argparse.Namespace) -> tuple[Panel, bool]:
    """Train one model both ways; return its picture, and whether results are equal and the budget is kept."""
    model, args, kwargs = MODELS[name](**SIZES[options.size][name])
    plain = Runner.make(model, (args, kwargs))
    planned = Runner.make(lowtide.wrap(copy.deepcopy(model), budget=options.budget), (args, kwargs))
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"\n{NAMES[name]}, {size:,} parameters, budget {options.budget}\n", flush=True)
    equal, ratio = train_both(plain, planned, options.steps)
    courses = plain.course("plain", options.steps), planned.course("planned", options.steps)
    plan = main_plan(lowtide.plans(planned.model))
    measured = courses[1].peak_bytes
    print(f"\n  results    {'equal to the last bit' if equal else 'DIFFERENT'}: losses, parameters, random state")
    print(
        f"  peak       plain {format_bytes(courses[0].peak_bytes)}; planned {format_bytes(plan.peak_bytes)} predicted, "
        f"{format_bytes(measured)} measured; budget {format_bytes(plan.budget_bytes)}"
    )
    print(f"  step time  planned / plain = {ratio:.3f} (median of {options.steps - 1} interleaved pairs)\n")
    print(plan, flush=True)
    path = options.out / f"{name}.plan.json"
    plan.save(path)
    print(f"\nWrote {path}")
    return Panel(NAMES[name], courses, plan.budget_bytes), equal and measured <= plan.budget_bytes


def train_both(plain: Runner, planned: Runner, steps: int) -> tuple[bool, float]:
    """Train both in turns; return whether all is equal, and the median ratio of their seconds after the first step."""
    equal, ratios = True, []
    print("  step  loss, plain   loss, planned")
    for step in range(steps):
        loss, seconds = plain.train(step)
        state = torch.get_rng_state()
        other, other_seconds = planned.train(step)
        same = torch.equal(loss, other) and torch.equal(state, torch.get_rng_state())
        equal &= same
        ratios.append(other_seconds / seconds)
        print(f"  {step + 1:>4}  {loss:.9f}   {other:.9f}  {'same' if same else 'DIFFERENT'}", flush=True)
    states = zip(plain.model.state_dict().values(), planned.model.state_dict().values(), strict=True)
    return equal and all(torch.equal(left, right) for left, right in states), median(ratios[1:])


def draw_outcomes(panels: list[Panel], folder: Path) -> None:
    """Write the pictures, or say why there are none."""
    if not can_draw():
        print("No picture: matplotlib is not installed (pip install 'lowtide[picture]').")
        return
    paths = [folder / "memory.png", folder / "memory.svg"]
    draw(panels, *paths)
    for path in paths:
        print(f"Wrote {path}")


def _budget(text: str) -> str:
    try:
        parse_budget(text)
    except InvalidBudgetError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _steps(text: str) -> int:
    steps = int(text)
    if steps < 2:
        raise argparse.ArgumentTypeError(f"{steps} steps are too few: the first one plans, so at least 2 are needed")
    return steps
