"""Exact price of a schedule: bytes at every step, the peak and where it is, and seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.graph.costs import Costs
from lowtide.graph.ir import Graph, OpId, ValueId
from lowtide.schedule.steps import Schedule


@dataclass(frozen=True, slots=True)
class Instance:
    """One storage of a value, alive during the steps `birth` to `death`, both included."""

    value: ValueId
    birth: int
    death: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Trace:
    """What running a schedule takes.

    Attributes:
        bytes_during: Bytes alive while each step runs: instances alive, outputs being written, workspace.
        bytes_after: Bytes alive when each step has ended and what it used last is freed.
        peak_bytes: Largest entry of `bytes_during`, 0 for an empty schedule.
        peak_step: Where it is first reached.
        seconds: Time of all steps.
        boundary: Number of forward steps.
    """

    bytes_during: tuple[int, ...]
    bytes_after: tuple[int, ...]
    peak_bytes: int
    peak_step: int
    seconds: float
    boundary: int

    @property
    def saved_bytes(self) -> int:
        """Bytes alive between forward and backward."""
        return self.bytes_after[self.boundary - 1] if self.boundary else 0


def simulate(graph: Graph, costs: Costs, schedule: Schedule) -> Trace:
    """Return the exact `Trace` of `schedule`, in time linear in its length."""
    steps = schedule.steps
    lives = _lives(graph, schedule)
    born, freed = [0] * len(steps), [0] * len(steps)
    for birth, death, size in zip(lives.births, lives.deaths, lives.bytes, strict=True):
        born[birth] += size
        freed[death] += size
    during, after, alive = [], [], 0
    for made, extra, gone in zip(born, _extra_bytes(graph, costs, steps), freed, strict=True):
        alive += made
        during.append(alive + extra)
        alive -= gone
        after.append(alive)
    peak = max(during, default=0)
    seconds = costs.seconds
    return Trace(
        bytes_during=tuple(during),
        bytes_after=tuple(after),
        peak_bytes=peak,
        peak_step=during.index(peak) if during else 0,
        seconds=sum([seconds[op] for op in steps]),
        boundary=len(schedule.forward),
    )


def instances(graph: Graph, schedule: Schedule) -> list[Instance]:
    """Return every instance that `schedule` makes, in order of birth; inputs of the graph have none."""
    lives = _lives(graph, schedule)
    return list(map(Instance, lives.values, lives.births, lives.deaths, lives.bytes))


@dataclass(frozen=True, slots=True)
class _Lives:
    """The instances of a schedule, attribute by attribute, which is much quicker to make."""

    values: list[ValueId]
    births: list[int]
    deaths: list[int]
    bytes: list[int]


def _lives(graph: Graph, schedule: Schedule) -> _Lives:
    ops, reads, rewrites = graph.ops, graph.reads, graph.rewrites
    values: list[ValueId] = []
    births: list[int] = []
    deaths: list[int] = []
    current: dict[ValueId, int] = {}
    first_run: dict[OpId, int] = {}
    last_run: dict[OpId, int] = {}
    for step, op in enumerate(schedule.steps):
        for value in reads[op]:
            deaths[current[value]] = step
        if op in first_run:
            written = rewrites[op]
        else:
            first_run[op] = step
            written = ops[op].outputs
        last_run[op] = step
        for value in written:
            current[value] = len(values)
            values.append(value)
            births.append(step)
            deaths.append(step)
    _hold(graph, schedule, values, births, deaths)
    sizes = [graph.values[value].bytes for value in values]
    for op, first in first_run.items():
        if ops[op].replay_bytes and last_run[op] > first:
            values.append(ops[op].outputs[0])
            births.append(first)
            deaths.append(last_run[op])
            sizes.append(ops[op].replay_bytes)
    return _Lives(values, births, deaths, sizes)


def _hold(graph: Graph, schedule: Schedule, values: list[ValueId], births: Sequence[int], deaths: list[int]) -> None:
    """Extend the instances that are outputs to the end of the step, and handovers to the end of forward."""
    boundary = len(schedule.forward)
    ends = {**dict.fromkeys(graph.handovers, boundary - 1), **dict.fromkeys(graph.outputs, len(schedule.steps) - 1)}
    owner: dict[ValueId, int] = {}
    for index, value in enumerate(values):
        if value in ends:
            producer = graph.values[value].producer
            # Backward receives what forward made: making it again there is for backward's own use.
            if births[index] < boundary or producer is None or not graph.is_forward(producer):
                owner[value] = index
    for value, index in owner.items():
        deaths[index] = max(deaths[index], ends[value])


def _extra_bytes(graph: Graph, costs: Costs, steps: Sequence[OpId]) -> list[int]:
    """Return the bytes each step needs only while it runs: workspace, and the caller's generator state in a replay."""
    workspace, ops = costs.workspace_bytes, graph.ops
    extra = [workspace[op] for op in steps]
    seen: set[OpId] = set()
    for step, op in enumerate(steps):
        if op in seen:
            extra[step] += ops[op].replay_bytes
        seen.add(op)
    return extra
