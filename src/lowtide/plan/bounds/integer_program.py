"""An integer program, its linear relaxation, and proved lower bounds on its minimum. Most variables are 0 or 1.

CP-SAT of OR-Tools solves the program, with numbers rounded so that its bound holds without any tolerance, and stops
early when told so. GLOP solves the relaxation; the bound is certified from its dual values.
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

# The integer solver counts costs and shares of the budget in millionths.
_UNITS = 1_000_000
UNLIMITED = float("inf")


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
    value: float = UNLIMITED
    point: Floats | None = None
    seconds: float = 0.0
    work: float = 0.0

    @property
    def infeasible(self) -> bool:
        """Whether it is proved that there is no solution."""
        return self.bound == UNLIMITED


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

    seconds: float = UNLIMITED
    work: float | None = None
    gap: float = 0.0
    enough: float = UNLIMITED


@dataclass(slots=True)
class Row:
    """`low <= sum of coefficient * variable <= high`."""

    variables: list[int]
    coefficients: list[float]
    low: float
    high: float


@dataclass(slots=True)
class IntegerProgram:
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
        self.rows.append(Row([v for v, _ in terms], [c for _, c in terms], low, UNLIMITED))

    def solve(self, more: Iterable[Row] = (), *, limits: Limits | None = None) -> Answer:
        """Return the answer of the program, with the rows `more` added.

        The solver counts in integers: costs and the coefficients of upper limits are rounded down and the limits
        themselves up, so its bound holds for the program as it is. If the bound reaches `limits.enough` there is no
        point in the answer.
        """
        from ortools.sat.python import cp_model

        limits = limits or Limits()
        started = time.perf_counter()
        model = cp_model.CpModel()
        variables = [model.new_int_var(0, int(top), "") for top in self.top]
        for row in (*self.rows, *more):
            model.add(_integer_row(row, variables))
        prices = [int(cost * _UNITS) for cost in self.cost]
        total = cp_model.LinearExpr.weighted_sum(variables, prices)
        if limits.enough != UNLIMITED:
            model.add(total <= math.floor(limits.enough * _UNITS))
        model.minimize(total)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.linearization_level = 2
        solver.parameters.random_seed = 1
        solver.parameters.absolute_gap_limit = limits.gap * _UNITS
        if limits.seconds != UNLIMITED:
            solver.parameters.max_time_in_seconds = max(0.01, limits.seconds)
        if limits.work is not None:
            solver.parameters.max_deterministic_time = limits.work
        status = solver.solve(model)
        taken, work = time.perf_counter() - started, float(solver.response_proto.deterministic_time)
        if status == cp_model.INFEASIBLE:
            return Answer(limits.enough, seconds=taken, work=work)
        bound = max(0.0, solver.best_objective_bound / _UNITS)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return Answer(bound, seconds=taken, work=work)
        point = np.array([solver.value(variable) for variable in variables], dtype=np.float64)
        return Answer(bound, float(np.dot(point, self.cost)), point, taken, work)


def _integer_row(row: Row, variables: Sequence[Any]) -> Any:
    """Return the row for the integer solver."""
    from ortools.sat.python import cp_model

    chosen = [variables[v] for v in row.variables]
    if row.high == UNLIMITED:
        return cp_model.LinearExpr.weighted_sum(chosen, [int(c) for c in row.coefficients]) >= int(row.low)
    coefficients = [math.floor(c * _UNITS) for c in row.coefficients]
    return cp_model.LinearExpr.weighted_sum(chosen, coefficients) <= math.ceil(row.high * _UNITS)


# The solver compares with absolute tolerances, so costs are given to it in thousandths.
_SCALE = 1000.0
# How much of a bound is given up for the tolerances of the solver.
_MARGIN = 1e-6


class Relaxation:
    """The relaxation of a program, to which rows can be added.

    The solver is called by way of messages: the objects that OR-Tools makes of a model and a solution take longer to
    make than most solutions take to find.
    """

    def __init__(self, program: IntegerProgram) -> None:
        from ortools.math_opt import parameters_pb2  # type: ignore[import-untyped]
        from ortools.math_opt.core.python import solver  # type: ignore[import-untyped]

        self._program = program
        self._rows = list(program.rows)
        self._pending: list[Row] = []
        self._solver = solver.new(
            parameters_pb2.SOLVER_TYPE_GLOP, _model(program), parameters_pb2.SolverInitializerProto()
        )

    def add(self, rows: Iterable[Row]) -> None:
        """Add `rows`."""
        self._pending += rows

    def solve(self, *, seconds: float = UNLIMITED) -> Answer:
        """Return the answer with the rows added so far."""
        from ortools.math_opt import callback_pb2, model_parameters_pb2, result_pb2

        started = time.perf_counter()
        self._enter()
        wanted = model_parameters_pb2.ModelSolveParametersProto()
        wanted.variable_values_filter.skip_zero_values = True
        wanted.dual_values_filter.skip_zero_values = True
        wanted.reduced_costs_filter.filter_by_ids = True
        result = self._solver.solve(
            _parameters(seconds), wanted, None, callback_pb2.CallbackRegistrationProto(), None, None
        )
        taken = time.perf_counter() - started
        if result.termination.reason == result_pb2.TERMINATION_REASON_INFEASIBLE:
            return Answer(UNLIMITED, seconds=taken)
        if result.termination.reason != result_pb2.TERMINATION_REASON_OPTIMAL:
            return Answer(0.0, seconds=taken)
        primal, dual = result.solutions[0].primal_solution, result.solutions[0].dual_solution
        duals = _dense(dual.dual_values, len(self._rows)) / _SCALE
        point = _dense(primal.variable_values, len(self._program.cost))
        return Answer(self._certify(duals), primal.objective_value / _SCALE, point, taken)

    def _enter(self) -> None:
        """Give the solver the rows that it does not have yet."""
        from ortools.math_opt import model_update_pb2

        if not self._pending:
            return
        update = model_update_pb2.ModelUpdateProto()
        _write(self._pending, len(self._rows), update.new_linear_constraints, update.linear_constraint_matrix_updates)
        self._rows += self._pending
        self._pending = []
        if not self._solver.update(update):
            raise RuntimeError("the solver of linear programs refuses further rows")

    def _certify(self, duals: Floats) -> float:
        """Return the lower bound that the multipliers `duals` prove: every choice of them proves one."""
        used = np.flatnonzero(duals)
        rows = [self._rows[row] for row in used.tolist()]
        duals = duals[used]
        side = np.where(duals > 0, [row.low for row in rows], [row.high for row in rows])
        duals = np.where(np.isfinite(side), duals, 0.0)
        which, column, value = _entries(rows)
        cost = np.array(self._program.cost)
        reduced = cost - np.bincount(column, duals[which] * value, minlength=len(cost))
        proved = float(duals @ np.where(duals == 0, 0.0, side))
        bound = proved + float(np.minimum(reduced, 0.0) @ np.array(self._program.top))
        # Less the margin, and not below zero, which costs never are.
        return max(0.0, bound - _MARGIN * max(1.0, abs(bound)))


def _parameters(seconds: float) -> Any:
    from ortools.math_opt import parameters_pb2

    parameters = parameters_pb2.SolveParametersProto(
        random_seed=1, lp_algorithm=parameters_pb2.LP_ALGORITHM_DUAL_SIMPLEX, presolve=parameters_pb2.EMPHASIS_OFF
    )
    if seconds != UNLIMITED:
        parameters.time_limit.FromTimedelta(datetime.timedelta(seconds=max(0.01, seconds)))
    return parameters


def _model(program: IntegerProgram) -> Any:
    """Return the program in the solver's form."""
    from ortools.math_opt import model_pb2

    model = model_pb2.ModelProto()
    count = len(program.cost)
    model.variables.ids.extend(range(count))
    model.variables.lower_bounds.extend([0.0] * count)
    model.variables.upper_bounds.extend(program.top)
    model.variables.integers.extend([False] * count)
    priced = [variable for variable, cost in enumerate(program.cost) if cost]
    model.objective.linear_coefficients.ids.extend(priced)
    model.objective.linear_coefficients.values.extend([program.cost[variable] * _SCALE for variable in priced])
    _write(program.rows, 0, model.linear_constraints, model.linear_constraint_matrix)
    return model


