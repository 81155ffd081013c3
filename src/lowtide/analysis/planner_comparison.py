"""Many planners at many budgets on one graph: the trade-off between memory and time, as data and as a table."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lowtide.errors import InvalidBudgetError, InvalidOptionError, PlannerRefusedError
from lowtide.files import write_json
from lowtide.graph.costs import Costs
from lowtide.graph.ir import Graph
from lowtide.plan import registry
from lowtide.plan.core.planner import AbstractPlanner
from lowtide.plan.core.problem import Problem
from lowtide.plan.core.result import Outcome, Plan
from lowtide.plan.menu import menu_planner
from lowtide.plan.solve import solve
from lowtide.progress import Progress, silent
from lowtide.schedule.steps import Schedule
from lowtide.step.plan import StepPlan
from lowtide.step.replan import with_budget, with_menus
from lowtide.text_table import text_table
from lowtide.units import Budget, format_bytes, format_seconds, parse_budget

FORMAT = "lowtide-comparison"
VERSION = 1
BUDGETS = ("80%", "65%", "50%", "40%", "30%")
REFUSED = "REFUSED"
# Asked only by name: they take far longer than all others together.
_SLOWEST = frozenset({"brute_force", "auto_thorough"})
_WORDS = {
    Outcome.NOTHING_TO_DO.name: "nothing to do",
    Outcome.OPTIMAL.name: "optimal",
    Outcome.FITS.name: "fits",
    Outcome.OVER_BUDGET.name: "over budget",
    Outcome.IMPOSSIBLE.name: "impossible",
    REFUSED: "refused",
}


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One planner at one budget.

    Attributes:
        planner: Its name.
        budget: The budget as it was given.
        budget_bytes: The budget in bytes.
        outcome: Name of the plan's `Outcome`, or "REFUSED" if the planner cannot serve the graph.
        peak_bytes: Peak of its schedule, also where that is over the budget; None if it refused.
        overhead: Extra seconds of the step as a share of plain training's; None if it refused.
        bound: Largest lower bound on the overhead that any of the planners proved at this budget, or None.
        seconds: Time spent planning.
        reason: Why the planner refused, or "".
    """

    planner: str
    budget: str
    budget_bytes: int
    outcome: str
    peak_bytes: int | None
    overhead: float | None
    bound: float | None
    seconds: float
    reason: str = ""

    @property
    def fits(self) -> bool:
        """Whether the planner met the budget."""
        return self.outcome not in (REFUSED, Outcome.OVER_BUDGET.name, Outcome.IMPOSSIBLE.name)

    @property
    def gap(self) -> float | None:
        """How far the overhead may be from the least possible one, or None if that is not known."""
        if self.bound is None or self.overhead is None or not self.fits:
            return None
        return max(0.0, self.overhead - self.bound)


