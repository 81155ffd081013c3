"""Legality of a schedule, checked rule by rule; knows nothing of its price.

Reading a value always means reading its newest instance. After an op runs again, each value it writes has a new
instance, except those in `first_run_only`: these still are the ones of the first run, so the check demands that every
read finds an instance of the producer's latest run, or a `first_run_only` one.
"""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.errors import InvalidScheduleError
from lowtide.graph.ir import Graph, OpId, ValueId
from lowtide.schedule.steps import Schedule


def verify(graph: Graph, schedule: Schedule) -> None:
    """Raise `InvalidScheduleError` unless `schedule` may be run on `graph` and gives its results."""
    _check_ids(graph, schedule)
    _check_phases(graph, schedule)
    _check_reads(graph, schedule)
    _check_ends(graph, schedule)
    _check_single_runs(graph, schedule)
    _check_random(graph, schedule)


def _check_ids(graph: Graph, schedule: Schedule) -> None:
    for step, op in enumerate(schedule.steps):
        if isinstance(op, bool) or not isinstance(op, int) or not 0 <= op < len(graph.ops):
            raise InvalidScheduleError(f"Step {step} runs op {op!r}; ops are 0 to {len(graph.ops) - 1}.")


def _check_phases(graph: Graph, schedule: Schedule) -> None:
    if graph.boundary is None and schedule.backward:
        raise InvalidScheduleError(
            f"The graph has no phases, but {len(schedule.backward)} steps are scheduled in backward."
        )
    for step, op in enumerate(schedule.forward):
        if not graph.is_forward(op):
            raise InvalidScheduleError(f"Step {step} runs the backward op {graph.ops[op].name!r} in forward.")


def _check_reads(graph: Graph, schedule: Schedule) -> None:
    """Check that every step finds the instances it reads."""
    latest_run: dict[OpId, int] = {}
    made_at: dict[ValueId, int] = {}
    for step, op_id in enumerate(schedule.steps):
        op = graph.ops[op_id]
        for value_id in op.inputs:
            value = graph.values[value_id]
            if value.producer is None:
                continue
            if value_id not in made_at:
                raise InvalidScheduleError(
                    f"Step {step} ({op.name!r}) reads {value.name!r} before {graph.ops[value.producer].name!r} "
                    "has produced it."
                )
            once = value_id in graph.ops[value.producer].first_run_only
            if made_at[value_id] != latest_run[value.producer] and not once:
                raise InvalidScheduleError(
                    f"Step {step} ({op.name!r}) reads {value.name!r}, which the run of "
                    f"{graph.ops[value.producer].name!r} at step {latest_run[value.producer]} did not write again."
                )
        for value_id in graph.rewrites[op_id] if op_id in latest_run else op.outputs:
            made_at[value_id] = step
        latest_run[op_id] = step


def _check_ends(graph: Graph, schedule: Schedule) -> None:
    """Check that what the caller receives is produced in the phase in which it is due."""
    forward, backward = set(schedule.forward), set(schedule.backward)
    for what, ends in (("output", graph.outputs), ("handover", graph.handovers)):
        for value_id in ends:
            producer = graph.values[value_id].producer
            if producer is None:
                continue
            phase, runs = ("forward", forward) if graph.is_forward(producer) else ("backward", backward)
            if producer not in runs:
                raise InvalidScheduleError(
                    f"The {what} {graph.values[value_id].name!r} is due in {phase}, "
                    f"but {graph.ops[producer].name!r} does not run there."
                )


def _check_single_runs(graph: Graph, schedule: Schedule) -> None:
    """Check that pinned ops run once, in their own phase, in their given order."""
    _check_first_runs(graph, schedule, [k for k, op in enumerate(graph.ops) if op.pinned], "pinned")
    counts: dict[OpId, int] = {}
    for op in schedule.steps:
        counts[op] = counts.get(op, 0) + 1
        if graph.ops[op].pinned and counts[op] > 1:
            raise InvalidScheduleError(f"Op {graph.ops[op].name!r} must run exactly once: {graph.ops[op].pinned}.")


def _check_random(graph: Graph, schedule: Schedule) -> None:
    """Check that random ops first draw their numbers in the given order."""
    _check_first_runs(graph, schedule, [k for k, op in enumerate(graph.ops) if op.random], "random")


def _check_first_runs(graph: Graph, schedule: Schedule, ops: Sequence[OpId], what: str) -> None:
    first: dict[OpId, int] = {}
    for step, op in enumerate(schedule.steps):
        first.setdefault(op, step)
    before: OpId | None = None
    for op in ops:
        name = graph.ops[op].name
        if op not in first:
            raise InvalidScheduleError(f"The {what} op {name!r} never runs.")
        if graph.is_forward(op) != (first[op] < len(schedule.forward)):
            phase = "forward" if graph.is_forward(op) else "backward"
            raise InvalidScheduleError(f"The {what} op {name!r} must first run in {phase}, not at step {first[op]}.")
        if before is not None and first[op] < first[before]:
            raise InvalidScheduleError(
                f"The {what} op {name!r} first runs at step {first[op]}, before {graph.ops[before].name!r} at step "
                f"{first[before]}; their given order must be kept."
            )
        before = op
