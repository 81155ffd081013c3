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
    born, freed = [0] * len(steps), [0] * len(steps)
    for instance in instances(graph, schedule):
        born[instance.birth] += instance.bytes
        freed[instance.death] += instance.bytes
    during, after, alive = [], [], 0
    for step, extra in enumerate(_extra_bytes(graph, costs, steps)):
        alive += born[step]
        during.append(alive + extra)
        alive -= freed[step]
        after.append(alive)
    peak = max(during, default=0)
    return Trace(
        bytes_during=tuple(during),
        bytes_after=tuple(after),
        peak_bytes=peak,
        peak_step=during.index(peak) if during else 0,
        seconds=sum(costs.seconds[op] for op in steps),
        boundary=len(schedule.forward),
    )


def instances(graph: Graph, schedule: Schedule) -> list[Instance]:
    """Return every instance that `schedule` makes, in order of birth; inputs of the graph have none."""
    steps = schedule.steps
    ops, values = graph.ops, graph.values
    births: list[tuple[ValueId, int]] = []
    deaths: list[int] = []
    current: dict[ValueId, int] = {}
    first_run: dict[OpId, int] = {}
    last_run: dict[OpId, int] = {}
    for step, op_id in enumerate(steps):
        op = ops[op_id]
        for value in op.inputs:
            if values[value].producer is not None:
                deaths[current[value]] = step
        for value in op.outputs if op_id not in first_run else graph.produced(op_id):
            current[value] = len(births)
            births.append((value, step))
            deaths.append(step)
        first_run.setdefault(op_id, step)
        last_run[op_id] = step
    _hold(graph, schedule, births, deaths)
    made = [
        Instance(value, birth, death, values[value].bytes) for (value, birth), death in zip(births, deaths, strict=True)
    ]
    made += [
        Instance(ops[op_id].outputs[0], first, last_run[op_id], ops[op_id].replay_bytes)
        for op_id, first in first_run.items()
        if ops[op_id].replay_bytes and last_run[op_id] > first
    ]
    return made


def _hold(graph: Graph, schedule: Schedule, births: list[tuple[ValueId, int]], deaths: list[int]) -> None:
    """Extend the instances that are outputs to the end of the step, and handovers to the end of forward."""
    boundary, end = len(schedule.forward), len(schedule.steps) - 1
    ends = dict.fromkeys(graph.outputs, end)
    early = dict.fromkeys(graph.handovers, boundary - 1)
    if not ends and not early:
        return
    owner: dict[ValueId, int] = {}
    for index, (value, birth) in enumerate(births):
        producer = graph.values[value].producer
        in_own_phase = birth < boundary or producer is None or not graph.is_forward(producer)
        if in_own_phase and (value in ends or value in early):
            owner[value] = index
    for value, index in owner.items():
        deaths[index] = max(deaths[index], ends.get(value, -1), early.get(value, -1))


def _extra_bytes(graph: Graph, costs: Costs, steps: Sequence[OpId]) -> list[int]:
    """Return the bytes each step needs only while it runs: workspace, and the caller's generator state in a replay."""
    seen: set[OpId] = set()
    extra = []
    for op_id in steps:
        again = op_id in seen
        seen.add(op_id)
        extra.append(costs.workspace_bytes[op_id] + (graph.ops[op_id].replay_bytes if again else 0))
    return extra
