"""The books of a schedule under edit: which run reads and writes what, and the bytes that follow from it.

Every read and write of a value by a run is an event. The events of a value are kept in the order of time. What lies
between two of them, if the second is a read, is a gap: a stretch of the value's life without a use. Entering a run or
striking it out moves the ends of a few instances: a range of the bytes alive when stages begin, and a few entries of
what runs make and free.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import numpy.typing as npt

from lowtide.graph.ir import OpId, ValueId
from lowtide.plan.search.problem_arrays import ProblemArrays

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Run = int
Event = int

# The time of a run is its stage, shifted by this, plus its place among the runs of the stage.
SHIFT = 24
LAST = (1 << SHIFT) - 1
NOTHING = -1


class Ledger:
    """Events and bytes of the runs that are entered. Runs are numbered; the first run of op `k` is run `k`.

    Attributes:
        arrays: The graph.
        op: For every run, its op.
        stage: For every run, its stage, or -1.
        time: For every run, a number that grows from run to run.
        born: For every run, the bytes it makes.
        freed: For every run, the bytes that are not needed after it.
        begin: For every stage, the bytes alive when it begins.
        dirty: Stages in which something was made or freed otherwise since this set was emptied.
        suspects: Runs that may be redundant since something changed.
        gap_start: For every event that is a read, the time of the event of its value before it.
        gap_end: For every event that is a read, its time; for other entries, less than any time.
        gap_value: For every event, its value.
        gap_seconds: For every event, what it was last found to take to have its value again, at first its op alone.
    """

    def __init__(self, arrays: ProblemArrays) -> None:
        count = arrays.num_ops
        self.arrays = arrays
        self.op: list[OpId] = list(range(count))
        self.stage = list(range(count))
        self.time = [(k << SHIFT) | LAST for k in range(count)]
        self.born = [0] * count
        self.freed = [0] * count
        self.begin: Ints = np.zeros(count, dtype=np.int64)
        self.dirty: set[int] = set(range(count))
        self.suspects: list[Run] = []
        self.gap_start: Ints = np.zeros(16, dtype=np.int64)
        self.gap_end: Ints = np.full(16, NOTHING, dtype=np.int64)
        self.gap_value: Ints = np.zeros(16, dtype=np.int64)
        self.gap_seconds: Floats = np.zeros(16)
        self._is_state = [False] * arrays.num_values + [True] * (len(arrays.bytes) - arrays.num_values)
        self._events: list[list[Event]] = [[] for _ in arrays.bytes]
        self._times: list[list[int]] = [[] for _ in arrays.bytes]
        self._of_run: list[list[Event]] = [[] for _ in range(count)]
        self._run_of: list[Run] = []
        self._value_of: list[ValueId] = []
        self._time_of: list[int] = []
        self._is_write: list[bool] = []
        self._free_events: list[Event] = []

    def new_run(self) -> Run:
        """Return the number of a new run."""
        for rows in (self.op, self.stage, self.time, self.born, self.freed):
            rows.append(0)
        self._of_run.append([])
        return len(self.op) - 1

    def near(self, value: ValueId, time: int) -> tuple[int, int]:
        """Return the times of the last event of `value` before `time`, and of the next if that is a read, else -1."""
        times = self._times[value]
        index = bisect_left(times, time)
        if not index:
            return NOTHING, NOTHING
        if index < len(times) and not self._is_write[self._events[value][index]]:
            return times[index - 1], times[index]
        return times[index - 1], NOTHING

    def last_read(self, value: ValueId, time: int) -> tuple[int, Run]:
        """Return the time of the last event of `value` before `time` and its run if that is a read, else -1 twice."""
        index = bisect_left(self._times[value], time) - 1
        if index < 0:
            return NOTHING, NOTHING
        event = self._events[value][index]
        return (NOTHING, NOTHING) if self._is_write[event] else (self._times[value][index], self._run_of[event])

    def run_at(self, event: Event) -> Run:
        """Return the run to which `event` belongs."""
        return self._run_of[event]

    def writer_before(self, event: Event) -> Run:
        """Return the run that wrote what `event` reads if nothing has read it before, else -1."""
        before = self._events[self._value_of[event]][self._index(event) - 1]
        return self._run_of[before] if self._is_write[before] else NOTHING

    def is_redundant(self, run: Run) -> bool:
        """Whether nothing that `run` writes is read before it is written again."""
        for event in self._of_run[run]:
            if self._is_write[event]:
                events = self._events[self._value_of[event]]
                index = self._index(event) + 1
                if index < len(events) and not self._is_write[events[index]]:
                    return False
        return True

    def retime(self, runs: list[Run]) -> None:
        """Take over the times of `runs`, whose order has not changed."""
        for run in runs:
            for event in self._of_run[run]:
                self._time_of[event] = self.time[run]
        for run in runs:
            for event in self._of_run[run]:
                events = self._events[self._value_of[event]]
                index = events.index(event)
                self._times[self._value_of[event]][index] = self._time_of[event]
                if not self._is_write[event]:
                    self._set_gap(event, events[index - 1])
                if index + 1 < len(events) and not self._is_write[events[index + 1]]:
                    self._set_gap(events[index + 1], event)

    def attach(self, run: Run) -> None:
        """Enter the events of `run`, whose place and time are set."""
        arrays, op = self.arrays, self.op[run]
        again = run >= arrays.num_ops
        self.born[run] = self.freed[run] = 0
        self.dirty.add(self.stage[run])
        for value in arrays.again_reads[op] if again else arrays.first_reads[op]:
            if arrays.held[value]:
                self._cover(value, -1)
            self._add_read(run, value)
            if arrays.held[value]:
                self._cover(value, 1)
        for value in arrays.writes[op] if again else arrays.first_writes[op]:
            if arrays.held[value]:
                self._cover(value, -1)
            self._add_write(run, value)
            if arrays.held[value]:
                self._cover(value, 1)

    def detach(self, run: Run) -> None:
        """Remove the events of `run`."""
        arrays = self.arrays
        self.dirty.add(self.stage[run])
        for event in reversed(self._of_run[run]):
            value = self._value_of[event]
            if arrays.held[value]:
                self._cover(value, -1)
            before = self._remove_event(event)
            if not self._is_write[event] and self._is_write[before]:
                self.suspects.append(self._run_of[before])
            if arrays.held[value]:
                self._cover(value, 1)
        self._of_run[run] = []

    def _new_event(self, run: Run, value: ValueId, *, write: bool) -> Event:
        if self._free_events:
            event = self._free_events.pop()
            self._run_of[event], self._value_of[event] = run, value
            self._time_of[event], self._is_write[event] = self.time[run], write
        else:
            event = len(self._run_of)
            self._run_of.append(run)
            self._value_of.append(value)
            self._time_of.append(self.time[run])
            self._is_write.append(write)
            if event == len(self.gap_end):
                self._grow()
        self.gap_value[event] = value
        self.gap_seconds[event] = self.arrays.rerun_seconds[value]
        self._of_run[run].append(event)
        return event

    def _grow(self) -> None:
        self.gap_start = np.concatenate((self.gap_start, np.zeros_like(self.gap_start)))
        self.gap_value = np.concatenate((self.gap_value, np.zeros_like(self.gap_value)))
        self.gap_seconds = np.concatenate((self.gap_seconds, np.zeros_like(self.gap_seconds)))
        self.gap_end = np.concatenate((self.gap_end, np.full_like(self.gap_end, NOTHING)))

    def _index(self, event: Event) -> int:
        """Return where `event` is or belongs among those of its value."""
        return bisect_left(self._times[self._value_of[event]], self._time_of[event])

    def _set_gap(self, event: Event, before: Event) -> None:
        self.gap_start[event] = self._time_of[before]
        self.gap_end[event] = self._time_of[event]

    def _add_read(self, run: Run, value: ValueId) -> None:
        event = self._new_event(run, value, write=False)
        events = self._events[value]
        index = self._index(event)
        events.insert(index, event)
        self._times[value].insert(index, self._time_of[event])
        before = events[index - 1]
        self._set_gap(event, before)
        if index + 1 < len(events) and not self._is_write[events[index + 1]]:
            self._set_gap(events[index + 1], event)
        elif not self.arrays.held[value]:
            self._move_end(value, before, event)

    def _add_write(self, run: Run, value: ValueId) -> None:
        event = self._new_event(run, value, write=True)
        events = self._events[value]
        index = self._index(event)
        events.insert(index, event)
        self._times[value].insert(index, self._time_of[event])
        if index and self._is_write[events[index - 1]]:
            self.suspects.append(self._run_of[events[index - 1]])
        read_next = index + 1 < len(events) and not self._is_write[events[index + 1]]
        if read_next:
            self._set_gap(events[index + 1], event)
        if self.arrays.held[value] or self._is_state[value]:
            return
        size = self.arrays.bytes[value]
        self.born[run] += size
        if read_next:
            self._free_between(events[index - 1], run, size)
        else:
            self.freed[run] += size

    def _remove_event(self, event: Event) -> Event:
        """Remove `event`, and return the one before it."""
        value, run = self._value_of[event], self._run_of[event]
        events = self._events[value]
        index = self._index(event)
        del events[index], self._times[value][index]
        before = events[index - 1]
        self.gap_end[event] = NOTHING
        self._free_events.append(event)
        read_next = index < len(events) and not self._is_write[events[index]]
        if read_next:
            self._set_gap(events[index], before)
        if self.arrays.held[value]:
            return before
        if self._is_write[event] and read_next:
            self._free_between(before, run, -self.arrays.bytes[value])
        elif not self._is_write[event] and not read_next:
            self._move_end(value, event, before)
        return before

    # Bytes.

    def _free_between(self, before: Event, run: Run, size: int) -> None:
        """Free `size` bytes from `before`, now the end of an instance, until `run` makes the next one."""
        ending = self._run_of[before]
        self.freed[ending] += size
        self.dirty.add(self.stage[ending])
        self.begin[self.stage[ending] + 1 : self.stage[run] + 1] -= size

    def _move_end(self, value: ValueId, old: Event, new: Event) -> None:
        """Let an instance of `value` that ended at `old` end at `new`; either is the event before the other."""
        size = self.arrays.bytes[value]
        old_run, new_run = self._run_of[old], self._run_of[new]
        # A generator state that no repeated run reads takes no room.
        if self._is_state[value] and self._is_write[old]:
            self.born[old_run] += size
        else:
            self.freed[old_run] -= size
        if self._is_state[value] and self._is_write[new]:
            self.born[new_run] -= size
        else:
            self.freed[new_run] += size
        old_stage, new_stage = self.stage[old_run], self.stage[new_run]
        self.dirty.add(old_stage)
        self.dirty.add(new_stage)
        if old_stage < new_stage:
            self.begin[old_stage + 1 : new_stage + 1] += size
        elif new_stage < old_stage:
            self.begin[new_stage + 1 : old_stage + 1] -= size

    def _cover(self, value: ValueId, sign: int) -> None:
        """Count (1) or stop counting (-1) all instances of `value`, an output of forward; its last one never ends."""
        size = sign * self.arrays.bytes[value]
        events = self._events[value]
        writes = [index for index, event in enumerate(events) if self._is_write[event]]
        for place, index in enumerate(writes):
            start = self._run_of[events[index]]
            last = place + 1 == len(writes)
            end = self._run_of[events[-1 if last else writes[place + 1] - 1]]
            self.born[start] += size
            self.dirty.add(self.stage[start])
            following = None if last else self._run_of[events[writes[place + 1]]]
            if self._in_forward(start) and (following is None or not self._in_forward(following)):
                self.begin[self.stage[start] + 1 :] += size
            else:
                self.freed[end] += size
                self.dirty.add(self.stage[end])
                self.begin[self.stage[start] + 1 : self.stage[end] + 1] += size

    def _in_forward(self, run: Run) -> bool:
        return self.stage[run] < self.arrays.boundary
