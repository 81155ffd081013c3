"""What the report shows, as plain lists, numbers and strings: the page, the picture and the text all read this.

Tables are columns, not rows, because a page carries its data inside and a graph may have tens of thousands of ops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from lowtide.analysis.explain_peak import Explanation, Share, explain_plan
from lowtide.analysis.planner_comparison import Comparison
from lowtide.errors import InvalidOptionError
from lowtide.graph.ir import Graph
from lowtide.plan.core.module_table import module_rows
from lowtide.plan.core.problem import Problem
from lowtide.plan.core.result import Plan
from lowtide.plan.diagnose.alive_tensors import short_target
from lowtide.schedule.simulate import Instance, Trace, instances
from lowtide.schedule.steps import Schedule

MAX_BARS = 20
MAX_TENSORS = 12
KINDS = {
    "kept": "activations kept for backward",
    "passing": "activations that forward alone needs",
    "recomputed": "activations that are recomputed",
    "gradients": "gradients on their way",
    "results": "gradients of parameters and other results",
    "inside": "temporary bytes inside ops",
}


def report_data(plan: Plan, comparison: Comparison | None = None) -> dict[str, Any]:
    """Return everything that a report of `plan` shows; `comparison` adds other planners to the trade-off.

    Raises:
        InvalidOptionError: `comparison` is about another graph, or the plan has no steps.
    """
    graph = plan.problem.graph
    if comparison is not None and comparison.fingerprint != graph.fingerprint:
        raise InvalidOptionError(
            f"The comparison is about a graph of {comparison.num_ops} ops (fingerprint {comparison.fingerprint}); the "
            f"plan's has {len(graph.ops)} ({graph.fingerprint}). Compare planners on the model that was planned."
        )
    explanation = explain_plan(plan, less=False)
    plain = Schedule.keep_all(graph)
    return {
        "summary": _summary(plan),
        "ops": _ops(plan),
        "plain": _course(plan.problem.baseline, plain),
        "planned": _course(plan.trace, plan.schedule) | {"kinds": _kinds(plan.problem, plan.schedule, plan.trace)},
        "peak": _peak(explanation),
        "modules": _modules(plan),
        "tradeoff": _tradeoff(plan, comparison),
    }


def short_source(source: str) -> str:
    """Return the file of "file:line" with its folder, without what is above."""
    return "/".join(source.replace("\\", "/").split("/")[-2:])


def _summary(plan: Plan) -> dict[str, Any]:
    return {
        "planner": plan.planner,
        "cut": plan.cut,
        "outcome": plan.outcome.name,
        "sentence": plan.outcome.value,
        "peak_bytes": plan.peak_bytes,
        "baseline_peak_bytes": plan.baseline_peak_bytes,
        "budget_bytes": plan.budget_bytes,
        "min_peak_bytes": plan.min_peak_bytes,
        "saved_bytes": plan.saved_bytes,
        "baseline_saved_bytes": plan.problem.baseline.saved_bytes,
        "overhead": plan.overhead,
        "bound": plan.bound,
        "gap": plan.gap,
        "step_seconds": plan.trace.seconds,
        "baseline_seconds": plan.problem.baseline.seconds,
        "num_ops": len(plan.problem.graph.ops),
        "num_recomputed": plan.num_recomputed,
        "planning_seconds": plan.seconds,
        "costs": plan.problem.costs.source,
        "fingerprint": plan.problem.graph.fingerprint,
    }


def _ops(plan: Plan) -> dict[str, list[Any]]:
    graph, costs = plan.problem.graph, plan.problem.costs
    runs = Counter(plan.schedule.steps)
    kept: Counter[int] = Counter()
    boundary = len(plan.schedule.forward)
    for instance in instances(graph, plan.schedule):
        producer = graph.values[instance.value].producer
        if producer is not None and instance.birth < boundary <= instance.death:
            kept[producer] += instance.bytes
    return {
        "name": [op.name for op in graph.ops],
        "target": [short_target(op.target) for op in graph.ops],
        "module": [op.module for op in graph.ops],
        "source": [short_source(op.source) for op in graph.ops],
        "forward": [graph.is_forward(op) for op in range(len(graph.ops))],
        "seconds": list(costs.seconds),
        "bytes": [sum(graph.values[value].bytes for value in op.outputs) for op in graph.ops],
        "inside": list(costs.workspace_bytes),
        "runs": [runs[op] for op in range(len(graph.ops))],
        "kept": [kept[op] for op in range(len(graph.ops))],
        "pinned": [op.pinned for op in graph.ops],
    }


def _course(trace: Trace, schedule: Schedule) -> dict[str, Any]:
    return {
        "steps": list(schedule.steps),
        "bytes": list(trace.bytes_during),
        "boundary": trace.boundary,
        "peak_step": trace.peak_step,
    }


def _kinds(problem: Problem, schedule: Schedule, trace: Trace) -> dict[str, list[int]]:
    """Return, for every kind of memory, its bytes during each step; together they are the trace's bytes."""
    length = len(schedule.steps)
    changes = {kind: [0] * (length + 1) for kind in KINDS}
    for instance in instances(problem.graph, schedule):
        change = changes[_kind(problem.graph, schedule, instance)]
        change[instance.birth] += instance.bytes
        change[instance.death + 1] -= instance.bytes
    levels: dict[str, list[int]] = {}
    for kind, change in changes.items():
        level = 0
        levels[kind] = []
        for step in range(length):
            level += change[step]
            levels[kind].append(level)
    for step in range(length):
        levels["inside"][step] = trace.bytes_during[step] - sum(
            levels[kind][step] for kind in KINDS if kind != "inside"
        )
    return levels


