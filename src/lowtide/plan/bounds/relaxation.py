"""The linear relaxation of a program, in which no variable is whole, solved again and again as rows are added.

GLOP of OR-Tools solves it by the dual simplex method without presolving: rows that are added leave the last basis dual
feasible, so every further solution takes few steps. From its dual values the bound is computed anew here, in a way that
holds whatever they are.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from lowtide.plan.bounds.integer_program import FREE, Answer, Floats, Program, Row

# The solver compares with absolute tolerances, so costs are given to it in thousandths.
_SCALE = 1000.0
# How much of a bound is given up for the tolerances of the solver.
_MARGIN = 1e-6


class Relaxation:
    """The relaxation of a program, to which rows can be added.

    The solver is called by way of messages: the objects that OR-Tools makes of a model and a solution take longer to
    make than most solutions take to find.
    """

    def __init__(self, program: Program) -> None:
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

    def solve(self, *, seconds: float = FREE) -> Answer:
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
            return Answer(FREE, seconds=taken)
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
    if seconds != FREE:
        parameters.time_limit.FromTimedelta(datetime.timedelta(seconds=max(0.01, seconds)))
    return parameters


def _model(program: Program) -> Any:
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
