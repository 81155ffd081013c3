"""Layers of an `nn.Sequential` joined to larger blocks: where single ones do not fit, with eager's bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from helpers.exactness import assert_exact, assert_same, train
from lowtide.blocks.step.find_layers import Cuts
from lowtide.errors import InfeasibleBudgetError
from lowtide.pytorch.compiler.tracing import num_graphs
from lowtide.step.plan import StepPlan

DIM, ROWS, COUNT = 16, 128, 8


class Layer(nn.Module):
    """A residual layer with dropout and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(DIM, 3 * DIM), nn.Linear(3 * DIM, DIM)
        self.norm, self.dropout = nn.BatchNorm1d(3 * DIM), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(self.dropout(torch.tanh(self.norm(self.wide(x)))))


# Fours fit where single layers do not.
JOINED = ("first", "stage", "stage", "last")
OPTIONS: dict[str, Any] = {"planner": "greedy", "costs": "analytic", "blocks": [Layer]}


class Net(nn.Module):
    """A stage of layers between two projections."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, 4)
        self.stage = nn.Sequential(*(Layer() for _ in range(COUNT)))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.stage(self.first(x))).square().mean()


class Stepwise(Net):
    """Runs the layers of its stage one by one."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.stage:
            x = layer(x)
        return self.last(x).square().mean()


class Plain(nn.Sequential):
    """The model itself runs the layers."""

    def __init__(self) -> None:
        super().__init__(*(Layer() for _ in range(COUNT)))


def net(make: Callable[[], nn.Module] = Net) -> nn.Module:
    torch.manual_seed(0)
    return make().train()


def rows(steps: int = 2) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [((torch.randn(ROWS, DIM, generator=generator),), {}) for _ in range(steps)]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def plan_of(model: nn.Module) -> StepPlan:
    found = lowtide.plans(model)[0]
    assert isinstance(found, StepPlan)
    return found


@pytest.fixture(scope="module")
def least_single() -> int:
    """Return the least budget at which single layers are blocks."""
    plan = lowtide.plan(net(Stepwise), rows()[0][0], budget="100%", **OPTIONS)
    return plan.min_peak_bytes


@pytest.fixture
def budget(least_single: int) -> int:
    """Return a budget that single layers do not keep, and fours do, with room for what analytic costs do not know."""
    return int(0.93 * least_single)


def test_joined_layers_are_exact_and_equal_ones_are_captured_once(least_single: int) -> None:
    before = num_graphs()
    # A first step expects more of the code between blocks than a plan, so single layers need more in it, too.
    model = assert_exact(net(), rows(3), wrap=OPTIONS | {"budget": int(1.04 * least_single)})
    assert plan_of(model).blocks == JOINED
    assert "up to 4 layers in a row as one block" in str(plan_of(model))
    # What is before the stage, in it and behind it: with single layers first, then with joined ones.
    assert num_graphs() - before == 6


def test_planning_alone_joins_the_same_layers(budget: int) -> None:
    plan = lowtide.plan(net(), rows()[0][0], budget=budget, **OPTIONS)
    assert plan.fits
    assert isinstance(plan, StepPlan)
    assert plan.blocks == JOINED
    assert "up to 4 layers in a row as one block" in str(plan)


def test_the_plan_of_one_graph_says_that_layers_would_have_been_blocks() -> None:
    cuts = Cuts(nn.Sequential(*(Layer() for _ in range(40))), "auto")
    assert cuts.first.modules
    assert cuts.of_graph is None
    while cuts.coarser():
        pass
    assert cuts.of_graph == "one graph: with 40 layers as blocks the step does not fit"
    assert Cuts(net(), "auto").of_graph is None


def test_budget_is_kept() -> None:
    model, x = net(Plain), torch.randn(8 * ROWS, DIM)
    step = lambda: model(x).square().mean().backward()  # noqa: E731
    step()
    least = lowtide.plan(model, (x,), budget="100%", blocks=[Layer]).min_peak_bytes
    budget = int(0.95 * least)
    lowtide.wrap(model, budget=budget, blocks=[Layer])
    step()
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        assert lowtide.measure_peak(step) <= budget
    assert len(plan_of(model).blocks) < COUNT


