"""The rows of a step as an integer program for CP-SAT: a 0-1 variable per instance and option, a running level.

Running levels keep every row short, which matters more than their number: written out, 200 instances have millions of
entries. One worker and a fixed seed make the search the same each time, up to when the time ends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from lowtide.step.problem import Choice
from lowtide.step.rows import Option, Rows


@dataclass(frozen=True, slots=True)
class Solved:
    """What CP-SAT found.

    Attributes:
        choice: The best choice found, or None.
        bound: No choice has a lower objective; infinite if none fits.
        optimal: Whether `choice` is proved to be best.
    """

    choice: Choice | None
    bound: float
    optimal: bool


def least_cost(rows: Rows, hint: Choice | None, seconds: float) -> Solved:
    """Return the choice of least cost that fits."""
    program = _Program(rows)
    program.model.minimize(program.cost())
    return program.solve(hint, seconds)


def least_excess(rows: Rows, hint: Choice, most: int, seconds: float) -> Solved:
    """Return the choice that needs fewest units more than there is room, from 0 to `most`."""
    program = _Program(rows, most)
    program.model.minimize(program.excess)
    return program.solve(hint, seconds)


class _Program:
    def __init__(self, rows: Rows, most: int = 0) -> None:
        from ortools.sat.python import cp_model

        self.rows = rows
        self.model = cp_model.CpModel()
        self._sum = cp_model.LinearExpr.weighted_sum
        self.excess = self.model.new_int_var(0, most, "")
        self.picks = [[self.model.new_bool_var("") for _ in options] for options in rows.options]
        for picks in self.picks:
            self.model.add_exactly_one(picks)
        self._add_rows()

    def _add_rows(self) -> None:
        rows, add = self.rows, self.model.add
        prefix = self._running([[o.after for o in options] for options in rows.options])
        suffix = self._running([[o.net for o in options] for options in reversed(rows.options)], reverse=True)[::-1]
        for k, room in enumerate(rows.level):
            add(prefix[k] - self.excess <= room)
            add(prefix[k] + suffix[k] - self.excess <= rows.turn[k])
        for k, options in enumerate(rows.options):
            add(prefix[k] + self._pick(k, [o.forward_peak for o in options]) - self.excess <= rows.forward[k])
            inside = self._pick(k, [o.backward_peak for o in options])
            add(prefix[k + 1] + suffix[k + 1] + inside - self.excess <= rows.backward[k])

    def _running(self, steps: list[list[int]], *, reverse: bool = False) -> list[Any]:
        """Return the running sums of what the instances add, as variables where there is a choice."""
        low = list(accumulate((min(step) for step in steps), initial=0))
        high = list(accumulate((max(step) for step in steps), initial=0))
        sums: list[Any] = [self.model.new_constant(0)]
        for k, step in enumerate(steps):
            total = self.model.new_int_var(low[k + 1], high[k + 1], "")
            self.model.add(total == sums[-1] + self._pick(len(steps) - 1 - k if reverse else k, step))
            sums.append(total)
        return sums

    def _pick(self, instance: int, values: list[int]) -> Any:
        return self._sum(self.picks[instance], values)

    def cost(self) -> Any:
        """Return the cost of the options picked."""
        return sum(self._pick(k, [o.cost for o in options]) for k, options in enumerate(self.rows.options))

    def solve(self, hint: Choice | None, seconds: float) -> Solved:
        """Return what CP-SAT finds within `seconds`, starting from `hint`."""
        from ortools.sat.python import cp_model

        for k, options in enumerate(self.rows.options if hint else ()):
            for option, pick in zip(options, self.picks[k], strict=True):
                self.model.add_hint(pick, option.variant == hint[k] if hint else False)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 1
        solver.parameters.linearization_level = 2
        solver.parameters.max_time_in_seconds = max(0.01, seconds)
        status = solver.solve(self.model)
        if status == cp_model.INFEASIBLE:
            return Solved(None, math.inf, True)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return Solved(None, -math.inf, False)
        choice = tuple(self._picked(solver, k, options) for k, options in enumerate(self.rows.options))
        return Solved(choice, solver.best_objective_bound, status == cp_model.OPTIMAL)

    def _picked(self, solver: Any, instance: int, options: tuple[Option, ...]) -> int:
        picks = zip(options, self.picks[instance], strict=True)
        return next(option.variant for option, pick in picks if solver.boolean_value(pick))
