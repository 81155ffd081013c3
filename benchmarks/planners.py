"""Every planner on every model that it serves: executed, exact, and with the peak it predicts?

A model is captured once, with measured costs. Every planner then plans it at 70 and 45 % of the unplanned peak; its
schedule is lowered and run, whether it meets the budget or not. `exact` means that outputs, new buffers, gradients and
the random state afterwards equal those of the unplanned graph to the last bit, and those of the unplanned graph equal
the gradients of the reference run (`make bench-exact` compares that in full). The peak is measured with the profiler's
allocator events over forward and backward. Equal schedules of several planners are run once.

    python benchmarks/planners.py --only gpt unet --planners feng kusumoto
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import fx

import lowtide
import zoo
from common import RESULTS, Row, describe_machine, emit, number, run_child, table, text, write_results
from lowtide.capture.program import Program
from lowtide.errors import LowtideError, PlannerRefusedError
from lowtide.lower.emit_graphs import Lowered, lower
from lowtide.lower.execute import LoweredVariant, run_quickly
from lowtide.plan import registry
from lowtide.plan.core.problem import Problem
from lowtide.plan.solve import solve
from lowtide.pytorch.compiler.joint_graph import Run as GraphRun
from lowtide.runtime import pipeline
from lowtide.schedule.steps import Schedule

SEED = 7
BUDGETS = (70, 45)
TOLERANCE = 0.01
TOLERANCE_BYTES = 64 * 1024
LEFT_OUT = {"brute_force", "auto_thorough"}
# Rows that the page names one by one, the worst ones; a page is at most 60 lines.
SHOWN = 6


@dataclass
class Captured:
    """A model's largest training graph with the arguments it was called with."""

    problem: Problem
    program: Program
    arguments: list[Any]
    names: list[str | None]
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """What one run of a lowered schedule left, and its peak."""

    results: list[Any]
    gradients: list[Any]
    state: torch.Tensor
    peak_bytes: int


@contextmanager
def spying(seen: list[tuple[Program, list[Any]]]) -> Iterator[None]:
    """Note the program and the arguments of every graph that is captured and run."""
    plain_lower, plain_run = pipeline.lower, LoweredVariant.forward_run
    programs: list[Program] = []

    def noting_lower(program: Program, schedule: Schedule, spare: Any = None) -> Lowered:
        programs.append(program)
        return plain_lower(program, schedule, spare)

    def noting_forward(variant: LoweredVariant, graph: fx.GraphModule) -> GraphRun:
        run, program = plain_run(variant, graph), programs[-1]

        def noting_run(args: list[Any]) -> Any:
            seen.append((program, list(args)))
            return run(args)

        return noting_run

    pipeline.lower, LoweredVariant.forward_run = noting_lower, noting_forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        pipeline.lower, LoweredVariant.forward_run = plain_lower, plain_run  # type: ignore[method-assign]


def capture(work: zoo.Workload) -> Captured:
    """Return the largest graph of the workload's model, and the gradients of an unplanned step of it."""
    model = copy.deepcopy(work.model)
    names = {parameter.data_ptr(): name for name, parameter in model.named_parameters() if parameter.numel()}
    seen: list[tuple[Program, list[Any]]] = []
    with spying(seen):
        lowtide.wrap(model, budget="100%", planner="keep_all")
        before = {name: value.clone() for name, value in model.state_dict().items()}
        torch.manual_seed(SEED)
        work.loss(model(*work.args, **work.kwargs)).backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    plan = max(lowtide.plans(model), key=lambda each: each.peak_bytes)
    program, arguments = next(each for each in seen if each[0].graph.fingerprint == plan.problem.graph.fingerprint)
    called = [names.get(item.data_ptr()) if isinstance(item, torch.Tensor) else None for item in arguments]
    model.load_state_dict(before)
    fresh = [item.detach().clone() if isinstance(item, torch.Tensor) else item for item in arguments]
    return Captured(plan.problem, program, fresh, called, gradients)


def execute(captured: Captured, schedule: Schedule) -> Run:
    """Return what running `schedule` gives; the caller's arguments are not changed."""
    lowered = lower(captured.program, schedule)
    return execute_graphs(captured, lowered.forward, lowered.backward)