def _kind(graph: Graph, schedule: Schedule, instance: Instance) -> str:
    producer, boundary = graph.values[instance.value].producer, len(schedule.forward)
    in_forward = instance.birth < boundary
    if producer is not None and not graph.is_forward(producer):
        return "results" if instance.value in graph.held else "gradients"
    if not in_forward:
        return "recomputed"
    return "kept" if instance.death >= boundary else "passing"


def _peak(explanation: Explanation) -> dict[str, Any]:
    return {
        "step": explanation.step,
        "phase": explanation.phase,
        "op": explanation.op,
        "inside_bytes": explanation.workspace_bytes,
        "modules": _bars(explanation.by_module),
        "sources": _bars(explanation.by_source),
        "blamed": [
            {
                "what": tensor.what,
                "bytes": tensor.bytes,
                "reason": tensor.reason,
                "source": short_source(tensor.source),
            }
            for tensor in explanation.blamed
        ],
        "tensors": [
            [tensor.what, tensor.bytes, short_source(tensor.source)] for tensor in explanation.tensors[:MAX_TENSORS]
        ],
        "num_tensors": len(explanation.tensors),
    }


def _bars(shares: Sequence[Share]) -> list[list[Any]]:
    """Return name, bytes, number of tensors and the full name; what comes after the longest bars is one last bar."""
    bars = [[short_source(each.name), each.bytes, each.tensors, each.name] for each in shares[:MAX_BARS]]
    rest = shares[MAX_BARS:]
    if rest:
        name = f"({len(rest)} more)"
        bars.append([name, sum(each.bytes for each in rest), sum(each.tensors for each in rest), name])
    return bars


def _modules(plan: Plan) -> dict[str, list[Any]]:
    graph, costs = plan.problem.graph, plan.problem.costs
    plain = {row.module: row.kept_bytes for row in module_rows(graph, costs, Schedule.keep_all(graph))}
    rows = module_rows(graph, costs, plan.schedule)
    rows.sort(key=lambda row: (-max(plain[row.module], row.kept_bytes), -row.recompute_seconds, row.module))
    columns: dict[str, list[Any]] = {
        "name": [row.module or "(top)" for row in rows[:MAX_BARS]],
        "plain": [plain[row.module] for row in rows[:MAX_BARS]],
        "kept": [row.kept_bytes for row in rows[:MAX_BARS]],
        "recomputed": [row.recomputed for row in rows[:MAX_BARS]],
        "seconds": [row.recompute_seconds for row in rows[:MAX_BARS]],
    }
    rest = rows[MAX_BARS:]
    if rest:
        columns["name"].append(f"({len(rest)} more)")
        columns["plain"].append(sum(plain[row.module] for row in rest))
        columns["kept"].append(sum(row.kept_bytes for row in rest))
        columns["recomputed"].append(sum(row.recomputed for row in rest))
        columns["seconds"].append(sum(row.recompute_seconds for row in rest))
    return columns


def _tradeoff(plan: Plan, comparison: Comparison | None) -> dict[str, Any]:
    """Return the curve of every planner that met a budget, and the proved bounds as (budget bytes, overhead)."""
    bounds = {} if plan.bound is None else {plan.budget_bytes: plan.bound}
    curves, missed = [], []
    for planner in comparison.planners if comparison else ():
        points = comparison.curve(planner) if comparison else []
        if points:
            curves.append({"planner": planner, "points": points})
        else:
            missed.append(planner)
    for row in comparison.rows if comparison else ():
        if row.bound is not None:
            bounds[row.budget_bytes] = max(row.bound, bounds.get(row.budget_bytes, 0.0))
    return {"curves": curves, "missed": missed, "bounds": sorted(bounds.items()), "compared": comparison is not None}
