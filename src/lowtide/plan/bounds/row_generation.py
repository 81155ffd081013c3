"""Solving a window: its memory rows are many and long, so only those that a solution breaks are added."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import numpy as np

from lowtide.graph.ir import OpId, ValueId
from lowtide.plan.bounds.integer_program import Answer, Limits, Relaxation, Row
from lowtide.plan.bounds.lifetimes import Floats
from lowtide.plan.bounds.moment_program import Window
from lowtide.plan.bounds.relaxed_solution import Hint

# A row counts as broken above this share of the budget.
_BROKEN = 1 + 2e-6
# Rows added in one round, and the least distance between them: neighbouring rows say nearly the same.
_ROWS_PER_ROUND = 12
_DISTANCE = 4
_ROUNDS = 25
# As many of them are of repeated runs at most.
_AGAIN_PER_ROUND = 12


@dataclass(slots=True)
class Cutter:
    """A window and the memory rows found to matter: of first runs by their op, of repeated ones by their number."""

    window: Window
    rows: dict[OpId, Row] = field(default_factory=dict)
    again: dict[int, Row] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Begin with the rows of the moments."""
        self._add(list(self.window.moments))

    def relax(self, *, seconds: float = float("inf")) -> Answer:
        """Return the answer of the linear relaxation with all memory rows that matter."""
        started = time.perf_counter()
        answer = Answer(0.0)
        relaxation, added, again = Relaxation(self.window.program), 0, 0
        for _ in range(_ROUNDS):
            left = seconds - (time.perf_counter() - started)
            if left <= 0:
                break
            relaxation.add(list(self.rows.values())[added:])
            relaxation.add(list(self.again.values())[again:])
            added, again = len(self.rows), len(self.again)
            latest = relaxation.solve(seconds=left)
            if latest.infeasible:
                return latest
            # Each round has more rows, so its bound is no lower unless it ran out of time.
            answer = latest if latest.bound >= answer.bound else answer
            if latest.point is None or not self._cut(latest.point):
                break
        return answer

    def solve(self, limits: Limits) -> Answer:
        """Return the answer of the program in whole numbers with all memory rows that matter."""
        best = Answer(0.0)
        for _ in range(_ROUNDS):
            work = None if limits.work is None else limits.work - best.work
            left = replace(limits, seconds=limits.seconds - best.seconds, work=work)
            if left.seconds <= 0 or (work is not None and work <= 0):
                break
            latest = self.window.program.solve((*self.rows.values(), *self.again.values()), limits=left)
            if latest.infeasible:
                return latest
            best = replace(
                latest,
                bound=max(best.bound, latest.bound),
                seconds=best.seconds + latest.seconds,
                work=best.work + latest.work,
            )
            if best.bound >= limits.enough or latest.point is None or not self._cut(latest.point):
                break
        return best

    def hint(self, answer: Answer) -> Hint | None:
        """Return the solution of `answer` in terms of the graph."""
        point, window = answer.point, self.window
        if point is None:
            return None
        timeline = window.timeline
        kept: list[set[ValueId]] = []
        for op in window.moments:
            instant = 2 * op
            kept.append({v for v, due in enumerate(timeline.due) if due and timeline.is_fixed(v, instant)})
        for (moment, value), variable in window.alive.items():
            if point[variable] > 0.5:
                kept[moment].add(value)
        rerun: list[set[OpId]] = [set() for _ in window.intervals]
        for (interval, op), variable in window.rerun.items():
            if point[variable] > 0.5:
                rerun[interval].add(op)
        dropped: dict[OpId, set[ValueId]] = {}
        for (value, start), variable in window.carried.items():
            if point[variable] < 0.5:
                dropped.setdefault(start // 2, set()).add(value)
        return Hint(
            moments=window.moments,
            kept=tuple(map(frozenset, kept)),
            dropped={op: frozenset(values) for op, values in dropped.items()},
            rerun=tuple(map(frozenset, rerun)),
            overhead=answer.value,
        )

    def _cut(self, point: Floats) -> bool:
        """Add the rows that `point` breaks most; say whether there are any."""
        during = self.window.during(point)
        over = np.flatnonzero(during > _BROKEN * self.window.timeline.budget_bytes)
        chosen: list[OpId] = []
        for op in over[np.argsort(-during[over], kind="stable")].tolist():
            if op not in self.rows and all(abs(op - other) >= _DISTANCE for other in chosen):
                chosen.append(op)
                if len(chosen) == _ROWS_PER_ROUND:
                    break
        again = self.window.rows_again(point, self.again, _AGAIN_PER_ROUND)
        self.again |= again
        return self._add(chosen) or bool(again)

    def _add(self, ops: list[OpId]) -> bool:
        rows = {op: self.window.memory_row(op) for op in ops}
        found = {op: row for op, row in rows.items() if row is not None}
        self.rows |= found
        return bool(found)