def execute_graphs(captured: Captured, forward_graph: fx.GraphModule, backward_graph: fx.GraphModule) -> Run:
    """Return what running a forward and a backward graph gives; the caller's arguments are not changed."""
    program = captured.program
    forward, backward = run_quickly(forward_graph), run_quickly(backward_graph)
    arguments = [item.clone() if isinstance(item, torch.Tensor) else item for item in captured.arguments]
    primals = list(arguments)
    tangents = [ones(node.meta["val"]) for node in program.tangents]
    left: dict[str, Any] = {}

    def step() -> None:
        made = forward(arguments)
        count = program.num_forward_outputs
        left["results"], saved = list(made[:count]), list(made[count:])
        del made
        saved += tangents
        left["gradients"] = backward(saved)

    torch.manual_seed(SEED)
    peak = lowtide.measure_peak(step)
    return Run([*left["results"], *primals], list(left["gradients"]), torch.get_rng_state(), peak)


def ones(fake: torch.Tensor) -> torch.Tensor:
    """Return ones laid out like `fake`."""
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype).fill_(1)


def differences(one: Run, other: Run) -> list[str]:
    """Return what differs between two runs."""
    found = [] if torch.equal(one.state, other.state) else ["random state"]
    for kind, left, right in (("result", one.results, other.results), ("gradient", one.gradients, other.gradients)):
        for index, (a, b) in enumerate(zip(left, right, strict=True)):
            same = torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b
            found += [] if same else [f"{kind} {index}"]
    return found


def against_model(captured: Captured, plain: Run) -> list[str]:
    """Return the parameters whose gradient in the unplanned graph is not that of the model's own step."""
    found = []
    for name, gradient in zip(captured.names, plain.gradients, strict=True):
        expected = captured.gradients.get(name) if name else None
        if expected is not None and gradient is not None and not torch.equal(expected, gradient):
            found.append(f"model {name}")
    return found


def run_model(name: str, planners: Sequence[str]) -> None:
    """Emit the rows of one model; runs in a child process."""
    entry = zoo.ALL[name]
    try:
        work = entry.build()
    except ImportError as error:
        emit({"model": name, "skipped": f"{entry.package} is not installed ({error})"})
        return
    captured = capture(work)
    plain = execute(captured, Schedule.keep_all(captured.problem.graph))
    wrong = against_model(captured, plain)
    known: dict[Schedule, tuple[list[str], int]] = {}
    for planner in planners:
        for budget in BUDGETS:
            row = {"model": name, "planner": planner, "budget": f"{budget}%", "ops": len(captured.problem.graph.ops)}
            emit({**row, **planned(captured, planner, budget, (plain, wrong), known)})


