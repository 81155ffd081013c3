"""A linear program with variables between 0 and 1, some of them whole, and proved lower bounds on its minimum.

Two solvers of OR-Tools serve it. GLOP solves the relaxation in which no variable is whole; from its dual values the
bound is computed anew here, in a way that holds whatever they are. SCIP solves the whole program, and stops early when
told so; its bound is taken with a margin for its tolerances.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# Solvers compare with absolute tolerances, so costs are given to them in thousandths.
_SCALE = 1000.0
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
    """

    bound: float
    value: float
    point: Floats | None
    seconds: float

    @property
    def infeasible(self) -> bool:
        """Whether it is proved that there is no solution."""
        return self.bound == _FREE


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

    def relax(self, more: Sequence[Row] = (), *, seconds: float = _FREE) -> Answer:
        """Return the answer of the linear relaxation, with the rows `more` added."""
        rows = [*self.rows, *more]
        solver, taken = self._run("glop", rows, whole=False, seconds=seconds, parameters="")
        status = _status(solver)
        if status == "INFEASIBLE":
            return Answer(_FREE, _FREE, None, taken)
        if status != "OPTIMAL":
            return Answer(0.0, _FREE, None, taken)
        point = np.array(solver.variable_values(), dtype=np.float64)
        duals = np.array(solver.dual_values(), dtype=np.float64) / _SCALE
        return Answer(max(0.0, self._certify(rows, duals)), solver.objective_value() / _SCALE, point, taken)

    def solve(self, more: Sequence[Row] = (), *, seconds: float = _FREE, nodes: int = -1, gap: float = 0.0) -> Answer:
        """Return the answer of the program with the rows `more` added.

        Args:
            more: Rows to add.
            seconds: Time limit.
            nodes: Limit on the nodes of the search tree, -1 for none; unlike time, it gives the same answer always.
            gap: Stop when the value of the solution is within this of the bound.
        """
        parameters = f"limits/absgap = {gap * _SCALE}\n"
        if nodes >= 0:
            parameters += f"limits/nodes = {nodes}\n"
        solver, taken = self._run("scip", [*self.rows, *more], whole=True, seconds=seconds, parameters=parameters)
        status = _status(solver)
        if status == "INFEASIBLE":
            return Answer(_FREE, _FREE, None, taken)
        if not solver.has_solution():
            bound = solver.best_objective_bound() / _SCALE if solver.has_response() else 0.0
            return Answer(_lowered(bound), _FREE, None, taken)
        point = np.array(solver.variable_values(), dtype=np.float64)
        return Answer(_lowered(solver.best_objective_bound() / _SCALE), solver.objective_value() / _SCALE, point, taken)

    def _run(self, name: str, rows: Iterable[Row], *, whole: bool, seconds: float, parameters: str):  # type: ignore[no-untyped-def]
        from ortools.linear_solver.python import model_builder_helper as ortools

        model = ortools.ModelBuilderHelper()
        for cost, is_whole, top in zip(self.cost, self.whole, self.top, strict=True):
            variable = model.add_var()
            model.set_var_lower_bound(variable, 0.0)
            model.set_var_upper_bound(variable, top)
            if cost:
                model.set_var_objective_coefficient(variable, cost * _SCALE)
            if whole and is_whole:
                model.set_var_integrality(variable, True)
        for row in rows:
            constraint = model.add_linear_constraint()
            model.set_constraint_lower_bound(constraint, row.low)
            model.set_constraint_upper_bound(constraint, row.high)
            for variable, coefficient in zip(row.variables, row.coefficients, strict=True):
                model.safe_add_term_to_constraint(constraint, variable, coefficient)
        solver = ortools.ModelSolverHelper(name)
        if seconds < _FREE:
            solver.set_time_limit_in_seconds(max(0.01, seconds))
        if parameters:
            solver.set_solver_specific_parameters(parameters)
        started = time.perf_counter()
        solver.solve(model)
        return solver, time.perf_counter() - started

    def _certify(self, rows: Sequence[Row], duals: Floats) -> float:
        """Return the lower bound that the multipliers `duals` prove: every choice of them proves one."""
        reduced = np.array(self.cost, dtype=np.float64)
        bound = 0.0
        for row, dual in zip(rows, duals.tolist(), strict=True):
            side = row.low if dual > 0 else row.high
            if not dual or abs(side) == _FREE:
                continue
            bound += dual * side
            np.subtract.at(reduced, row.variables, dual * np.array(row.coefficients))
        return _lowered(bound + float(np.minimum(reduced, 0.0) @ np.array(self.top)))


def _status(solver) -> str:  # type: ignore[no-untyped-def]
    return str(solver.status()).rsplit(".", 1)[-1]


def _lowered(bound: float) -> float:
    """Return `bound` less the margin, and not below zero, which costs never are."""
    return max(0.0, bound - _MARGIN * max(1.0, abs(bound)))