def _write(rows: list[Row], first: int, constraints: Any, matrix: Any) -> None:
    """Write `rows`, numbered from `first` on, into messages for the solver."""
    constraints.ids.extend(range(first, first + len(rows)))
    constraints.lower_bounds.extend([row.low for row in rows])
    constraints.upper_bounds.extend([row.high for row in rows])
    which, column, value = _entries(rows)
    order = np.lexsort((column, which))
    matrix.row_ids.extend((first + which[order]).tolist())
    matrix.column_ids.extend(column[order].tolist())
    matrix.coefficients.extend(value[order].tolist())


def _entries(rows: list[Row]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Floats]:
    """Return row, variable and coefficient of every entry."""
    counts = np.array([len(row.variables) for row in rows], dtype=np.int64)
    which = np.repeat(np.arange(len(rows)), counts)
    column = np.fromiter((v for row in rows for v in row.variables), dtype=np.int64, count=int(counts.sum()))
    value = np.fromiter((c for row in rows for c in row.coefficients), dtype=np.float64, count=int(counts.sum()))
    return which, column, value


def _dense(values: Any, count: int) -> Floats:
    """Return the numbers of a message with the ids of those that are not 0, which are from 0 on."""
    dense = np.zeros(count)
    dense[np.array(values.ids, dtype=np.int64)] = np.array(values.values)
    return dense
