"""A linear program in whole numbers, most of them 0 or 1, and proved lower bounds on its minimum.

CP-SAT of OR-Tools solves it in integers, rounded so that its bound holds without any tolerance, and stops early when
told so. What it is without whole numbers is in `relaxation`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# Units per whole in programs of whole numbers: of costs, and of shares of the budget.
_WHOLE = 1_000_000
FREE = float("inf")


@dataclass(frozen=True, slots=True)
class Answer:
    """What a solver found.

    Attributes:
        bound: A proved lower bound on the minimum; infinite if there is no solution.
        value: The value of the solution found, infinite if none was.
        point: The solution found, or None.
        seconds: Time taken.
        work: Work done, in the unit of `Limits.work`; 0 for linear relaxations.
    """

    bound: float
    value: float = FREE
    point: Floats | None = None
    seconds: float = 0.0
    work: float = 0.0

    @property
    def infeasible(self) -> bool:
        """Whether it is proved that there is no solution."""
        return self.bound == FREE


@dataclass(frozen=True, slots=True)
class Limits:
    """When a search ends before its time.

    Attributes:
        seconds: Time limit.
        work: Limit on the work, about in seconds but counted in steps, so that the answer is the same always; None for
            none.
        gap: The search ends when the solution found is within this of the bound.
        enough: The search ends when the bound is proved to be at least this.
    """

    seconds: float = FREE
    work: float | None = None
    gap: float = 0.0
    enough: float = FREE


@dataclass(slots=True)
class Row:
    """`low <= sum of coefficient * variable <= high`."""

    variables: list[int]
    coefficients: list[float]
    low: float
    high: float


@dataclass(slots=True)
class Program:
    """Minimise the cost of the variables, each between 0 and its `top`, within the rows."""

    cost: list[float] = field(default_factory=list)
    top: list[float] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def variable(self, cost: float = 0.0, *, top: float = 1.0) -> int:
        """Add a variable and return its number."""
        self.cost.append(cost)
        self.top.append(top)
        return len(self.cost) - 1

    def at_least(self, low: float, *terms: tuple[int, float]) -> None:
        """Demand that the sum of the terms, each a variable and its coefficient, is at least `low`."""
        self.rows.append(Row([v for v, _ in terms], [c for _, c in terms], low, FREE))

    def solve(self, more: Iterable[Row] = (), *, limits: Limits | None = None) -> Answer:
        """Return the answer of the program, with the rows `more` added.

        The solver counts in whole numbers: costs and the coefficients of upper limits are rounded down and the limits
        themselves up, so its bound holds for the program as it is. If the bound reaches `limits.enough` there is no
        point in the answer.
        """
        from ortools.sat.python import cp_model

        limits = limits or Limits()
        started = time.perf_counter()
        model = cp_model.CpModel()
        variables = [model.new_int_var(0, int(top), "") for top in self.top]
        for row in (*self.rows, *more):
            model.add(_whole_row(row, variables))
        prices = [int(cost * _WHOLE) for cost in self.cost]
        total = cp_model.LinearExpr.weighted_sum(variables, prices)
        if limits.enough != FREE:
            model.add(total <= math.floor(limits.enough * _WHOLE))
        model.minimize(total)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.linearization_level = 2
        solver.parameters.random_seed = 1
        solver.parameters.absolute_gap_limit = limits.gap * _WHOLE
        if limits.seconds != FREE:
            solver.parameters.max_time_in_seconds = max(0.01, limits.seconds)
        if limits.work is not None:
            solver.parameters.max_deterministic_time = limits.work
        status = solver.solve(model)
        taken, work = time.perf_counter() - started, float(solver.response_proto.deterministic_time)
        if status == cp_model.INFEASIBLE:
            return Answer(limits.enough, seconds=taken, work=work)
        bound = max(0.0, solver.best_objective_bound / _WHOLE)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return Answer(bound, seconds=taken, work=work)
        point = np.array([solver.value(variable) for variable in variables], dtype=np.float64)
        return Answer(bound, float(np.dot(point, self.cost)), point, taken, work)


def _whole_row(row: Row, variables: Sequence[Any]) -> Any:
    """Return the row for the solver of whole numbers."""
    from ortools.sat.python import cp_model

    chosen = [variables[v] for v in row.variables]
    if row.high == FREE:
        return cp_model.LinearExpr.weighted_sum(chosen, [int(c) for c in row.coefficients]) >= int(row.low)
    coefficients = [math.floor(c * _WHOLE) for c in row.coefficients]
    return cp_model.LinearExpr.weighted_sum(chosen, coefficients) <= math.ceil(row.high * _WHOLE)
