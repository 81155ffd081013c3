"""`compare`: every planner at every budget, priced as `solve` prices it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import lowtide
from lowtide.analysis.planner_comparison import REFUSED, Comparison, compare_planners
from lowtide.errors import InvalidBudgetError, InvalidOptionError, PlanFileError, UnknownPlannerError
from lowtide.graph import samples
from lowtide.plan.core.planner import AbstractPlanner, Proposal
from lowtide.plan.core.problem import Problem
from lowtide.plan.planners.greedy import Greedy
from lowtide.plan.registry import names
from lowtide.plan.solve import solve
from lowtide.progress import Progress, silent

GRAPH, COSTS = samples.training_chain(10)
PLANNERS = ("keep_all", "chen_sqrt", "hong_linear", "greedy")


class Prover(AbstractPlanner):
    """Proves a bound and proposes plain training."""

    def propose(self, problem: Problem, progress: Progress = silent) -> Proposal:
        return Proposal(lowtide.Schedule.keep_all(problem.graph), bound=0.01)


class Never(AbstractPlanner):
    def supports(self, problem: Problem) -> str | None:
        return "it never does"

    def propose(self, problem: Problem, progress: Progress = silent) -> Proposal:
        raise AssertionError("was asked although it refuses")


def make(budgets: tuple[int | str, ...] = ("80%", "50%", "5%"), planners: tuple = PLANNERS) -> Comparison:
    return compare_planners(GRAPH, COSTS, budgets=budgets, planners=planners)


def test_rows_are_what_solve_says() -> None:
    comparison = make()
    assert comparison.planners == PLANNERS
    assert comparison.budgets == ("80%", "50%", "5%")
    for row in comparison.rows:
        plan = solve(Problem(GRAPH, COSTS, row.budget_bytes), row.planner, throw=False)
        assert (row.peak_bytes, row.overhead, row.outcome) == (plan.peak_bytes, plan.overhead, plan.outcome.name)
        assert row.fits == (plan.peak_bytes <= row.budget_bytes)


def test_best_is_the_cheapest_that_fits() -> None:
    comparison = make()
    fitting = [row for row in comparison.rows if row.budget == "50%" and row.fits]
    best = comparison.best("50%")
    assert best in fitting
    assert best.overhead == min(row.overhead for row in fitting)
    assert comparison.best("5%") is None
    assert comparison.curve("keep_all") == []
    assert comparison.curve("greedy") == sorted(comparison.curve("greedy"))


def test_a_bound_holds_for_all_planners_of_its_budget() -> None:
    rows = make(("80%",), (Prover(), "greedy")).rows
    assert [row.bound for row in rows] == [0.01, 0.01]
    assert rows[0].gap is None, "a schedule over the budget is not compared with a bound"
    assert rows[1].gap == pytest.approx(rows[1].overhead - 0.01)


def test_planners_that_refuse_say_why() -> None:
    comparison = make(("80%",), (Never(), "greedy"))
    assert comparison.rows[0].outcome == REFUSED
    assert comparison.rows[0].reason == "it never does"
    assert "refused: it never does" in str(comparison)


def test_planners_of_one_kind_have_names_of_their_own() -> None:
    assert make(("80%",), (Greedy(effort=0.0), Greedy(effort=0.1))).planners == ("Greedy", "Greedy 2")


def test_all_planners_by_default() -> None:
    comparison = compare_planners(GRAPH, COSTS, budgets=["90%"])
    assert set(comparison.planners) == set(names()) - {"brute_force", "auto_thorough"}


def test_table_and_json(tmp_path: Path) -> None:
    comparison = make()
    lines = str(comparison).splitlines()
    assert len(lines) == 2 + 2 + len(comparison.rows)
    assert sum(" * " in line for line in lines) == 2
    path = tmp_path / "comparison.json"
    comparison.save(path)
    data = json.loads(path.read_text())
    assert data == json.loads(json.dumps(comparison.to_dict()))
    assert len(data["rows"]) == len(comparison.rows)
    assert data["fingerprint"] == GRAPH.fingerprint
    with pytest.raises(PlanFileError, match="Cannot write"):
        comparison.save(tmp_path / "missing" / "comparison.json")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"budgets": []}, InvalidBudgetError),
        ({"budgets": "50%"}, InvalidBudgetError),
        ({"budgets": ["auto"]}, InvalidBudgetError),
        ({"budgets": ["12 parsecs"]}, InvalidBudgetError),
        ({"planners": []}, InvalidOptionError),
        ({"planners": "auto"}, InvalidOptionError),
        ({"planners": ["gredy"]}, UnknownPlannerError),
        ({"planners": [3]}, InvalidOptionError),
    ],
)
def test_bad_options_are_found_before_any_work(options: dict, error: type[Exception]) -> None:
    with pytest.raises(error):
        compare_planners(GRAPH, COSTS, **options)
    with pytest.raises(error):
        lowtide.compare(lambda: pytest.fail("was called"), (), **options)


def test_compare_of_a_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.GELU())])
    args = (torch.ones(256, 32),)
    found = lowtide.compare(model, args, budgets=["90%", "70%"], planners=["keep_all", "greedy"], costs="analytic")
    plan = lowtide.plan(model, args, budget="70%", planner="greedy", costs="analytic")
    assert found.baseline_peak_bytes == plan.baseline_peak_bytes
    assert found.best("70%").peak_bytes == plan.peak_bytes
    assert not any(parameter.grad is not None for parameter in model.parameters())
