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

from lowtide.plan.bounds.program import FREE, Answer, Floats, Program, Row

# The solver compares with absolute tolerances, so costs are given to it in thousandths.
_SCALE = 1000.0
# How much of a bound is given up for the tolerances of the solver.
_MARGIN = 1e-6


class Relaxation:
    """The relaxation of a program, to which rows can be added."""

    def __init__(self, program: Program) -> None:
        from ortools.math_opt.python import mathopt  # type: ignore[import-untyped]

        self._program = program
        self._rows = list(program.rows)
        self._model = _model(program)
        self._variables = list(self._model.variables())
        self._solver = mathopt.IncrementalSolver(self._model, mathopt.SolverType.GLOP)
        nonzero = mathopt.SparseVectorFilter(skip_zero_values=True)
        self._wanted = mathopt.ModelSolveParameters(
            variable_values_filter=nonzero,
            dual_values_filter=nonzero,
            reduced_costs_filter=mathopt.SparseVectorFilter(filtered_items=[]),
        )

    def add(self, rows: Iterable[Row]) -> None:
        """Add `rows`."""
        for row in rows:
            self._rows.append(row)
            added = self._model.add_linear_constraint(lb=row.low, ub=row.high)
            for variable, coefficient in zip(row.variables, row.coefficients, strict=True):
                added.set_coefficient(self._variables[variable], coefficient)

    def solve(self, *, seconds: float = FREE) -> Answer:
        """Return the answer with the rows added so far."""
        from ortools.math_opt.python import mathopt

        started = time.perf_counter()
        result = self._solver.solve(
            params=mathopt.SolveParameters(
                time_limit=None if seconds == FREE else datetime.timedelta(seconds=max(0.01, seconds)),
                random_seed=1,
                lp_algorithm=mathopt.LPAlgorithm.DUAL_SIMPLEX,
                presolve=mathopt.Emphasis.OFF,
            ),
            model_params=self._wanted,
        )
        taken = time.perf_counter() - started
        if result.termination.reason == mathopt.TerminationReason.INFEASIBLE:
            return Answer(FREE, seconds=taken)
        if result.termination.reason != mathopt.TerminationReason.OPTIMAL:
            return Answer(0.0, seconds=taken)
        duals = _dense(result.dual_values(), len(self._rows)) / _SCALE
        point = _dense(result.variable_values(), len(self._variables))
        return Answer(self._certify(duals), result.objective_value() / _SCALE, point, taken)

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


def _model(program: Program) -> Any:
    """Return the program in the solver's form."""
    from ortools.math_opt import model_pb2  # type: ignore[import-untyped]
    from ortools.math_opt.python import mathopt

    model, rows = model_pb2.ModelProto(), program.rows
    count = len(program.cost)
    model.variables.ids.extend(range(count))
    model.variables.lower_bounds.extend([0.0] * count)
    model.variables.upper_bounds.extend(program.top)
    model.variables.integers.extend([False] * count)
    priced = [variable for variable, cost in enumerate(program.cost) if cost]
    model.objective.linear_coefficients.ids.extend(priced)
    model.objective.linear_coefficients.values.extend([program.cost[variable] * _SCALE for variable in priced])
    model.linear_constraints.ids.extend(range(len(rows)))
    model.linear_constraints.lower_bounds.extend([row.low for row in rows])
    model.linear_constraints.upper_bounds.extend([row.high for row in rows])
    which, column, value = _entries(rows)
    order = np.lexsort((column, which))
    model.linear_constraint_matrix.row_ids.extend(which[order].tolist())
    model.linear_constraint_matrix.column_ids.extend(column[order].tolist())
    model.linear_constraint_matrix.coefficients.extend(value[order].tolist())
    return mathopt.Model.from_model_proto(model)


def _entries(rows: list[Row]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Floats]:
    """Return row, variable and coefficient of every entry."""
    counts = np.array([len(row.variables) for row in rows], dtype=np.int64)
    which = np.repeat(np.arange(len(rows)), counts)
    column = np.fromiter((v for row in rows for v in row.variables), dtype=np.int64, count=int(counts.sum()))
    value = np.fromiter((c for row in rows for c in row.coefficients), dtype=np.float64, count=int(counts.sum()))
    return which, column, value


def _dense(values: dict[Any, float], count: int) -> Floats:
    """Return the values by the ids of what they belong to, which are the numbers from 0 on."""
    dense = np.zeros(count)
    dense[np.fromiter((item.id for item in values), dtype=np.int64, count=len(values))] = list(values.values())
    return dense
