"""Gradients reach a graph in the layout that they have in eager, so that its sums are added up in the same order."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import lowtide
from helpers.exactness import STEPS, DropEverything, assert_exact

Change = Callable[[Tensor], Tensor]


class Cut(nn.Module):
    """Two parts with code between them that cannot be traced."""

    def __init__(self, first: nn.Module, between: Change, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        x = self.between(x)
        torch._dynamo.graph_break()
        return self.second(x).square().mean()


def batches(*shape: int, layout: torch.memory_format = torch.contiguous_format) -> list[Any]:
    torch.manual_seed(3)
    return [((torch.randn(shape).to(memory_format=layout),), {}) for _ in range(STEPS)]


class Shift(nn.Module):
    """Adds a number to every channel, whose gradient is a sum over all other dimensions."""

    def __init__(self, channels: int, dims: int) -> None:
        super().__init__()
        self.amount = nn.Parameter(torch.randn(channels, *[1] * dims))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.amount


def convolutions(channels: int = 24) -> nn.Module:
    """Return layers whose last two add gradients up in an order that depends on the layout."""
    layers = [nn.Conv1d(channels, channels, 3, padding=1), nn.GELU(), nn.Conv1d(channels, channels, 5, padding=2)]
    return nn.Sequential(*layers, nn.Conv1d(channels, channels, 8, groups=4, padding=4), Shift(channels, 1))


def images() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), Shift(8, 2))


PLANNERS = [DropEverything(again=True), "keep_all"]


@pytest.mark.parametrize("planner", PLANNERS, ids=["drop", "keep"])
def test_transposed_between_graphs(planner: Any) -> None:
    torch.manual_seed(0)
    model = Cut(convolutions(), lambda x: x.transpose(1, 2), nn.Linear(24, 24))
    assert_exact(model, batches(4, 24, 301), wrap={"planner": planner})


def test_expanded_between_graphs() -> None:
    torch.manual_seed(0)
    model = Cut(nn.Sequential(nn.Linear(37, 53), nn.Linear(53, 41)), lambda x: x.sum(), nn.Identity())
    assert_exact(model, batches(129, 37))


def test_channels_last_between_graphs() -> None:
    torch.manual_seed(0)
    model = Cut(images(), lambda x: x.to(memory_format=torch.channels_last), nn.Conv2d(8, 4, 3))
    assert_exact(model, batches(2, 3, 24, 24))
    model = Cut(images(), lambda x: x.contiguous(), nn.Conv2d(8, 4, 3)).to(memory_format=torch.channels_last)
    assert_exact(model, batches(2, 3, 24, 24, layout=torch.channels_last))


def test_dropout_in_front_of_transposed() -> None:
    torch.manual_seed(0)
    first = nn.Sequential(convolutions(), nn.Dropout(0.3), Shift(24, 1))
    assert_exact(Cut(first, lambda x: x.transpose(1, 2), nn.Linear(24, 24)), batches(4, 24, 301))


def test_parts_of_one_gradient() -> None:
    torch.manual_seed(0)
    model = Cut(convolutions(), lambda x: torch.cat([x, x.flip(0)], 2)[:, :, 3:], nn.Conv1d(24, 24, 3))
    assert_exact(model, batches(4, 24, 301))


class Alternating(nn.Module):
    """Two graphs between which the layout changes from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.first = convolutions()
        self.calls = 0

    @torch._dynamo.disable
    def between(self, x: Tensor) -> Tensor:
        self.calls += 1
        match self.calls % 4:
            case 0:
                return x.transpose(1, 2).square().mean()
            case 1:
                return x.square().mean()
            case 2:
                return x.mean()
        return torch.cat([x, x], 2).square().mean()

    def forward(self, x: Tensor) -> Tensor:
        return self.between(self.first(x))


def test_layouts_that_alternate() -> None:
    torch.manual_seed(0)
    assert_exact(Alternating(), batches(4, 24, 301) * 3)


