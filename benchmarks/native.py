"""Against what PyTorch offers, at equal measured peaks: its memory budget, and checkpointing of repeated blocks.

A model is captured with measured costs. PyTorch's partitioner divides the joint graph, in which no op writes over its
input, at `torch._functorch.config.activation_memory_budget` from 0.05 to 0.95 (its elimination of common
subexpressions is off, and random ops are saved, so that all run the same ops and give the same bits). Its graphs are
run and their peak is measured; the order of their ops is a schedule, priced with the costs of these ops.
`torch.utils.checkpoint` (not reentrant) is put around every group of repeated blocks that does at least half of the
forward work; eager training with it is measured, and its recomputation (each block from its inputs when backward first
needs it, up to the last op that backward needs) is priced as a schedule. For each of these points, `auto` plans the
graph as lowtide runs it, with the measured peak as its budget; where the simulation of the rival's schedule has four
bytes more, one scalar, so has the budget. Either overhead is a share of the unplanned step of its graph.

    python benchmarks/native.py --only gpt unet --ratios 0.2 0.5 0.8
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import fx, nn
from torch._functorch import config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

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
from limits import Job, planned, run_jobs
from lowtide.capture.memory_rewrites import as_traced
from lowtide.graph.ir import Graph, OpId
from lowtide.plan.core.problem import Problem
from lowtide.schedule.steps import Schedule
from lowtide.schedule.verify import verify
from planners import Captured, capture, differences, execute, execute_graphs
from problems import problem_of, write

RATIOS = tuple(round(0.05 * k, 2) for k in range(1, 20))
FOLDER = Path(__file__).parents[1] / "out" / "native"
SEED = 7
# By so many bytes, those of one scalar, the simulation of PyTorch's own schedules exceeds their measurement. A budget
# without them would be one that the rival's schedule exceeds, too.
SCALAR = 4
LEAST_WORK = 0.5
MOST_GROUPS = 4
LIMIT_SECONDS = 300.0
ROUNDING = 1e-9


def partitioned(captured: Captured, ratio: float) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return forward and backward as PyTorch's partitioner divides the captured graph."""
    program = captured.program
    joint = copy.deepcopy(program.module)
    random = {op.name for op in program.graph.ops if op.random}
    for node in joint.graph.nodes:
        if node.name in random:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    with config.patch(activation_memory_budget=ratio, cse=False):
        return min_cut_rematerialization_partition(
            joint,
            None,
            num_fwd_outputs=program.num_forward_outputs,
            static_lifetime_input_indices=sorted(program.parameters),
        )


def schedule_of(graph: Graph, forward: fx.GraphModule, backward: fx.GraphModule) -> Schedule:
    """Return the order in which the two graphs run the ops of `graph`; they keep their names."""
    ids = {op.name: op_id for op_id, op in enumerate(graph.ops)}
    tangents = [op_id for op_id in graph.backward if graph.ops[op_id].target == "lowtide.tangents"]

    def ops(module: fx.GraphModule) -> list[OpId]:
        # A saved value is an input of backward that has the name of its op.
        return [ids[node.name] for node in module.graph.nodes if node.op == "call_function" and node.name in ids]

    return Schedule(tuple(ops(forward)), (*tangents, *ops(backward)))


def budget_rows(captured: Captured, ratios: Sequence[float]) -> Iterator[Row]:
    """Yield a row for each ratio of PyTorch's memory budget."""
    problem = captured.problem
    plain = execute(captured, Schedule.keep_all(problem.graph))
    for ratio in ratios:
        forward, backward = partitioned(captured, ratio)
        schedule = schedule_of(problem.graph, forward, backward)
        verify(problem.graph, schedule)
        run = execute_graphs(captured, forward, backward)
        wrong = differences(run, plain)
        trace = problem.price(schedule)
        yield {
            "rival": f"budget {ratio:.2f}",
            "measured_bytes": run.peak_bytes,
            "simulated_bytes": trace.peak_bytes,
            "rival_overhead": problem.overhead(trace),
            "exact": not wrong,
        }


