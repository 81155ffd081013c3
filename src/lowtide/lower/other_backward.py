"""The backward pass for other gradients than those that were planned for, behind a forward pass that has run.

A plan says in which order backward runs and what it recomputes. If tangents are missing, the program has fewer ops; the
plan's order of the others stays, without the recomputations that nothing needs any more. So what was planned to need
little memory still does. Where that is no legal schedule, everything is recomputed where it is read.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from lowtide.capture.program import Program
from lowtide.errors import InvalidScheduleError, UnsupportedBackwardError
from lowtide.graph.analysis import has_same_ops
from lowtide.graph.ir import Graph, OpId, ValueId
from lowtide.lower.emit_graphs import Frame, lower_backward, repeated_ops, saved_values
from lowtide.schedule.expand import expand
from lowtide.schedule.steps import Schedule
from lowtide.schedule.verify import verify


def schedule_of(other: Program, planned: Program, schedule: Schedule, kept: Collection[ValueId]) -> Schedule:
    """Return the schedule of a program that shares its forward ops with the planned one.

    If only layouts differ, so that its ops are those of the planned program, it is the planned schedule. If gradients
    are missing, it is what is left of it.

    Args:
        other: What runs.
        planned: What was planned.
        schedule: The plan's.
        kept: What may be read of forward; the rest is recomputed where the planned schedule does not serve.
    """
    if has_same_ops(other.graph, planned.graph):
        if set(saved_values(other, schedule)) <= set(saved_values(planned, schedule)):
            return schedule
        return expand(other.graph, kept)
    return _what_is_left(planned, schedule, other, kept)


def lower_other_backward(other: Program, schedule: Schedule, frame: Frame) -> fx.GraphModule:
    """Return the backward graph of `other`; raise if it reads of forward what is not handed over."""
    unknown = set(saved_values(other, schedule)).difference(frame.saved)
    undrawn = [op for op in repeated_ops(schedule) if other.graph.ops[op].random and op not in frame.states]
    if unknown or undrawn:
        names = [other.graph.values[value].name for value in sorted(unknown)]
        names += [other.graph.ops[op].name for op in sorted(undrawn)]
        raise UnsupportedBackwardError(
            f"Gradients of a planned graph came in another layout than that of its outputs, and its backward pass then "
            f"reads what forward has not kept ({', '.join(names)}). Compute the whole loss inside of the model."
        )
    return lower_backward(other, schedule, frame)


def _what_is_left(program: Program, schedule: Schedule, other: Program, kept: Collection[ValueId]) -> Schedule:
    """Return the schedule of `other`, which is `program` with fewer tangents, that follows `schedule`.

    Args:
        program: The program that was planned.
        schedule: Its schedule.
        other: The program without some tangents, with the same forward ops and values.
        kept: What forward hands over.
    """
    followed = _followed(program, schedule, other)
    if followed is not None and set(saved_values(other, followed)) <= set(kept):
        return followed
    return expand(other.graph, kept)


def _followed(program: Program, schedule: Schedule, other: Program) -> Schedule | None:
    """Return the ops of `other` in the order of `schedule`, or None if that is not legal."""
    own = {name: op for op in other.graph.backward if (name := _name(other, op)) is not None}
    forward = set(program.graph.forward)
    places: list[OpId | None] = []
    for op in schedule.backward:
        places.append(op if op in forward else own.get(_name(program, op) or ""))
    order = [op for op in places if op is not None]
    if not set(other.graph.backward) <= set(order):
        return None
    found = Schedule(tuple(schedule.forward), tuple(_needed(other.graph, order)))
    try:
        verify(other.graph, found)
    except InvalidScheduleError:
        return None
    return found


def _name(program: Program, op: OpId) -> str | None:
    call = program.calls[op]
    return program.graph.ops[op].name if call is None else call.name


def _needed(graph: Graph, order: list[OpId]) -> list[OpId]:
    """Return `order` without recomputations that nothing reads."""
    forward = set(graph.forward)
    wanted: set[ValueId] = set(graph.outputs)
    kept: list[OpId] = []
    for op in reversed(order):
        outputs = set(graph.ops[op].outputs)
        if op in forward and not outputs & wanted:
            continue
        kept.append(op)
        wanted -= outputs
        wanted.update(graph.reads[op])
    return kept[::-1]