LOSSES: dict[str, Change] = {
    "transposed": lambda y: (y.transpose(1, 2) @ torch.linspace(0, 1, 24 * 5).view(24, 5)).square().mean(),
    "expanded": lambda y: y.mean(),
    "expanded in part": lambda y: y.sum(1).square().mean(),
    "contiguous": lambda y: y.square().mean(),
    "a slice": lambda y: torch.cat([y, y], 1)[:, 5:].square().mean(),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("planner", PLANNERS, ids=["drop", "keep"])
def test_loss_outside(loss: str, planner: Any) -> None:
    torch.manual_seed(0)
    assert_exact(convolutions(), batches(4, 24, 301), loss=LOSSES[loss], wrap={"planner": planner})


@pytest.mark.parametrize("budget", ["100%", "70%"])
def test_loss_outside_keeps_its_budget(budget: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(convolutions(), nn.Dropout(0.2), convolutions())
    assert_exact(model, batches(4, 24, 301), loss=LOSSES["transposed"], wrap={"budget": budget, "planner": "auto"})


def test_two_outputs_of_which_one_is_missing() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = convolutions(), convolutions()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.one(x), self.other(x)

    for loss in (lambda y: y[0].mean(), lambda y: y[1].transpose(1, 2).cumsum(2).mean(), lambda y: (y[0] + y[1]).sum()):
        torch.manual_seed(0)
        assert_exact(Two(), batches(4, 24, 301), loss=loss)


def test_retained_graph() -> None:
    torch.manual_seed(0)
    model = convolutions()
    plain = copy.deepcopy(model)
    lowtide.wrap(model, budget="1TiB", planner=DropEverything(again=True), costs="analytic")
    (x,), _ = batches(4, 24, 301)[0]
    for each in (plain, model):
        y = each(x)
        for loss in LOSSES.values():
            loss(y).backward(retain_graph=True)
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_autocast_around_the_call() -> None:
    def run(model: nn.Module) -> list[Tensor]:
        (x,), _ = batches(4, 24, 301)[0]
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        y.float().transpose(1, 2).cumsum(2).mean().backward()
        return [each.grad for each in model.parameters()]

    torch.manual_seed(0)
    model = convolutions()
    plain = copy.deepcopy(model)
    lowtide.wrap(model, budget="1TiB", planner=DropEverything(again=True), costs="analytic")
    for one, other in zip(run(plain), run(model), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("budget", ["100%", "75%", "60%"])
def test_peak_is_predicted_for_the_layout_that_comes(budget: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(convolutions(), convolutions(), convolutions())
    (x,), _ = batches(4, 24, 301)[0]

    def step() -> None:
        y = model(x)
        LOSSES["transposed"](y).backward()

    lowtide.wrap(model, budget=budget, planner="greedy")
    for _ in range(3):
        model.zero_grad()
        # Under a profiler nothing else is measured, so that the prediction is that of the price alone.
        peak = lowtide.measure_peak(step)
    (plan,) = lowtide.plans(model)
    # The loss itself is a scalar outside of the plan.
    assert 0 <= peak - plan.peak_bytes <= 64
    assert plan.peak_bytes <= plan.budget_bytes


def test_no_data_is_held() -> None:
    model = lowtide.wrap(convolutions(), budget="1TiB", planner="keep_all", costs="analytic")
    (x,), _ = batches(4, 24, 301)[0]
    known = weakref.ref(x)
    LOSSES["transposed"](model(x)).backward()
    weights = [weakref.ref(each) for each in model.parameters()]
    del x
    assert known() is None
    del model
    gc.collect()
    torch._dynamo.reset()
    gc.collect()
    assert not any(each() is not None for each in weights)


def test_modes_around_backward() -> None:
    torch.manual_seed(0)
    model = convolutions()
    plain = copy.deepcopy(model)
    lowtide.wrap(model, budget="1TiB", planner=DropEverything(again=True), costs="analytic")
    (x,), _ = batches(4, 24, 301)[0]
    for each in (plain, model):
        loss = LOSSES["transposed"](each(x))
        with FlopCounterMode(display=False), torch.autograd.detect_anomaly(check_nan=False), torch.autocast("cpu"):
            loss.backward()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