def groups(model: nn.Module, problem: Problem) -> dict[str, list[str]]:
    """Return groups of repeated blocks that do enough of the forward work, by the name of their class."""
    found: dict[str, list[str]] = {}
    for path, module in model.named_modules():
        if not path or not any(True for _ in module.children()) or isinstance(module, nn.ModuleList | nn.ModuleDict):
            continue
        name = type(module).__name__
        name += f" at depth {path.count('.') + 1}" if isinstance(module, nn.Sequential) else ""
        group = found.setdefault(name, [])
        if not any(path.startswith(other + ".") for other in group):
            group.append(path)
    work = {name: _share(problem, paths) for name, paths in found.items() if len(paths) > 1}
    chosen = sorted((name for name in work if work[name] >= LEAST_WORK), key=lambda name: -work[name])
    return {name: found[name] for name in chosen[:MOST_GROUPS]}


def _share(problem: Problem, paths: Sequence[str]) -> float:
    graph, seconds = problem.graph, problem.costs.seconds
    inside = [op for ops in block_ops(graph, paths) for op in ops]
    return sum(seconds[op] for op in inside) / max(sum(seconds[op] for op in graph.forward), 1e-30)


def block_ops(graph: Graph, paths: Sequence[str]) -> list[list[OpId]]:
    """Return the forward ops of each block."""
    blocks: dict[str, list[OpId]] = {path: [] for path in paths}
    for op in graph.forward:
        parts = graph.ops[op].module.split(".")
        for length in range(1, len(parts) + 1):
            path = ".".join(parts[:length])
            if path in blocks:
                blocks[path].append(op)
                break
    return list(blocks.values())


def checkpointed_schedule(graph: Graph, blocks: Sequence[Sequence[OpId]]) -> Schedule:
    """Return the schedule of checkpointing `blocks`: each runs again as a whole when backward first needs it."""
    owner = {op: index for index, ops in enumerate(blocks) for op in ops}
    lost: dict[int, int] = {}
    for op, index in owner.items():
        for value in graph.ops[op].outputs:
            outside = any(graph.is_forward(each) and owner.get(each) != index for each in graph.readers[value])
            if not outside and value not in graph.always_there:
                lost[value] = index
    needed = [-1] * len(blocks)
    for value, index in lost.items():
        if any(not graph.is_forward(reader) for reader in graph.readers[value]):
            needed[index] = max(needed[index], graph.values[value].producer or 0)
    backward: list[OpId] = []
    done: set[int] = set()
    for op in graph.backward:
        for value in graph.ops[op].inputs:
            index = lost.get(value)
            if index is not None and index not in done:
                done.add(index)
                backward += [each for each in blocks[index] if each <= needed[index] and not graph.ops[each].pinned]
        backward.append(op)
    return Schedule(tuple(graph.forward), tuple(backward))


def checkpoint_rows(work: zoo.Workload, problem: Problem) -> Iterator[Row]:
    """Yield a row for each group of repeated blocks."""
    for name, paths in groups(work.model, problem).items():
        schedule = checkpointed_schedule(problem.graph, block_ops(problem.graph, paths))
        verify(problem.graph, schedule)
        trace = problem.price(schedule)
        yield {
            "rival": f"checkpoint {len(paths)} x {name}",
            "measured_bytes": checkpointed_peak(work, paths),
            "simulated_bytes": trace.peak_bytes,
            "rival_overhead": problem.overhead(trace),
        }


def checkpointed_peak(work: zoo.Workload, paths: Sequence[str]) -> int:
    """Return the measured peak of an eager step with the modules at `paths` checkpointed."""
    model = copy.deepcopy(work.model)
    for path in paths:
        module = model.get_submodule(path)
        module.forward = partial(checkpoint, module.forward, use_reentrant=False)
    args, kwargs = work.batch(0)

    def step() -> None:
        torch.manual_seed(SEED)
        work.loss(model(*args, **kwargs)).backward()

    step()
    model.zero_grad(set_to_none=True)
    return lowtide.measure_peak(step)


