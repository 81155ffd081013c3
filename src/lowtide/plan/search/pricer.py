"""The simulator's prices for many similar schedules of one graph, fast: whole-array arithmetic, no Python loop.

Every read and write of a value is an event. Sorted by value and step, the events of an instance are neighbours: it
starts with a write and ends at the last event before the next write. Sums over those starts and ends give the bytes at
every step, exactly as `schedule.simulate` counts them (a test compares both).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lowtide.graph.costs import Costs
from lowtide.graph.ir import Graph

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

# Pricing an empty schedule takes about as long as this many steps of a long one.
_FIXED_WORK = 500


@dataclass(frozen=True, slots=True)
class Events:
    """All events of a schedule, sorted by value and step, and the bytes they lead to.

    Attributes:
        value: The value read or written.
        step: When.
        write: Whether it is a write.
        during: Bytes alive while each step runs.
        after: Bytes alive after each step.
        again: Whether each step is a repeated run.
        useful: Whether something that each step writes is read before it is written again.
        peak: Largest entry of `during`.
    """

    value: Ints
    step: Ints
    write: Bools
    during: Floats
    after: Floats
    again: Bools
    useful: Bools
    peak: float


@dataclass(frozen=True, slots=True)
class _Rows:
    """One list of numbers per row, stored end to end."""

    start: Ints
    count: Ints
    items: Ints

    @staticmethod
    def of(rows: Sequence[Sequence[int]]) -> _Rows:
        count = np.array([len(row) for row in rows], dtype=np.int64)
        start = np.concatenate(([0], np.cumsum(count)[:-1])).astype(np.int64) if len(rows) else count
        return _Rows(start, count, np.array([item for row in rows for item in row], dtype=np.int64))

    def gather(self, index: Ints) -> tuple[Ints, Ints]:
        """Return the items of the rows `index`, end to end, and for each the position in `index` of its row."""
        counts = self.count[index]
        position = np.repeat(np.arange(len(index)), counts)
        offset = np.arange(len(position)) - np.repeat(np.cumsum(counts) - counts, counts)
        return self.items[np.repeat(self.start[index], counts) + offset], position


class Pricer:
    """Prices schedules of one graph.

    Attributes:
        work: Effort so far, in steps priced: unlike time, it is the same in every run.
    """

    def __init__(self, graph: Graph, costs: Costs) -> None:
        ops, values = graph.ops, graph.values
        self.work = 0
        self.num_ops = len(ops)
        self._bytes = np.array([value.bytes for value in values], dtype=np.float64)
        reads = [[v for v in dict.fromkeys(op.inputs) if values[v].producer is not None] for op in ops]
        again = [list(graph.produced(op)) for op in range(len(ops))]
        # Row k is the first run of op k, row k + num_ops any later run of it.
        self._reads = _Rows.of(reads + reads)
        self._writes = _Rows.of([list(op.outputs) for op in ops] + again)
        replay = np.array([op.replay_bytes for op in ops], dtype=np.float64)
        workspace = np.array(costs.workspace_bytes, dtype=np.float64)
        self._extra = np.concatenate((workspace, workspace + replay))
        self._replayed = np.flatnonzero(replay)
        self._replay = replay[self._replayed]
        held = [v for v in graph.outputs if values[v].producer is not None]
        self._held = np.array(held, dtype=np.int64)
        self._held_forward = np.array([graph.is_forward(values[v].producer or 0) for v in held], dtype=np.bool_)
        early = [v for v in graph.handovers if values[v].producer is not None]
        self._early = np.array(early, dtype=np.int64)

    def events(self, order: Sequence[int], split: int) -> Events:
        """Return the events and bytes of the schedule that runs `order`, whose first `split` steps are forward."""
        steps = np.array(order, dtype=np.int64)
        length = len(steps)
        self.work += length + _FIXED_WORK
        shift = max(1, length.bit_length())
        rows, first, last = self._runs(steps)
        read_value, read_step = self._reads.gather(rows)
        write_value, write_step = self._writes.gather(rows)
        keys = np.concatenate(
            ((((read_value << shift) | read_step) << 1), ((((write_value << shift) | write_step) << 1) | 1))
        )
        keys.sort()
        write = (keys & 1).astype(np.bool_)
        plain = keys >> 1
        step = plain & ((1 << shift) - 1)
        value = plain >> shift
        starts = np.flatnonzero(write)
        ends = np.append(starts, len(keys))[1:] - 1
        deaths = step[ends]
        self._hold(plain, shift, starts, deaths, (split, length))
        size = self._bytes[value[starts]]
        born: Floats = np.bincount(step[starts], weights=size, minlength=length).astype(np.float64)
        freed: Floats = np.bincount(deaths, weights=size, minlength=length).astype(np.float64)
        extra = self._extra[rows]
        if len(self._replayed):
            self._keep_states(first, last, born, freed)
        alive = np.cumsum(born - freed)
        during = alive + freed + extra
        useful = np.zeros(length, dtype=np.bool_)
        useful[step[starts[ends > starts]]] = True
        peak = float(during.max()) if length else 0.0
        return Events(value, step, write, during, alive, rows >= self.num_ops, useful, peak)

    def _runs(self, steps: Ints) -> tuple[Ints, Ints, Ints]:
        """Return the table row of every step, and for every op its first and last step (-1 if it does not run)."""
        index = np.arange(len(steps))
        first = np.full(self.num_ops, -1, dtype=np.int64)
        last = first.copy()
        first[steps[::-1]] = index[::-1]
        last[steps] = index
        return np.where(first[steps] == index, steps, steps + self.num_ops), first, last

    def _hold(self, plain: Ints, shift: int, starts: Ints, deaths: Ints, ends: tuple[int, int]) -> None:
        """Extend the deaths of outputs to the end of the step, and of handovers to the end of forward."""
        split, length = ends
        if len(self._held):
            due = np.where(self._held_forward, split, length)
            owner = self._owner(plain, (self._held << shift) | due, starts)
            deaths[owner] = length - 1
        if len(self._early):
            owner = self._owner(plain, (self._early << shift) | split, starts)
            deaths[owner] = np.maximum(deaths[owner], split - 1)

    def _owner(self, plain: Ints, due: Ints, starts: Ints) -> Ints:
        """Return the instances that are current just before the events `due`."""
        event = np.searchsorted(plain, due) - 1
        return np.searchsorted(starts, event, side="right") - 1

    def _keep_states(self, first: Ints, last: Ints, born: Floats, freed: Floats) -> None:
        """Count generator states from the first to the last run of every random op that runs again."""
        again = last[self._replayed] > first[self._replayed]
        ops, size = self._replayed[again], self._replay[again]
        np.add.at(born, first[ops], size)
        np.add.at(freed, last[ops], size)
