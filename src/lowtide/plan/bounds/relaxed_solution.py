"""Solutions of a moment program in terms of the graph, and the schedules they suggest."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.graph.ir import Graph, OpId, ValueId
from lowtide.schedule.steps import Schedule


@dataclass(frozen=True, slots=True)
class RelaxedSolution:
    """What a schedule as good as a bound would look like, as far as the bound's program can tell.

    Attributes:
        moments: Ops; the solution says what is alive at their first runs.
        kept: For each moment, the values alive.
        dropped: For each op, the values that are let go after its first run and made again before their next use.
        rerun: For each interval, of which the first ends at the first moment, the ops that run again.
        overhead: The share of the step that those runs take.
    """

    moments: tuple[OpId, ...]
    kept: tuple[frozenset[ValueId], ...]
    dropped: dict[OpId, frozenset[ValueId]]
    rerun: tuple[frozenset[OpId], ...]
    overhead: float


def schedule_of(graph: Graph, solution: RelaxedSolution) -> Schedule:
    """Return the schedule that lets values go as `solution` says and makes them again just in time; it may not fit."""
    there: set[ValueId] = set()
    passes: tuple[list[OpId], list[OpId]] = ([], [])
    kept = dict(zip(solution.moments, solution.kept, strict=True))
    lasting = _lasting(graph)
    for op in range(len(graph.ops)):
        steps = passes[not graph.is_forward(op)]
        for value in (*graph.ops[op].inputs, *sorted(kept.get(op, ()))):
            steps += _missing(graph, value, there, op)
        steps.append(op)
        there.update(graph.ops[op].outputs)
        there -= solution.dropped.get(op, frozenset()) - lasting
        if op in kept:
            there = {v for v in there if v in kept[op] or v in lasting or graph.values[v].producer == op}
    return Schedule(tuple(passes[0]), tuple(passes[1]))


def _lasting(graph: Graph) -> set[ValueId]:
    """Return the values that a schedule without forethought never lets go."""
    lasting = {*graph.outputs, *graph.handovers}
    for op in graph.ops:
        lasting.update(op.outputs if op.pinned else op.first_run_only)
    return lasting


def _missing(graph: Graph, value: ValueId, there: set[ValueId], before: OpId) -> list[OpId]:
    """Return the ops to run so that `value` is there, and add to `there` what they make."""
    steps: list[OpId] = []
    stack: list[tuple[ValueId, bool]] = [(value, False)]
    while stack:
        current, ready = stack.pop()
        producer = graph.values[current].producer
        if producer is None or current in there or producer >= before:
            continue
        if ready:
            steps.append(producer)
            there.update(graph.rewrites[producer])
            continue
        stack.append((current, True))
        stack += [(source, False) for source in reversed(graph.ops[producer].inputs)]
    return steps