def run_model(name: str, ratios: Sequence[float], path: Path) -> None:
    """Emit the rivals' rows of one model, and write its problem to `path`; runs in a child process."""
    entry = zoo.ALL[name]
    try:
        work = entry.build()
    except ImportError as error:
        emit({"skipped": f"{entry.package} is not installed ({error})"})
        return
    write(capture(work).problem, path)
    with as_traced():
        captured = capture(work)
    for rows in (budget_rows(captured, ratios), checkpoint_rows(work, captured.problem)):
        try:
            for row in rows:
                emit(row)
        except Exception as error:  # one rival that fails does not hide the other
            emit({"failed": f"{type(error).__name__}: {error}"})


def budget_of(row: Row) -> int:
    """Return the budget that is fair beside a rival: its measured peak, or a scalar more if its simulation says so."""
    excess = row["simulated_bytes"] - row["measured_bytes"]
    return row["measured_bytes"] + (excess if 0 < excess <= SCALAR else 0)


def plan_rows(rows: Sequence[Row], problem: Problem, planner: str) -> Iterator[Row]:
    """Yield the rivals' rows with what `planner` needs at their measured peaks."""
    peaks = dict.fromkeys(budget_of(row) for row in rows if "measured_bytes" in row)
    jobs = (
        Job({"peak": peak}, partial(planned, Problem(problem.graph, problem.costs, peak), planner), LIMIT_SECONDS)
        for peak in peaks
    )
    plans = {row.pop("peak"): row for row in run_jobs(jobs)}
    for row in rows:
        yield {
            **row,
            "unplanned_bytes": problem.budget_bytes,
            **(plans[budget_of(row)] if "measured_bytes" in row else {}),
        }


def violations(row: Row) -> list[str]:
    """Return what is wrong with a row."""
    if "failed" in row or "skipped" in row:
        return []
    if "fits" not in row:
        return [str(row.get("error") or f"out of time after {row.get('out_of_time')} s")]
    found = [] if row["fits"] else ["no plan fits the rival's peak"]
    if row["fits"] and row["overhead"] > row["rival_overhead"] + ROUNDING:
        found.append("more overhead than the rival")
    return found


def describe(row: Row) -> str:
    """Return the progress line of a row."""
    head = f"{row['model']:<22} {row.get('rival', ''):<32}"
    if "fits" not in row:
        return f"{head} {_note(row)}"
    figures = f"{mib('measured_bytes')(row)} MiB, rival {row['rival_overhead']:.2%}, ours {row['overhead']:.2%}"
    return f"{head} {figures}, {row['planning_seconds']:.1f} s  {_note(row)}"


def _note(row: Row) -> str:
    return "; ".join(row["violations"]) or str(row.get("failed") or row.get("skipped") or "-").replace("|", "/")


def model_lines(rows: Sequence[Row]) -> list[Row]:
    """Return one line per model: means over its points at which the rival recomputes anything."""
    lines = []
    for name in dict.fromkeys(row["model"] for row in rows):
        line: Row = {"model": name}
        mine = [row for row in rows if row["model"] == name]
        for kind in RIVALS:
            paid = [row for row in _points(mine, kind) if row["rival_overhead"] > 0]
            line[f"{kind} points"] = len(paid)
            if paid:
                line[f"{kind} theirs"] = mean(row["rival_overhead"] for row in paid)
                line[f"{kind} ours"] = mean(row["overhead"] for row in paid)
                line[f"{kind} worst"] = max(row["overhead"] / row["rival_overhead"] for row in paid)
        line["note"] = "; ".join(dict.fromkeys(note for note in map(_note, mine) if note != "-")) or "-"
        lines.append(line)
    return lines


def _points(rows: Sequence[Row], kind: str) -> list[Row]:
    return [row for row in rows if row.get("rival", "").startswith(kind) and row.get("fits")]


def _columns(kind: str) -> dict[str, Callable[[Row], str]]:
    return {
        f"{kind}: points": text(f"{kind} points"),
        f"{kind}: theirs": number(f"{kind} theirs", ".2%"),
        f"{kind}: ours": number(f"{kind} ours", ".2%"),
        f"{kind}: largest ratio": number(f"{kind} worst", ".2f"),
    }


RIVALS = ("budget", "checkpoint")
COLUMNS: dict[str, Callable[[Row], str]] = {
    "model": text("model"),
    **_columns("budget"),
    **_columns("checkpoint"),
    "note": lambda row: row["note"][:120],
}


