"""Row generation: a moment program has many long memory rows, so only those that a solution violates are added."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import numpy as np

from lowtide.graph.ir import OpId, ValueId
from lowtide.plan.bounds.integer_program import Answer, Limits, Relaxation, Row
from lowtide.plan.bounds.lifetimes import Floats
from lowtide.plan.bounds.moment_program import MomentProgram
from lowtide.plan.bounds.policy import ROWS
from lowtide.plan.bounds.relaxed_solution import RelaxedSolution


@dataclass(slots=True)
class RowGenerator:
    """A moment program and the memory rows found to matter: of first runs by op, of repeated runs by number."""

    moment_program: MomentProgram
    rows: dict[OpId, Row] = field(default_factory=dict)
    again: dict[int, Row] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Begin with the rows of the moments."""
        self._add(list(self.moment_program.moments))

    def relax(self, *, seconds: float = float("inf")) -> Answer:
        """Return the answer of the linear relaxation with all memory rows that matter."""
        started = time.perf_counter()
        answer = Answer(0.0)
        relaxation, added, again = Relaxation(self.moment_program.program), 0, 0
        for _ in range(ROWS.max_rounds):
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
            if latest.point is None or not self._add_violated(latest.point):
                break
        return answer

    def solve(self, limits: Limits) -> Answer:
        """Return the answer of the integer program with all memory rows that matter."""
        best = Answer(0.0)
        for _ in range(ROWS.max_rounds):
            work = None if limits.work is None else limits.work - best.work
            left = replace(limits, seconds=limits.seconds - best.seconds, work=work)
            if left.seconds <= 0 or (work is not None and work <= 0):
                break
            latest = self.moment_program.program.solve((*self.rows.values(), *self.again.values()), limits=left)
            if latest.infeasible:
                return latest
            best = replace(
                latest,
                bound=max(best.bound, latest.bound),
                seconds=best.seconds + latest.seconds,
                work=best.work + latest.work,
            )
            if best.bound >= limits.enough or latest.point is None or not self._add_violated(latest.point):
                break
        return best

    def solution(self, answer: Answer) -> RelaxedSolution | None:
        """Return the solution of `answer` in terms of the graph."""
        point, program = answer.point, self.moment_program
        if point is None:
            return None
        lifetimes = program.lifetimes
        kept: list[set[ValueId]] = []
        for op in program.moments:
            instant = 2 * op
            kept.append({v for v, due in enumerate(lifetimes.due) if due and lifetimes.is_fixed(v, instant)})
        for (moment, value), variable in program.alive.items():
            if point[variable] > 0.5:
                kept[moment].add(value)
        rerun: list[set[OpId]] = [set() for _ in program.intervals]
        for (interval, op), variable in program.rerun.items():
            if point[variable] > 0.5:
                rerun[interval].add(op)
        dropped: dict[OpId, set[ValueId]] = {}
        for (value, start), variable in program.carried.items():
            if point[variable] < 0.5:
                dropped.setdefault(start // 2, set()).add(value)
        return RelaxedSolution(
            moments=program.moments,
            kept=tuple(map(frozenset, kept)),
            dropped={op: frozenset(values) for op, values in dropped.items()},
            rerun=tuple(map(frozenset, rerun)),
            overhead=answer.value,
        )

    def _add_violated(self, point: Floats) -> bool:
        """Add the rows that `point` violates most; return whether there are any."""
        during = self.moment_program.during(point)
        over = np.flatnonzero(during > (1 + ROWS.tolerance) * self.moment_program.lifetimes.budget_bytes)
        chosen: list[OpId] = []
        for op in over[np.argsort(-during[over], kind="stable")].tolist():
            if op not in self.rows and all(abs(op - other) >= ROWS.min_distance for other in chosen):
                chosen.append(op)
                if len(chosen) == ROWS.first_runs_per_round:
                    break
        again = self.moment_program.rows_again(point, self.again, ROWS.repeated_runs_per_round)
        self.again |= again
        return self._add(chosen) or bool(again)

    def _add(self, ops: list[OpId]) -> bool:
        rows = {op: self.moment_program.memory_row(op) for op in ops}
        found = {op: row for op, row in rows.items() if row is not None}
        self.rows |= found
        return bool(found)
