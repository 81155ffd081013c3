"""`explain`: what is alive at the peak, why, and whom to blame."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings

import lowtide
from helpers.strategies import problems
from lowtide.analysis.explain_peak import explain_plan
from lowtide.errors import InvalidModelError, InvalidOptionError, PlanFileError
from lowtide.graph.build import GraphBuilder
from lowtide.plan.core.problem import Problem
from lowtide.plan.core.result import Plan
from lowtide.plan.planners.greedy import Greedy
from lowtide.plan.solve import solve
from lowtide.schedule.simulate import instances
from lowtide.testing.models import gpt, unet


def skip_net() -> Plan:
    """Return a chain of ten ops whose first result is read again by the last, and the backward of it."""
    builder = GraphBuilder()
    x = builder.add_input("x", 10)
    (skip,) = builder.add_op("encode", [x], [("skip", 100)], module="encoder", source="net.py:1")
    here = skip
    for index in range(9):
        (here,) = builder.add_op(f"f{index}", [here], [(f"h{index}", 100)], module=f"body.{index}", source="net.py:2")
    (joined,) = builder.add_op("cat", [skip, here], [("joined", 200)], target="aten.cat.default", source="net.py:3")
    builder.begin_backward()
    (gradient,) = builder.add_op("cat_backward", [joined], [("dj", 200)], kind="gradient", source="net.py:3")
    (end,) = builder.add_op("encode_backward", [gradient, skip], [("dx", 10)], kind="gradient", source="net.py:1")
    graph = builder.build(outputs=[end])
    return solve(Problem(graph, builder.costs(), 10_000), "keep_all")


@settings(max_examples=80, deadline=None)
@given(problem=problems())
def test_the_tensors_add_up_to_the_peak(problem: Problem) -> None:
    plan = solve(problem, Greedy(effort=0), throw=False)
    if not plan.schedule.steps:
        with pytest.raises(InvalidOptionError):
            explain_plan(plan, less=False)
        return
    found = explain_plan(plan, less=False)
    step = plan.trace.peak_step
    alive = [i for i in instances(problem.graph, plan.schedule) if i.birth <= step <= i.death and i.bytes]
    assert sorted(tensor.bytes for tensor in found.tensors) == sorted(i.bytes for i in alive)
    assert sum(tensor.bytes for tensor in found.tensors) + found.workspace_bytes == plan.peak_bytes
    assert found.workspace_bytes >= problem.costs.workspace_bytes[plan.schedule.steps[step]]
    for shares in (found.by_module, found.by_source):
        assert sum(share.bytes for share in shares) == plan.peak_bytes - found.workspace_bytes
    assert set(found.blamed) <= set(found.tensors)
    assert all(tensor.reason for tensor in found.tensors)


def test_a_skip_is_blamed_and_told_as_one() -> None:
    found = explain_plan(skip_net(), less=False)
    first = found.blamed[0]
    assert (first.name, first.module) == ("skip", "encoder")
    assert "a long skip: forward reads it 10 steps after it was made, by cat" in first.reason
    joined = next(tensor for tensor in found.tensors if tensor.name == "joined")
    assert joined.origin == ("encoder", "body.8")
    assert joined.what == "cat of encoder and body.8"


def test_reasons_follow_the_readers() -> None:
    found = {tensor.name: tensor.reason for tensor in explain_plan(skip_net(), less=False).tensors}
    assert found["joined"] in ("it is being read there", "it is being written there")
    assert "backward reads it" in found["skip"]


def test_gpt_with_a_large_vocabulary_names_the_logits() -> None:
    model, args, kwargs = gpt(layers=2, dim=32, heads=2, tokens=64, batch=2, vocab=50_000, tied=False)
    found = lowtide.explain(model, args, kwargs, costs="analytic", less=False)
    size = 2 * 64 * 50_000 * 4
    # Their gradient takes the place of the loss's, so there are two of them and not three.
    assert [tensor.bytes == size for tensor in found.blamed] == [True, True, False]
    assert all("head" in (tensor.module, *tensor.origin) for tensor in found.blamed[:2])
    assert "of head" in str(found)


@pytest.mark.parametrize("budget", ["100%", "60%"])
def test_unet_names_the_first_skip_connections(budget: str) -> None:
    model, args, kwargs = unet(levels=4, width=8, size=64, batch=2)
    found = lowtide.explain(model, args, kwargs, budget=budget, planner="greedy", costs="analytic", less=False)
    # The first block's second normalisation, over which its ReLU writes, is the first skip.
    named = {module for tensor in found.blamed for module in (tensor.module, *tensor.origin)}
    assert "down.0.1.1" in named
    if budget == "100%":
        assert found.blamed[0].module == "down.0.1.1"
        assert "a long skip" in found.blamed[0].reason


def test_less_memory_is_priced_until_it_is_not_met() -> None:
    plan = skip_net()
    found = explain_plan(plan, planner="greedy")
    assert [row.budget for row in found.less] == ["90%", "80%", "70%", "60%", "50%", "40%", "30%", "20%", "10%"][
        : len(found.less)
    ]
    assert all(row.fits for row in found.less[:-1])
    assert not found.less[-1].fits or found.less[-1].budget == "10%"
    assert "What less memory costs" in str(found)
    deeper = explain_plan(solve(Problem(plan.problem.graph, plan.problem.costs, 700), "greedy"), planner="greedy")
    assert all(row.budget_bytes < deeper.peak_bytes for row in deeper.less)


def test_explanations_as_json(tmp_path: Path) -> None:
    found = explain_plan(skip_net(), planner="greedy")
    path = tmp_path / "explanation.json"
    found.save(path)
    data = json.loads(path.read_text())
    assert data["blamed"][0]["module"] == "encoder"
    assert len(data["tensors"]) == len(found.tensors)
    assert {share["name"] for share in data["by_source"]} == {share.name for share in found.by_source}
    with pytest.raises(PlanFileError, match="Cannot write"):
        found.save(tmp_path)


def test_only_models_and_plans_are_explained() -> None:
    with pytest.raises(InvalidModelError, match=r"lowtide\.explain takes"):
        lowtide.explain(3)