@dataclass(frozen=True)
class Comparison:
    """What `compare` returns.

    Attributes:
        rows: One row per budget and planner, in the order in which they were asked for.
        baseline_peak_bytes: Peak of plain training.
        baseline_seconds: Time of plain training's step.
        num_ops: Size of the graph.
        fingerprint: Of the graph.
        costs_source: Where the costs of the ops come from.
    """

    rows: tuple[ComparisonRow, ...]
    baseline_peak_bytes: int
    baseline_seconds: float
    num_ops: int
    fingerprint: str
    costs_source: str

    @property
    def planners(self) -> tuple[str, ...]:
        """Names of the planners."""
        return tuple(dict.fromkeys(row.planner for row in self.rows))

    @property
    def budgets(self) -> tuple[str, ...]:
        """The budgets as they were given."""
        return tuple(dict.fromkeys(row.budget for row in self.rows))

    def best(self, budget: str) -> ComparisonRow | None:
        """Return the row of least overhead that meets `budget`, or None if no planner does; earlier rows win ties."""
        name = budget if budget in self.budgets else str(parse_budget(budget))
        fitting = [row for row in self.rows if row.budget == name and row.fits]
        return min(fitting, key=lambda row: row.overhead or 0.0, default=None)

    def curve(self, planner: str) -> list[tuple[int, float]]:
        """Return (peak bytes, overhead) of the plans of `planner` that meet their budgets, by peak."""
        rows = [row for row in self.rows if row.planner == planner and row.fits]
        return sorted((row.peak_bytes, row.overhead) for row in rows if row.peak_bytes is not None is not row.overhead)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as lists, numbers and strings, for JSON."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "fingerprint": self.fingerprint,
            "num_ops": self.num_ops,
            "costs": self.costs_source,
            "baseline_peak_bytes": self.baseline_peak_bytes,
            "baseline_seconds": self.baseline_seconds,
            "rows": [asdict(row) | {"gap": row.gap} for row in self.rows],
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the comparison to `path` as JSON, replacing what is there."""
        write_json(path, self.to_dict())

    def __str__(self) -> str:
        """Return a line about the model, then one table row per budget and planner; the best of a budget has a *."""
        best = {budget: self.best(budget) for budget in self.budgets}
        cells = [self._cells(row, best[row.budget] is row) for row in self.rows]
        header = ("budget", "planner", "", "peak", "of plain", "overhead", "bound", "gap", "planning", "outcome")
        return "\n".join(
            [
                f"Plain training: peak {format_bytes(self.baseline_peak_bytes)}, "
                f"{format_seconds(self.baseline_seconds)} a step, {self.num_ops} ops, costs {self.costs_source}",
                "",
                *text_table(header, cells, left=(0, 1, 9)),
            ]
        )

    def _cells(self, row: ComparisonRow, best: bool) -> tuple[str, ...]:
        share = None if row.peak_bytes is None else row.peak_bytes / max(self.baseline_peak_bytes, 1)
        return (
            row.budget,
            row.planner,
            "*" if best else "",
            "-" if row.peak_bytes is None else format_bytes(row.peak_bytes),
            _percent(share, digits=1),
            _percent(row.overhead),
            _percent(row.bound),
            _percent(row.gap),
            format_seconds(row.seconds),
            _WORDS[row.outcome] + (f": {row.reason}" if row.reason else ""),
        )


def compare_planners(
    graph: Graph,
    costs: Costs,
    *,
    budgets: Sequence[int | str] = BUDGETS,
    planners: Sequence[str | AbstractPlanner] | None = None,
    progress: Progress = silent,
) -> Comparison:
    """Return what each of `planners` makes of `graph` at each of `budgets`.

    Args:
        graph: The graph.
        costs: Costs of its ops.
        budgets: Bytes, sizes or shares of the unplanned peak.
        planners: Names or planners; by default all that are registered, without `brute_force` and `auto_thorough`.
        progress: Receives a line of text now and then.
    """
    limits = _checked_budgets(budgets)
    labels = _labels(limits)
    asked = _named_planners(registry.names() if planners is None else planners, everything=planners is None)
    baseline = Problem(graph, costs, 1).baseline
    problems = [Problem(graph, costs, max(1, limit.resolve(baseline.peak_bytes))) for limit in limits]
    rows: dict[int, list[ComparisonRow]] = {}
    # Least budget first: what fits a budget fits a larger one, so that more memory is never slower.
    for index in sorted(range(len(limits)), key=lambda index: problems[index].budget_bytes):
        found: list[ComparisonRow] = []
        for name, planner in list(asked.items()):
            number = len(rows) * len(asked) + len(found) + 1
            progress(f"{name} at {labels[index]}, {number} of {len(limits) * len(asked)}")
            row, schedule = _row(problems[index], labels[index], name, planner, progress)
            found.append(row)
            if row.fits and schedule is not None:
                asked[name] = planner.with_starts((schedule,))
        # What one planner proved about a budget holds for all that keep the given order; others may be faster.
        bound = max((row.bound for row in found if row.bound is not None), default=None)
        rows[index] = [replace(row, bound=_at_most(bound, row)) for row in found]
    return Comparison(
        rows=tuple(row for index in range(len(limits)) for row in rows[index]),
        baseline_peak_bytes=baseline.peak_bytes,
        baseline_seconds=baseline.seconds,
        num_ops=len(graph.ops),
        fingerprint=graph.fingerprint,
        costs_source=costs.source,
    )


def compare_plan(
    plan: Plan | StepPlan,
    *,
    budgets: Sequence[int | str] = BUDGETS,
    planners: Sequence[str | AbstractPlanner] | None = None,
    progress: Progress = silent,
) -> Comparison:
    """Return what each of `planners` makes of what `plan` was made for; see `compare_planners`."""
    if isinstance(plan, StepPlan):
        return compare_step(plan, budgets=budgets, planners=planners, progress=progress)
    problem = plan.problem
    return compare_planners(problem.graph, problem.costs, budgets=budgets, planners=planners, progress=progress)


def compare_step(
    step: StepPlan,
    *,
    budgets: Sequence[int | str] = BUDGETS,
    planners: Sequence[str | AbstractPlanner] | None = None,
    progress: Progress = silent,
) -> Comparison:
    """Return what the menus of each of `planners` make of a step of several blocks at each of `budgets`.

    Args:
        step: A plan of the step.
        budgets: Bytes, sizes or shares of the unplanned peak.
        planners: Names or planners; by default the one whose menus such steps have.
        progress: Receives a line of text now and then.
    """
    limits = _checked_budgets(budgets)
    labels = _labels(limits)
    asked = _named_planners(["greedy"] if planners is None else planners, everything=False)
    sizes = [max(1, limit.resolve(step.baseline_peak_bytes)) for limit in limits]
    rows: dict[int, list[ComparisonRow]] = {index: [] for index in range(len(limits))}
    for name, planner in asked.items():
        progress(f"menus by {name}")
        begin = time.perf_counter()
        try:
            made = with_menus(step, menu_planner(planner), name, progress)
        except PlannerRefusedError as error:
            for index, size in enumerate(sizes):
                refused = ComparisonRow(name, labels[index], size, REFUSED, None, None, None, 0.0, str(error))
                rows[index].append(refused)
            continue
        seconds = time.perf_counter() - begin
        for index, size in enumerate(sizes):
            rows[index].append(_step_row(with_budget(made, size), name, labels[index], seconds))
    return Comparison(
        rows=tuple(row for index in range(len(limits)) for row in rows[index]),
        baseline_peak_bytes=step.baseline_peak_bytes,
        baseline_seconds=step.baseline_seconds,
        num_ops=step.num_ops,
        fingerprint=step.fingerprint,
        costs_source=step.costs_source,
    )


def _step_row(plan: StepPlan, name: str, budget: str, seconds: float) -> ComparisonRow:
    return ComparisonRow(
        planner=name,
        budget=budget,
        budget_bytes=plan.budget_bytes,
        outcome=plan.outcome.name,
        peak_bytes=plan.peak_bytes,
        overhead=plan.overhead,
        bound=plan.bound,
        seconds=seconds,
    )


def check_comparison(budgets: Sequence[int | str], planners: Sequence[str | AbstractPlanner] | None) -> None:
    """Raise what `compare_planners` would raise for these arguments, before any long work is done."""
    _checked_budgets(budgets)
    _named_planners(registry.names() if planners is None else planners, everything=planners is None)


def _row(
    problem: Problem, budget: str, name: str, planner: AbstractPlanner, progress: Progress
) -> tuple[ComparisonRow, Schedule | None]:
    try:
        plan = solve(problem, planner, progress, throw=False)
    except PlannerRefusedError:
        reason = planner.supports(problem) or ""
        return ComparisonRow(name, budget, problem.budget_bytes, REFUSED, None, None, None, 0.0, reason), None
    row = ComparisonRow(
        planner=name,
        budget=budget,
        budget_bytes=problem.budget_bytes,
        outcome=plan.outcome.name,
        peak_bytes=plan.peak_bytes,
        overhead=plan.overhead,
        bound=plan.bound,
        seconds=plan.seconds,
    )
    return row, plan.schedule


def _checked_budgets(budgets: Sequence[int | str]) -> list[Budget]:
    if isinstance(budgets, str | bytes) or not isinstance(budgets, Sequence) or not budgets:
        raise InvalidBudgetError(f"budgets={budgets!r} is not a list of budgets such as ['65%', '50%', '6GiB'].")
    limits = [parse_budget(budget) for budget in budgets]
    if any(limit.is_auto for limit in limits):
        raise InvalidBudgetError('The budget "auto" cannot be compared with others; name a size or a share.')
    return list(dict.fromkeys(limits))


def _labels(limits: Sequence[Budget]) -> list[str]:
    """Return each budget as people write it, in full where that would be the same for two of them."""
    rounded = [str(limit) for limit in limits]
    return [text if rounded.count(text) == 1 else _in_full(limit) for text, limit in zip(rounded, limits, strict=True)]


def _in_full(limit: Budget) -> str:
    return f"{limit.bytes} B" if limit.fraction is None else f"{100 * limit.fraction!r}%"


def _named_planners(planners: Sequence[str | AbstractPlanner], *, everything: bool) -> dict[str, AbstractPlanner]:
    if isinstance(planners, str | bytes) or not isinstance(planners, Sequence) or not planners:
        raise InvalidOptionError(f"planners={planners!r} is not a list of planners such as ['auto', 'greedy'].")
    named: dict[str, AbstractPlanner] = {}
    for planner in planners:
        if isinstance(planner, str):
            if not (everything and planner in _SLOWEST):
                named[registry.normalise(planner)] = registry.get(planner)
        elif isinstance(planner, AbstractPlanner):
            kind = type(planner).__name__
            number = sum(name.split(" ")[0] == kind for name in named)
            named[f"{kind} {number + 1}" if number else kind] = planner
        else:
            raise InvalidOptionError(f"{planner!r:.80} is neither the name of a planner nor a planner.")
    return named


def _percent(share: float | None, digits: int = 2) -> str:
    return "-" if share is None else f"{100 * share:.{digits}f} %"


def _at_most(bound: float | None, row: ComparisonRow) -> float | None:
    """Return `bound`, or the overhead of `row` if that fits and is less."""
    return bound if bound is None or row.overhead is None or not row.fits else min(bound, row.overhead)