def planned(captured: Captured, planner: str, budget: int, expected: tuple[Run, list[str]], known: Any) -> Row:
    """Return the row of one planner and budget."""
    problem = captured.problem
    problem = Problem(problem.graph, problem.costs, problem.baseline.peak_bytes * budget // 100)
    started = time.perf_counter()
    try:
        plan = solve(problem, planner, throw=False)
    except PlannerRefusedError as error:
        return {"refused": str(error)}
    except LowtideError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    seconds = time.perf_counter() - started
    if plan.schedule not in known:
        run = execute(captured, plan.schedule)
        known[plan.schedule] = differences(run, expected[0]) + expected[1], run.peak_bytes
    wrong, measured = known[plan.schedule]
    return {
        "exact": not wrong,
        "differences": wrong[:5],
        "fits": plan.peak_bytes <= problem.budget_bytes,
        "baseline_bytes": plan.baseline_peak_bytes,
        "predicted_bytes": plan.peak_bytes,
        "measured_bytes": measured,
        "ratio": measured / plan.peak_bytes,
        "share": plan.peak_bytes / plan.baseline_peak_bytes,
        "overhead": plan.overhead,
        "planning_seconds": seconds,
    }


def violations(row: Row) -> list[str]:
    """Return what is wrong with a row."""
    if "error" in row:
        return [row["error"]]
    if "skipped" in row or "refused" in row:
        return []
    found = [] if row["exact"] else [f"not exact: {', '.join(row['differences'])}"]
    error = abs(row["predicted_bytes"] - row["measured_bytes"])
    if error > max(TOLERANCE * row["measured_bytes"], TOLERANCE_BYTES):
        found.append(f"prediction is off by {error} bytes")
    return found


def _note(row: Row) -> str:
    return row.get("skipped") or row.get("refused") or "; ".join(row["violations"]).replace("|", "/") or "-"


def planner_lines(rows: Sequence[Row]) -> list[Row]:
    """Return one line per planner: how many schedules, their medians, and how far the prediction is off at most."""
    lines = []
    for name in dict.fromkeys(row["planner"] for row in rows if "budget" in row):
        mine = [row for row in rows if row["planner"] == name]
        run = [row for row in mine if "predicted_bytes" in row]
        line: Row = {"planner": name, "schedules": len(run), "refused": sum("refused" in row for row in mine)}
        line["exact"] = sum(row["exact"] for row in run)
        line["off"] = max((abs(row["ratio"] - 1) for row in run), default=None)
        for budget in BUDGETS:
            fits = [row for row in run if row["budget"] == f"{budget}%" and row["fits"]]
            line[f"fits {budget}"] = len(fits)
            line[f"overhead {budget}"] = median(row["overhead"] for row in fits) if fits else None
        lines.append(line)
    return lines


COLUMNS: dict[str, Callable[[Row], str]] = {
    "planner": text("planner"),
    "schedules": text("schedules"),
    "refused": text("refused"),
    "exact": text("exact"),
    "prediction off by at most": number("off", ".2%"),
    **{f"fit {budget} %": text(f"fits {budget}") for budget in BUDGETS},
    **{f"median overhead at {budget} %": number(f"overhead {budget}", ".1%") for budget in BUDGETS},
}


def page(rows: Sequence[Row]) -> str:
    """Return the result page."""
    run = [row for row in rows if "predicted_bytes" in row]
    bad = [row for row in rows if row["violations"]]
    far = sorted(run, key=lambda row: -abs(row["ratio"] - 1))[:SHOWN]
    furthest = (f"{row['planner']} on {row['model']} at {row['budget']} ({row['ratio'] - 1:+.2%})" for row in far)
    lines = [
        "# Every planner, executed",
        "",
        "Written by `make bench-planners`; " + describe_machine(),
        "",
        *(line.strip() for line in (__doc__ or "").split("\n\n")[1].splitlines()),
        "",
        f"{len({row['model'] for row in run})} models, {len({row['planner'] for row in run})} planners, {len(run)} "
        f"schedules, {len(bad)} violations, {sum('refused' in row for row in rows)} refusals. All rows are in "
        "`planners.jsonl`.",
        "",
        *(f"- {row['model']}, {row['planner']}, {row.get('budget', '-')}: {_note(row)}" for row in bad[:SHOWN]),
        f"The predictions furthest off: {', '.join(furthest)}.",
        "",
        table(planner_lines(rows), COLUMNS),
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="models to run; all by default")
    parser.add_argument("--planners", nargs="+", metavar="NAME", help="planners to run; all by default")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory for planners.md and planners.jsonl")
    parser.add_argument("--child", metavar="NAME", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    planners = options.planners or [name for name in registry.names() if name not in LEFT_OUT]
    if options.child:
        run_model(options.child, planners)
        return 0
    rows: list[Row] = []
    for name in options.only or zoo.ALL:
        for row in run_child(__file__, ["--child", name, "--planners", *planners]):
            row = {"model": name, "planner": "-", **row}
            row["violations"] = violations(row)
            share = f"{row['share']:.1%} at {row['overhead']:.1%}" if "share" in row else _note(row)[:90]
            note = f"  VIOLATION {row['violations']}" if row["violations"] else ""
            print(f"{name:<22} {row['planner']:<16} {row.get('budget', ''):>5}  {share}{note}", flush=True)
            rows.append(row)
    for path in write_results("planners", rows=rows, markdown=page(rows), directory=options.out):
        print(f"Wrote {path}")
    return 1 if any(row["violations"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