def test_least_budget_of_the_error_works() -> None:
    with pytest.raises(InfeasibleBudgetError) as caught:
        lowtide.wrap(net(), budget=1000, **OPTIONS)(*rows()[0][0])
    least = caught.value.least_bytes
    model = assert_exact(net(), rows(1), wrap=OPTIONS | {"budget": least})
    assert plan_of(model).blocks.count("stage") == 1


def test_saved_plan_of_joined_layers_is_used(least_single: int, tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    lowtide.plan(net(), rows()[0][0], budget=int(0.85 * least_single), **OPTIONS).save(file)
    saved = lowtide.load(file)
    assert isinstance(saved, StepPlan)
    assert saved.blocks == ("first", "stage", "last")
    model = assert_exact(net(), rows(), wrap={"budget": None, "plan": saved, "blocks": [Layer]})
    assert plan_of(model).blocks == saved.blocks


def test_layers_that_are_called_one_by_one_stay_blocks(least_single: int, budget: int) -> None:
    with pytest.raises(InfeasibleBudgetError) as caught:
        lowtide.wrap(net(Stepwise), budget=budget, **OPTIONS)(*rows()[0][0])
    assert caught.value.least_bytes >= least_single


def test_hooks_of_joined_layers_run_once(budget: int) -> None:
    seen: list[str] = []

    def install(model: nn.Module, name: str) -> None:
        stage = model.get_submodule("stage")
        stage.register_forward_hook(lambda *_: seen.append(f"{name} stage"))
        list(stage.children())[2].wide.register_forward_hook(lambda *_: seen.append(f"{name} part"))

    plain, model = net(), net()
    install(plain, "eager")
    install(model, "planned")
    expected = train(plain, plain, rows())
    lowtide.wrap(model, budget=2 * budget, **OPTIONS)
    assert_same(expected, train(model, model, rows()))
    assert [each.split()[1] for each in seen if each.startswith("eager")] == [
        each.split()[1] for each in seen if each.startswith("planned")
    ]


def test_layers_with_hooks_are_not_joined(budget: int) -> None:
    model = net()
    next(model.get_submodule("stage").children()).register_forward_hook(lambda *_: None)
    with pytest.raises(InfeasibleBudgetError):
        lowtide.wrap(model, budget=budget, **OPTIONS)(*rows()[0][0])


def test_hook_that_is_added_later_runs(budget: int) -> None:
    model, plain, seen = net(), net(), []
    lowtide.wrap(model, budget=budget, **OPTIONS)
    train(model, model, rows(1))
    train(plain, plain, rows(1))
    layer = list(model.get_submodule("stage").children())[1]
    layer.register_forward_hook(lambda *_: seen.append("layer"))
    # The four layers run as blocks of their own now, which is why it may not fit any more.
    try:
        torch.manual_seed(3)
        loss = model(*rows()[0][0])
    except InfeasibleBudgetError:
        return
    torch.manual_seed(3)
    assert torch.equal(loss, plain(*rows()[0][0]))
    assert seen == ["layer"]


def test_unwrap_restores_all(budget: int) -> None:
    for make in (Net, Plain):
        model = net(make)
        keys = list(model.state_dict())
        lowtide.wrap(model, budget=budget, **OPTIONS)
        model(*rows()[0][0]).mean().backward()
        assert list(model.state_dict()) == keys
        lowtide.unwrap(model)
        assert all("forward" not in vars(module) for module in model.modules())
        assert all(module._compiled_call_impl is None for module in model.modules())


def test_replaced_layer_trains() -> None:
    model = net()
    plain = net()
    lowtide.wrap(model, budget=10**8, **OPTIONS)
    for each in (model, plain):
        each.get_submodule("stage")[1] = nn.Identity()
    assert_same(train(plain, plain, rows()), train(model, model, rows()))


def test_unwrapped_calls_are_plain(budget: int) -> None:
    model, plain = net(), net()
    lowtide.wrap(model, budget=budget, **OPTIONS)
    train(model, model, rows(1))
    train(plain, plain, rows(1))
    x = rows()[0][0][0]
    outputs = []
    for each in (plain, model):
        torch.manual_seed(5)
        outputs.append(each.get_submodule("stage")(x))
    assert torch.equal(*outputs)
    assert torch.equal(*(each.eval()(x) for each in (plain, model)))