def _share_of_peak(row: Row) -> float:
    return float(row["measured_bytes"] / row["unplanned_bytes"])


def figures(rows: Sequence[Row]) -> list[str]:
    """Return the comparison in a few lines, for each kind of rival and for points below the unplanned peak alone."""
    lines = []
    for kind in RIVALS:
        mine = _points(rows, kind)
        missed = sum(bool(row["violations"]) for row in rows if row.get("rival", "").startswith(kind))
        for what, some in (
            ("all points", mine),
            ("below the unplanned peak", [r for r in mine if _share_of_peak(r) < 1]),
        ):
            paid = [row for row in some if row["rival_overhead"] > 0]
            if not paid:
                continue
            ratio = mean(row["overhead"] / row["rival_overhead"] for row in paid)
            ours, theirs = mean(row["overhead"] for row in paid), mean(row["rival_overhead"] for row in paid)
            worst = max(row["overhead"] / row["rival_overhead"] for row in paid)
            lines.append(
                f"{kind}, {what}: {len(paid)} points, mean overhead {ours:.2%} against {theirs:.2%} "
                f"({ours / theirs:.2f}), mean ratio {ratio:.2f}, largest {worst:.2f}"
            )
        lines.append(f"{kind}: {missed} points at which we are not better")
    return lines


def page(rows: Sequence[Row]) -> str:
    """Return the result page."""
    return "\n".join(
        [
            "# Against PyTorch's own means",
            "",
            "Written by `make bench-native`; " + describe_machine(),
            "",
            *(line.strip() for line in (__doc__ or "").split("\n\n")[1].splitlines()),
            "",
            *(f"- {line}" for line in figures(rows)),
            "",
            "Means over the points at which the rival recomputes anything; every point is in `native.jsonl`.",
            "",
            table(model_lines(rows), COLUMNS),
        ]
    )


def rows_of(name: str, options: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of one model."""
    options.problems.mkdir(parents=True, exist_ok=True)
    path = options.problems / f"{name}.json"
    asked = ["--child", name, "--problems", str(options.problems), "--ratios", *map(str, options.ratios)]
    measured = options.problems / f"{name}.rivals.json"
    if options.measured and measured.exists():
        rows = json.loads(measured.read_text())
    else:
        # Both graphs are measured again: the costs of one in the cache may be of a day on which the machine was busy.
        with tempfile.TemporaryDirectory() as empty:
            rows = list(run_child(__file__, asked, env={"LOWTIDE_CACHE_DIR": empty}))
        measured.write_text(json.dumps(rows))
    if not any("measured_bytes" in row for row in rows):
        yield from rows
        return
    found: Any = problem_of(name, folder=path.parent)
    yield from plan_rows(rows, found[0], options.planner)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code is 1 if a rival is better at some point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", default=list(zoo.ALL), help="models; all by default")
    parser.add_argument("--ratios", nargs="+", type=float, default=list(RATIOS), help="PyTorch's budgets")
    parser.add_argument("--planner", default="auto")
    parser.add_argument("--problems", type=Path, default=FOLDER, help="folder for the captured models")
    parser.add_argument(
        "--measured", action="store_true", help="plan again for what was measured last, if there is any"
    )
    parser.add_argument("--keep", action="store_true", help="keep the rows of the last run of models not run again")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory for native.md and native.jsonl")
    parser.add_argument("--child", metavar="NAME", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        run_model(options.child, options.ratios, options.problems / f"{options.child}.json")
        return 0
    refuse_unknown(parser, "model", options.only, zoo.ALL)
    rows = kept_rows("native", directory=options.out) if options.keep else []
    for name in options.only:
        # Rows of models that are not reached yet stay: what is written on the way must not lose them.
        rows = [row for row in rows if row["model"] != name]
        for row in rows_of(name, options):
            row = {"model": name, **row}
            row["violations"] = violations(row)
            rows.append(row)
            print(describe(row), flush=True)
        rows.sort(key=lambda row: list(zoo.ALL).index(row["model"]))
        written = write_results("native", rows=rows, markdown=page(rows), directory=options.out)
    print("\n".join(figures(rows)))
    for path in written:
        print(f"Wrote {path}")
    return 1 if any(row["violations"] or "error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
