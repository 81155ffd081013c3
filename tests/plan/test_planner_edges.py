"""Graphs, costs, budgets and options at their edges: a sound answer or lowtide's own error, never anything else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lowtide.analysis.planner_comparison import compare_planners
from lowtide.errors import InvalidBudgetError, InvalidGraphError, InvalidOptionError, PlannerRefusedError
from lowtide.graph import samples
from lowtide.graph.build import GraphBuilder
from lowtide.graph.costs import MOST_SECONDS, Costs
from lowtide.graph.ir import Graph
from lowtide.graph.verify import MOST_BYTES
from lowtide.plan import registry
from lowtide.plan.core.planner import AbstractPlanner
from lowtide.plan.core.problem import Problem
from lowtide.plan.core.result import Outcome, Plan
from lowtide.plan.solve import solve
from lowtide.schedule.steps import Schedule
from lowtide.schedule.verify import verify
from lowtide.units import parse_budget

Sample = tuple[Graph, Costs]
GRAPH, COSTS = samples.training_chain(5)
NAMES = [name for name in registry.names() if name != "auto_thorough"]


def planner_of(name: str) -> AbstractPlanner:
    """Return the planner of that name; `auto` with little effort, for speed."""
    return registry.get(name).with_effort(0.2)


def layers(n: int, *, size: int = 100, seconds: float = 1.0, **marks: Any) -> Sample:
    """Return a chain with its backward pass whose forward ops have `marks`."""
    builder = GraphBuilder()
    values = [builder.add_input("x", size)]
    for k in range(n):
        values += builder.add_op(f"f{k}", [values[-1]], [(f"v{k}", size)], seconds=seconds, **marks)
    builder.begin_backward()
    gradient = values[-1]
    for k in reversed(range(n)):
        (gradient,) = builder.add_op(f"b{k}", [gradient, values[k]], [(f"g{k}", size)], seconds=seconds)
    return builder.build(outputs=[gradient]), builder.costs()


def nothing() -> Sample:
    builder = GraphBuilder()
    builder.begin_backward()
    return builder.build(), builder.costs()


def workspace_alone() -> Sample:
    builder = GraphBuilder()
    builder.add_op("f", [], [], workspace_bytes=7)
    builder.begin_backward()
    builder.add_op("b", [], [], workspace_bytes=9)
    return builder.build(), builder.costs()


def one_phase(*, forward: bool) -> Sample:
    builder = GraphBuilder()
    values = [builder.add_input("x", 10)]
    if not forward:
        builder.begin_backward()
    for k in range(6):
        values += builder.add_op(f"f{k}", [values[-1], values[max(0, k - 3)]], [(f"v{k}", 10)])
    builder.add_op("end", [values[1], values[-1]], [("end", 1)])
    if forward:
        builder.begin_backward()
    return builder.build(outputs=[values[0], values[-1]]), builder.costs()


SAMPLES: dict[str, Callable[[], Sample]] = {
    "nothing": nothing,
    "workspace alone": workspace_alone,
    "no bytes": lambda: layers(4, size=0),
    "no seconds": lambda: layers(4, seconds=0.0),
    "hardly any seconds": lambda: layers(4, seconds=5e-324),
    "all pinned": lambda: layers(4, pinned="it has an effect"),
    "all random": lambda: layers(4, random=True, replay_bytes=16),
    "states larger than values": lambda: layers(4, random=True, replay_bytes=1000),
    "forward alone": lambda: one_phase(forward=True),
    "backward alone": lambda: one_phase(forward=False),
    "very large": lambda: layers(4, size=MOST_BYTES // 10),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sample", SAMPLES)
def test_answers_are_sound_at_the_edges(sample: str, name: str, tmp_path: Path) -> None:
    graph, costs = SAMPLES[sample]()
    planner = planner_of(name)
    least = solve(Problem(graph, costs, 1), "brute_force", throw=False).peak_bytes
    for budget in sorted({1, max(1, least - 1), max(1, least), max(1, Problem(graph, costs, 1).baseline.peak_bytes)}):
        problem = Problem(graph, costs, budget)
        try:
            plan = solve(problem, planner, throw=False)
        except PlannerRefusedError:
            continue
        verify(graph, plan.schedule)
        best = solve(problem, "brute_force", throw=False)
        assert plan.fits == (plan.outcome not in (Outcome.IMPOSSIBLE, Outcome.OVER_BUDGET))
        assert not (best.fits and plan.outcome is Outcome.IMPOSSIBLE)
        assert not plan.fits or plan.bound is None or plan.bound <= best.overhead + 1e-9
        assert plan.fits or solve(replace(problem, budget_bytes=plan.peak_bytes), planner).fits
        plan.save(tmp_path / "plan.json")
        loaded = Plan.load(tmp_path / "plan.json")
        assert (loaded.schedule, loaded.outcome, loaded.bound) == (plan.schedule, plan.outcome, plan.bound)
        assert str(loaded) == str(plan)


@pytest.mark.parametrize("size", [MOST_BYTES, 10**20, float("nan"), 1.5, -1])
def test_a_graph_whose_sizes_cannot_be_reckoned_with_is_refused(size: Any) -> None:
    with pytest.raises(InvalidGraphError, match="bytes"):
        layers(2, size=size)


@pytest.mark.parametrize(
    ("seconds", "workspace"),
    [
        *((seconds, 0) for seconds in (float("nan"), float("inf"), -1.0, "1", None, MOST_SECONDS, 1.7e308)),
        *((1.0, workspace) for workspace in (-1, float("nan"), 0.5, MOST_BYTES + 1)),
    ],
)
def test_costs_that_cannot_be_reckoned_with_are_refused(seconds: Any, workspace: Any) -> None:
    n = len(GRAPH.ops)
    with pytest.raises(InvalidGraphError, match=r"cost|needs"):
        Problem(GRAPH, Costs((seconds,) * n, (workspace,) * n), 300)


@pytest.mark.parametrize("budget", [float("nan"), 10.5, True, "300", None, 0, -1, 2**63, 10**400])
def test_a_budget_that_is_no_number_of_bytes_is_refused(budget: Any) -> None:
    with pytest.raises(InvalidBudgetError):
        Problem(GRAPH, COSTS, budget)


@pytest.mark.parametrize("budget", [10**400, "9" * 400, "9" * 400 + "GiB", 2**63])
def test_a_budget_beyond_all_memory_is_refused(budget: int | str) -> None:
    with pytest.raises(InvalidBudgetError, match="is above"):
        parse_budget(budget)


def test_the_largest_number_of_a_machine_means_no_limit(tmp_path: Path) -> None:
    plan = solve(Problem(GRAPH, COSTS, sys.maxsize), "auto")
    assert plan.outcome is Outcome.NOTHING_TO_DO
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").budget_bytes == sys.maxsize


OPTIONS = [
    ("chen_sqrt", "segments"),
    ("chen_greedy", "scan"),
    ("chen_recursive", "k"),
    ("chen_recursive", "depth"),
    ("hong_cubic", "max_links"),
    ("feng_chain", "plans"),
    ("feng", "plans"),
    ("kusumoto", "ticks"),
    ("kusumoto_exact", "max_lower_sets"),
    ("revolve", "checkpoints"),
    ("rotor", "slots"),
    ("dtr", "thrash"),
    ("greedy", "effort"),
    ("brute_force", "max_ops"),
    ("auto", "effort"),
    ("auto", "seed"),
    ("auto", "time_limit"),
    ("auto", "starts"),
]


@pytest.mark.parametrize(("name", "option"), OPTIONS)
@pytest.mark.parametrize("value", ["x", float("nan"), True])
def test_an_option_of_another_type_is_refused(name: str, option: str, value: Any) -> None:
    if option == "time_limit" and value is True:
        pytest.skip("one second")
    planner: Any = registry.get(name)
    with pytest.raises(InvalidOptionError):
        replace(planner, **{option: value})


@pytest.mark.parametrize(
    "options", [{"seed": -1}, {"planners": {"keep_all": "keep_all"}}, {"starts": Schedule.keep_all(GRAPH)}]
)
def test_auto_refuses_options_that_it_could_not_use(options: dict[str, Any]) -> None:
    auto: Any = registry.get("auto")
    with pytest.raises(InvalidOptionError):
        replace(auto, **options)


@pytest.mark.parametrize("budgets", [[1024_000, 1024_001], ["83.3333333%", "83.3333332%"]])
def test_budgets_that_look_alike_are_told_apart(budgets: list[int | str]) -> None:
    comparison = compare_planners(GRAPH, COSTS, budgets=budgets, planners=["keep_all"])
    assert len(comparison.budgets) == 2


def test_the_best_of_a_budget_is_found_by_the_budget_as_given() -> None:
    comparison = compare_planners(GRAPH, COSTS, budgets=["6GiB", "50.0%"], planners=["keep_all"])
    assert comparison.best("6GiB") is comparison.rows[0]
    assert comparison.best("50.0%") is None
