"""Bad input ends with lowtide's own error, before any work is lost, and the model trains on as if never wrapped."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from helpers.exactness import assert_same, train
from lowtide import errors


def net(width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, 2))


BATCHES = [((torch.randn(6, 4, generator=torch.Generator().manual_seed(s)),), {}) for s in range(3)]


def assert_trains_plainly(model: nn.Module) -> None:
    reference = net()
    reference.load_state_dict(model.state_dict())
    assert_same(train(reference, reference, BATCHES), train(model, model, BATCHES))
    assert model(*BATCHES[0][0]).grad_fn.name() != "CompiledFunctionBackward"


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ("12 parsecs", "unknown unit 'parsecs'"),
        ("", "not understood"),
        ("a lot", "not understood"),
        ("-3GiB", "not understood"),
        (-1, "not above zero"),
        (0, "not above zero"),
        ("0", "not above zero"),
        ("0%", "outside"),
        ("120%", "outside"),
        ("nan%", "not understood"),
        (1.5, "is a float"),
        (True, "is a bool"),
        (b"6GiB", "is a bytes"),
        (None, "No budget was given"),
    ],
)
def test_budgets(budget: Any, message: str) -> None:
    model = net()
    with pytest.raises(errors.InvalidBudgetError, match=message):
        lowtide.wrap(model, budget=budget)
    assert_trains_plainly(model)
    if budget is not None:
        with pytest.raises(errors.InvalidBudgetError, match=message):
            lowtide.plan(model, BATCHES[0][0], budget=budget)


def test_auto_budget_needs_an_accelerator() -> None:
    model = lowtide.wrap(net(), budget="auto")
    with pytest.raises(errors.InvalidBudgetError, match="needs an accelerator"):
        model(*BATCHES[0][0])
    assert_trains_plainly(lowtide.unwrap(model))


@pytest.mark.parametrize("thing", [42, "model", None, torch.ones(3), nn.Linear, [nn.Linear(2, 2)]])
def test_things_that_are_not_models(thing: Any) -> None:
    with pytest.raises(errors.InvalidModelError, match="or a function"):
        lowtide.wrap(thing, budget="50%")
    with pytest.raises(errors.InvalidModelError, match="or a function"):
        lowtide.plan(thing, budget="50%")


def test_model_without_parameters() -> None:
    with pytest.raises(errors.InvalidModelError, match="no parameters"):
        lowtide.wrap(nn.Sequential(nn.ReLU(), nn.Flatten()), budget="50%")


def test_compiled_models() -> None:
    with pytest.raises(errors.InvalidModelError, match="already passed through"):
        lowtide.wrap(torch.compile(net(), backend="eager"), budget="50%")
    model = net()
    model.compile(backend="eager")
    with pytest.raises(errors.InvalidModelError, match="compiled in place"):
        lowtide.wrap(model, budget="50%")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"planner": "gredy"}, errors.UnknownPlannerError, "greedy"),
        ({"planner": 3}, errors.InvalidOptionError, "neither"),
        ({"costs": "guessed"}, errors.InvalidOptionError, "measured"),
        ({"costs": 7}, errors.InvalidOptionError, "measured"),
        ({"plan": 7}, errors.InvalidOptionError, "not a Plan"),
    ],
)
def test_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    model = net()
    with pytest.raises(error, match=message):
        lowtide.wrap(model, budget="50%", **options)
    assert_trains_plainly(model)


def test_inputs_on_several_devices() -> None:
    model = lowtide.wrap(net(), budget="50%", costs="analytic")
    with pytest.raises(errors.InvalidInputError, match="cpu and meta"):
        model(torch.ones(6, 4, device="meta"))
    with pytest.raises(errors.InvalidInputError, match="cpu and meta"):
        lowtide.plan(net(), (torch.ones(6, 4, device="meta"),), budget="50%")
    assert_trains_plainly(lowtide.unwrap(model))


def test_infeasible_budget_names_one_that_works() -> None:
    model = lowtide.wrap(net(64), budget=64, costs="analytic")
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    with pytest.raises(errors.InfeasibleBudgetError, match="least budget known to work") as caught:
        model(*BATCHES[0][0])
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert caught.value.budget_bytes == 64
    lowtide.wrap(model, budget=caught.value.least_bytes, costs="analytic")
    model(*BATCHES[0][0]).sum().backward()
    assert lowtide.plans(model)[0].peak_bytes <= caught.value.least_bytes
    with pytest.raises(errors.InfeasibleBudgetError):
        lowtide.plan(lowtide.unwrap(model), BATCHES[0][0], budget=64, costs="analytic")


def test_models_in_eval_mode_and_calls_without_gradients_have_no_plan() -> None:
    with pytest.raises(errors.InvalidModelError, match="eval mode"):
        lowtide.plan(net().eval(), BATCHES[0][0], budget="50%")
    frozen = net().requires_grad_(False)
    with pytest.raises(errors.InvalidInputError, match="needs a gradient"):
        lowtide.plan(frozen, BATCHES[0][0], budget="50%")


@pytest.mark.parametrize("args", [torch.ones(6, 4), "text", 3])
def test_arguments_of_plan_are_a_sequence(args: Any) -> None:
    with pytest.raises(errors.InvalidInputError, match="args"):
        lowtide.plan(net(), args, budget="50%")


def test_a_model_that_fails_by_itself_says_where() -> None:
    model = lowtide.wrap(net(), budget="50%", costs="analytic")
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        model(torch.ones(6, 5))
    assert_trains_plainly(lowtide.unwrap(model))


class Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @torch._dynamo.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_a_model_that_cannot_be_traced_is_not_trained_unplanned() -> None:
    model = lowtide.wrap(Untraceable(), budget="50%", costs="analytic")
    with pytest.raises(errors.CaptureError, match="captured"):
        model(torch.ones(3, 2, 4))
    lowtide.unwrap(model)(torch.ones(3, 2, 4)).sum().backward()


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    lowtide.plan(net(), BATCHES[0][0], budget="100%", costs="analytic").save(path)
    return path


def truncate(text: str) -> str:
    return text[: len(text) // 2]


def other_version(text: str) -> str:
    return json.dumps(json.loads(text) | {"version": 99})


@pytest.mark.parametrize("spoil", [truncate, other_version, lambda text: "", lambda text: "[]", lambda text: "null"])
def test_spoilt_plan_files(plan_file: Path, spoil: Callable[[str], str]) -> None:
    plan_file.write_text(spoil(plan_file.read_text()))
    model = net()
    with pytest.raises(errors.PlanFileError):
        lowtide.wrap(model, plan=plan_file)
    assert_trains_plainly(model)


def test_missing_plan_file(tmp_path: Path) -> None:
    with pytest.raises(errors.PlanFileError):
        lowtide.wrap(net(), plan=tmp_path / "none.json")


def test_plan_of_another_model(plan_file: Path) -> None:
    model = nn.Sequential(*net(16))
    before = copy.deepcopy(model.state_dict())
    lowtide.wrap(model, plan=plan_file)
    with pytest.raises(errors.PlanFileError, match="another graph"):
        model(*BATCHES[0][0])
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    lowtide.unwrap(model)(*BATCHES[0][0]).sum().backward()


def test_backend_options() -> None:
    def error_of(**how: Any) -> str:
        with pytest.raises(Exception, match=r"lowtide|budget") as caught:
            torch.compile(net(), backend="lowtide", **how)(*BATCHES[0][0])
        return str(caught.value)

    assert "No budget was given" in error_of()
    assert "Unknown options ['memory']" in error_of(options={"memory": 3})
    assert "unknown unit" in error_of(options={"budget": "12 parsecs"})


def test_backend_with_symbolic_shapes_says_what_to_do() -> None:
    model = torch.compile(net(), backend="lowtide", options={"budget": "100%", "costs": "analytic"}, dynamic=True)
    with pytest.raises(Exception, match="dynamic=False"):
        model(*BATCHES[0][0])
