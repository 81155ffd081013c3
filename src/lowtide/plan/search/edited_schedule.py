"""A schedule under edit, priced exactly after every change in time that does not grow with its length.

A stage is a first run and the repeated runs put in just before it; first runs keep the given order, so stage `k` ends
with the first run of op `k`. Bytes are known as the bytes alive when each stage begins, and within a stage from what
each run makes and frees. Putting a run in or taking it out moves the ends of a few instances: a range of the former and
a few entries of the latter. A test compares the outcome with `schedule.simulate`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from lowtide.graph.ir import OpId
from lowtide.plan.search.ledger import LAST, NOTHING, SHIFT, Ints, Ledger, Run
from lowtide.plan.search.problem_arrays import ProblemArrays
from lowtide.schedule.steps import Schedule


class EditedSchedule:
    """Runs in order, what is alive when, and a journal of changes that can be taken back.

    Attributes:
        arrays: The graph.
        ledger: Who reads and writes what.
        op: For every run, its op; the first run of op `k` is run `k`.
        stage: For every run, its stage, or -1 if it is not part of the schedule.
        time: For every run, a number that grows from run to run.
        rows: For every stage, its runs in order.
        journal: The changes since the last commit: a run, and what it was before if it was taken out, else -1.
        seconds: Time of all runs, up to rounding.
        work: Effort so far, about the number of microseconds it takes; unlike those it is the same in every run.
    """

    def __init__(self, arrays: ProblemArrays, repeats: Sequence[Iterable[OpId]] = ()) -> None:
        """Begin with every op once in the given order and, before the first run of op k, the runs `repeats[k]`."""
        count = arrays.num_ops
        self.arrays = arrays
        self.ledger = Ledger(arrays)
        self.op, self.stage, self.time = self.ledger.op, self.ledger.stage, self.ledger.time
        self.rows: list[list[Run]] = [[k] for k in range(count)]
        self.seconds = sum(arrays.seconds)
        self.work = 0
        self.journal: list[tuple[Run, Run]] = []
        self._extra = list(arrays.extra)
        self._rise: Ints = np.zeros(count, dtype=np.int64)
        self._free_runs: list[Run] = []
        self._deleted: list[Run] = []
        for k in range(count):
            for op in repeats[k] if repeats else ():
                self.insert(op, k)
            self.ledger.attach(k)
        self.commit()

    def schedule(self) -> Schedule:
        """Return the schedule."""
        boundary = self.arrays.boundary
        parts = [
            tuple(self.op[run] for row in rows for run in row) for rows in (self.rows[:boundary], self.rows[boundary:])
        ]
        return Schedule(*parts)

    def repeats(self) -> list[Run]:
        """Return the repeated runs in order."""
        return [run for row in self.rows if len(row) > 1 for run in row[:-1]]

    def exists(self, run: Run) -> bool:
        """Whether `run` is part of the schedule."""
        return self.stage[run] >= 0

    def peaks(self) -> Ints:
        """Return the most bytes in each stage."""
        born, freed, extra = self.ledger.born, self.ledger.freed, self._extra
        for stage in self.ledger.dirty:
            alive = top = 0
            for run in self.rows[stage]:
                alive += born[run]
                if alive + extra[run] > top:
                    top = alive + extra[run]
                alive -= freed[run]
            self._rise[stage] = top
        self.ledger.dirty.clear()
        return self.ledger.begin + self._rise

    def peak(self) -> int:
        """Return the most bytes at any time."""
        return int(self.peaks().max()) if len(self.rows) else 0

    def worst_run(self, stage: int) -> Run:
        """Return the run in `stage` at which the most bytes are alive, the first of them."""
        best, top, alive = self.rows[stage][0], -1, 0
        for run in self.rows[stage]:
            alive += self.ledger.born[run]
            if alive + self._extra[run] > top:
                best, top = run, alive + self._extra[run]
            alive -= self.ledger.freed[run]
        return best

    def alive_in(self, stage: int) -> dict[Run, int]:
        """Return the bytes alive just before each run of `stage`."""
        alive = int(self.ledger.begin[stage])
        found = {}
        for run in self.rows[stage]:
            found[run] = alive
            alive += self.ledger.born[run] - self.ledger.freed[run]
        return found

    def insert(self, op: OpId, before: Run) -> Run:
        """Put in a repeated run of `op` just before the run `before`, and return it."""
        run = self._free_runs.pop() if self._free_runs else self._new_run()
        self.op[run] = op
        self._extra[run] = self.arrays.again_extra[op]
        self._place(run, before)
        self.journal.append((run, NOTHING))
        return run

    def delete(self, run: Run) -> None:
        """Take out the repeated run `run`."""
        row = self.rows[self.stage[run]]
        index = row.index(run)
        self.journal.append((run, row[index + 1]))
        del row[index]
        self._strike(run)
        self._deleted.append(run)

    def prune(self) -> None:
        """Take out repeated runs that became redundant by the last changes, and those that only fed them."""
        suspects = self.ledger.suspects
        while suspects:
            run = suspects.pop()
            if run >= self.arrays.num_ops and self.stage[run] >= 0 and self.ledger.is_redundant(run):
                self.delete(run)

    def undo(self, mark: int = 0) -> None:
        """Take back all changes since the journal had `mark` entries."""
        while len(self.journal) > mark:
            run, before = self.journal.pop()
            if before == NOTHING:
                self.rows[self.stage[run]].remove(run)
                self._strike(run)
                self._free_runs.append(run)
            else:
                self._deleted.pop()
                self._place(run, before)
        self.ledger.suspects.clear()

    def commit(self) -> None:
        """Forget the journal: the changes stay."""
        self.journal.clear()
        self._free_runs += self._deleted
        self._deleted.clear()

    def _new_run(self) -> Run:
        self._extra.append(0)
        return self.ledger.new_run()

    def _strike(self, run: Run) -> None:
        self.work += 15
        self.seconds -= self.arrays.seconds[self.op[run]]
        self.ledger.detach(run)
        self.stage[run] = NOTHING

    def _place(self, run: Run, before: Run) -> None:
        stage = self.stage[before]
        row = self.rows[stage]
        index = row.index(before)
        low = self.time[row[index - 1]] if index else stage << SHIFT
        if self.time[before] - low < 2:
            self._spread(stage)
            low = self.time[row[index - 1]] if index else stage << SHIFT
        row.insert(index, run)
        self.stage[run] = stage
        self.time[run] = (low + self.time[before]) // 2
        self.work += 15
        self.seconds += self.arrays.seconds[self.op[run]]
        self.ledger.attach(run)

    def _spread(self, stage: int) -> None:
        """Space the times of the runs of `stage` evenly."""
        row = self.rows[stage]
        width = (LAST + 1) // len(row)
        for place, run in enumerate(row[:-1]):
            self.time[run] = (stage << SHIFT) + (place + 1) * width - 1
        self.ledger.retime(row)


def edit_schedule(arrays: ProblemArrays, schedule: Schedule) -> EditedSchedule | None:
    """Return `schedule` as an edited schedule, or None if its first runs are not in the given order.

    Repeated runs after the last first run of forward count for backward; those after the very last one go.
    """
    repeats: list[list[OpId]] = [[]]
    for op in schedule.steps:
        if op == len(repeats) - 1:
            repeats.append([])
        elif op < len(repeats):
            repeats[-1].append(op)
        else:
            return None
    return EditedSchedule(arrays, repeats[:-1]) if len(repeats) > arrays.num_ops else None
