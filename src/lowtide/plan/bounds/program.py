"""A linear program with variables between 0 and 1, some of them whole, and proved lower bounds on its minimum.

Two solvers of OR-Tools serve it. GLOP solves the relaxation in which no variable is whole; from its dual values the
bound is computed anew here, in a way that holds whatever they are. CP-SAT solves the whole program in integers, rounded
so that its bound holds without any tolerance, and stops early when told so.
"""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# Solvers compare with absolute tolerances, so costs are given to them in thousandths.
_SCALE = 1000.0
# Units per whole in programs of whole numbers: of costs, and of shares of the budget.
_WHOLE = 1_000_000
# How much of a bound is given up for the tolerances of the solver.
_MARGIN = 1e-6
_FREE = float("inf")


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
    value: float = _FREE
    point: Floats | None = None
    seconds: float = 0.0
    work: float = 0.0

    @property
    def infeasible(self) -> bool:
        """Whether it is proved that there is no solution."""
        return self.bound == _FREE


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

    seconds: float = _FREE
    work: float | None = None
    gap: float = 0.0
    enough: float = _FREE


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
    whole: list[bool] = field(default_factory=list)
    top: list[float] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def variable(self, cost: float = 0.0, *, whole: bool = True, top: float = 1.0) -> int:
        """Add a variable and return its number."""
        self.cost.append(cost)
        self.whole.append(whole)
        self.top.append(top)
        return len(self.cost) - 1

    def at_least(self, low: float, *terms: tuple[int, float]) -> None:
        """Demand that the sum of the terms, each a variable and its coefficient, is at least `low`."""
        self.rows.append(Row([v for v, _ in terms], [c for _, c in terms], low, _FREE))

    def relax(self, more: Iterable[Row] = (), *, seconds: float = _FREE) -> Answer:
        """Return the answer of the linear relaxation, with the rows `more` added."""
        from ortools.math_opt.python import mathopt  # type: ignore[import-untyped]

        rows = [*self.rows, *more]
        started = time.perf_counter()
        result = mathopt.solve(
            self._model(rows, whole=False),
            mathopt.SolverType.GLOP,
            params=mathopt.SolveParameters(time_limit=_duration(seconds), random_seed=1),
        )
        taken = time.perf_counter() - started
        if result.termination.reason == mathopt.TerminationReason.INFEASIBLE:
            return Answer(_FREE, seconds=taken)
        if result.termination.reason != mathopt.TerminationReason.OPTIMAL:
            return Answer(0.0, seconds=taken)
        duals = np.fromiter(result.dual_values().values(), dtype=np.float64, count=len(rows)) / _SCALE
        return Answer(self._certify(rows, duals), result.objective_value() / _SCALE, _point(result), taken)

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
        if limits.enough != _FREE:
            model.add(total <= math.floor(limits.enough * _WHOLE))
        model.minimize(total)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.linearization_level = 2
        solver.parameters.random_seed = 1
        solver.parameters.absolute_gap_limit = limits.gap * _WHOLE
        if limits.seconds != _FREE:
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

    def _model(self, rows: Sequence[Row], *, whole: bool) -> Any:
        """Return the program in the solvers' form."""
        from ortools.math_opt import model_pb2  # type: ignore[import-untyped]
        from ortools.math_opt.python import mathopt

        model = model_pb2.ModelProto()
        count = len(self.cost)
        model.variables.ids.extend(range(count))
        model.variables.lower_bounds.extend([0.0] * count)
        model.variables.upper_bounds.extend(self.top)
        model.variables.integers.extend(self.whole if whole else [False] * count)
        priced = [variable for variable, cost in enumerate(self.cost) if cost]
        model.objective.linear_coefficients.ids.extend(priced)
        model.objective.linear_coefficients.values.extend([self.cost[variable] * _SCALE for variable in priced])
        model.linear_constraints.ids.extend(range(len(rows)))
        model.linear_constraints.lower_bounds.extend([row.low for row in rows])
        model.linear_constraints.upper_bounds.extend([row.high for row in rows])
        which, column, value = _entries(rows)
        model.linear_constraint_matrix.row_ids.extend(which.tolist())
        model.linear_constraint_matrix.column_ids.extend(column.tolist())
        model.linear_constraint_matrix.coefficients.extend(value.tolist())
        return mathopt.Model.from_model_proto(model)

    def _certify(self, rows: Sequence[Row], duals: Floats) -> float:
        """Return the lower bound that the multipliers `duals` prove: every choice of them proves one."""
        low = np.array([row.low for row in rows])
        high = np.array([row.high for row in rows])
        side = np.where(duals > 0, low, high)
        duals = np.where(np.isfinite(side), duals, 0.0)
        which, column, value = _entries(rows)
        reduced = np.array(self.cost) - np.bincount(column, duals[which] * value, minlength=len(self.cost))
        proved = float(duals @ np.where(duals == 0, 0.0, side))
        return _lowered(proved + float(np.minimum(reduced, 0.0) @ np.array(self.top)))


def _whole_row(row: Row, variables: Sequence[Any]) -> Any:
    """Return the row for the solver of whole numbers."""
    from ortools.sat.python import cp_model

    chosen = [variables[v] for v in row.variables]
    if row.high == _FREE:
        return cp_model.LinearExpr.weighted_sum(chosen, [int(c) for c in row.coefficients]) >= int(row.low)
    coefficients = [math.floor(c * _WHOLE) for c in row.coefficients]
    return cp_model.LinearExpr.weighted_sum(chosen, coefficients) <= math.ceil(row.high * _WHOLE)


def _entries(rows: Sequence[Row]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Floats]:
    """Return row, variable and coefficient of every entry, in order of row and variable."""
    counts = np.array([len(row.variables) for row in rows], dtype=np.int64)
    which = np.repeat(np.arange(len(rows)), counts)
    column = np.fromiter((v for row in rows for v in row.variables), dtype=np.int64, count=int(counts.sum()))
    value = np.fromiter((c for row in rows for c in row.coefficients), dtype=np.float64, count=int(counts.sum()))
    order = np.lexsort((column, which))
    return which[order], column[order], value[order]


def _point(result: Any) -> Floats:
    values = result.variable_values()
    return np.fromiter(values.values(), dtype=np.float64, count=len(values))


def _duration(seconds: float) -> datetime.timedelta | None:
    return None if seconds == _FREE else datetime.timedelta(seconds=max(0.01, seconds))


def _lowered(bound: float) -> float:
    """Return `bound` less the margin, and not below zero, which costs never are."""
    return max(0.0, bound - _MARGIN * max(1.0, abs(bound)))
