"""From a problem to a plan: names, objects, ready schedules, errors, and the text people read."""

import dataclasses
from dataclasses import replace

import pytest

from lowtide.errors import (
    InfeasibleBudgetError,
    InvalidBudgetError,
    InvalidGraphError,
    InvalidOptionError,
    InvalidScheduleError,
    PlannerRefusedError,
    UnknownPlannerError,
)
from lowtide.graph import samples
from lowtide.graph.build import GraphBuilder
from lowtide.graph.costs import Costs
from lowtide.plan import registry
from lowtide.plan.core.module_table import ModuleRow, module_rows, module_table
from lowtide.plan.core.planner import AbstractPlanner, Proposal
from lowtide.plan.core.problem import Problem
from lowtide.plan.core.result import Outcome
from lowtide.plan.planners.greedy import Greedy
from lowtide.plan.solve import solve
from lowtide.schedule.steps import Schedule

GRAPH, COSTS = samples.training_chain(8)
PEAK = Problem(GRAPH, COSTS, 1).baseline.peak_bytes


def problem(share=100):
    return Problem(GRAPH, COSTS, PEAK * share // 100)


class Wrong(AbstractPlanner):
    def propose(self, problem, progress=print):
        return Proposal(Schedule((1, 0), ()))


def test_a_planner_is_a_name_an_object_or_a_schedule():
    by_name = solve(problem(60), " Greedy ")
    by_object = solve(problem(60), Greedy())
    ready = solve(problem(60), by_name.schedule)
    assert by_name.schedule == by_object.schedule == ready.schedule
    assert (by_name.planner, by_object.planner, ready.planner) == ("greedy", "Greedy", "ready schedule")


def test_outcomes():
    assert solve(problem(100), "auto").outcome is Outcome.NOTHING_TO_DO
    assert solve(problem(60), "greedy").outcome is Outcome.FITS
    graph, costs = samples.training_chain(4)
    assert solve(Problem(graph, costs, 400), "brute_force").outcome is Outcome.OPTIMAL
    assert solve(problem(60), "keep_all", throw=False).outcome is Outcome.OVER_BUDGET


def test_figures_of_a_plan():
    plan = solve(problem(60), "greedy")
    assert plan.budget_bytes == PEAK * 60 // 100
    assert plan.peak_bytes == plan.trace.peak_bytes <= plan.budget_bytes < plan.baseline_peak_bytes == PEAK
    extra = plan.trace.seconds - plan.problem.baseline.seconds
    assert plan.overhead == pytest.approx(extra / plan.problem.baseline.seconds)
    assert plan.num_recomputed == len(plan.schedule.steps) - len(GRAPH.ops) > 0
    assert plan.gap is None
    assert plan.min_peak_bytes <= plan.peak_bytes
    assert plan.seconds >= 0


def test_an_impossible_budget_names_the_least_possible_one():
    with pytest.raises(
        InfeasibleBudgetError, match=r"(?s)budget of 150 bytes .* is 300 bytes.*Raise the budget"
    ) as caught:
        solve(Problem(GRAPH, COSTS, 150), "auto")
    assert caught.value.least_bytes == 300
    assert solve(Problem(GRAPH, COSTS, 300), "auto").peak_bytes == 300


def test_a_planner_that_ignores_the_budget_says_what_it_needs():
    with pytest.raises(InfeasibleBudgetError) as caught:
        solve(problem(50), "keep_all")
    assert caught.value.least_bytes == PEAK


def test_refusal_and_nonsense():
    without_phases = Problem(*samples.chain(4), 10**6)
    with pytest.raises(PlannerRefusedError, match="'chen_sqrt' cannot serve this problem: it needs a graph with"):
        solve(without_phases, "chen_sqrt")
    with pytest.raises(PlannerRefusedError, match="brute_force"):
        solve(Problem(*samples.training_chain(20), 10**6), "brute_force")
    with pytest.raises(InvalidScheduleError, match="'Wrong' is not legal"):
        solve(problem(), Wrong())
    with pytest.raises(InvalidOptionError, match="it must be a planner, a Schedule or one of auto"):
        solve(problem(), 7)
    broken = dataclasses.replace(GRAPH, outputs=(999,))
    with pytest.raises(InvalidGraphError):
        solve(Problem(broken, COSTS, 10**6))


@pytest.mark.parametrize("budget", [0, -5])
def test_budget_must_be_above_zero(budget):
    with pytest.raises(InvalidBudgetError):
        Problem(GRAPH, COSTS, budget)


def test_unknown_planner_names_the_nearest():
    with pytest.raises(UnknownPlannerError, match=r"'gredy'.*auto, auto_thorough, keep_all.*Did you mean 'greedy'"):
        registry.get("gredy")
    with pytest.raises(KeyError):
        registry.get("zzz")


def test_registering(monkeypatch):
    monkeypatch.setattr(registry, "_PLANNERS", dict(registry._PLANNERS))
    registry.register("My-Planner", Greedy(effort=0))
    assert registry.get(" my_planner") is registry.get("MY-PLANNER")
    assert "my_planner" in registry.names()
    for name in ("my_planner", " GREEDY", ""):
        with pytest.raises(InvalidOptionError):
            registry.register(name, Greedy())
    with pytest.raises(InvalidOptionError):
        registry.register("other", Greedy)


def test_progress_is_told():
    lines = []
    solve(problem(60), "auto", lines.append)
    assert any("greedy" in line for line in lines)


def test_empty_graph():
    plan = solve(Problem(GraphBuilder().build(), Costs((), ()), 1))
    assert (plan.peak_bytes, plan.overhead, plan.num_recomputed) == (0, 0, 0)
    assert "0 ops" in str(plan)


def test_plan_prints_a_summary_and_a_table():
    plan = solve(problem(60), "greedy")
    text = str(plan)
    assert text.startswith("Plan by greedy: The schedule fits the budget")
    assert "of 540 B allowed; 900 B without a plan" in text
    assert "recomputed" in text
    assert "layer0" in text
    assert "wasted" not in text
    assert "wasted" in str(replace(plan, bound=0.01))


def test_long_tables_are_cut_and_summed():
    rows = [ModuleRow(f"m{k}", 1000 - k, 1, 0.5) for k in range(50)]
    lines = module_table(rows)
    assert len(lines) == 2 + 21
    assert lines[-1].startswith("(30 more modules)")
    assert "30 ops" in lines[-1]
    assert "15.00 s" in lines[-1]


def test_module_rows_count_what_is_saved():
    plan = solve(problem(60), "greedy")
    rows = module_rows(GRAPH, COSTS, plan.schedule)
    assert sum(row.kept_bytes for row in rows) == plan.saved_bytes
    assert sum(row.recomputed for row in rows) == plan.num_recomputed


def test_a_registered_planner_is_called_by_its_name():
    graph, costs = samples.training_chain(4)
    problem = Problem(graph, costs, 10**9)
    assert solve(problem, registry.get("auto")).planner == "auto"
    assert solve(problem, Greedy(effort=0)).planner == "Greedy"
