"""The first call under `verify=True`: what is compared, how exactly, and that it leaves no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import InfeasibleBudgetError, VerificationError
from lowtide.runtime.wrapped import Wrapped

NAN = float("nan")
LARGEST = torch.finfo(torch.float32).max


def returning(value: float, planned: float, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a model whose output has an entry `value`, and `planned` in its place when it runs planned."""
    honest = Wrapped.train

    def train(self: Wrapped, *args: Any) -> Any:
        result = honest(self, *args).clone()
        with torch.no_grad():
            result[0, 0] = planned
        return result

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([torch.full((1, 4), value), self.linear(x)])

    monkeypatch.setattr(Wrapped, "train", train)
    return lowtide.wrap(Net(), budget="1TiB", costs="analytic", verify=True)


@pytest.mark.parametrize(("value", "planned"), [(NAN, 0.0), (float("inf"), LARGEST), (0.0, -0.0), (1.0, NAN)])
def test_values_that_are_alike_are_not_the_same(value: float, planned: float, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(VerificationError, match="output 0"):
        returning(value, planned, monkeypatch)(torch.ones(2, 4))


@pytest.mark.parametrize("value", [NAN, float("inf"), -0.0])
def test_unusual_values_are_the_same_as_themselves(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    returning(value, value, monkeypatch)(torch.ones(2, 4))


def normalised() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


GLOBAL_NET = normalised()


class Trainer:
    def __init__(self) -> None:
        self.parts = {"net": normalised()}

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts["net"](x).square().sum()


def in_a_closure() -> tuple[Any, nn.Module]:
    net = normalised()
    return lambda x: net(x).square().sum(), net


def in_a_global() -> tuple[Any, nn.Module]:
    GLOBAL_NET.load_state_dict(normalised().state_dict())
    return lambda x: GLOBAL_NET(x).square().sum(), GLOBAL_NET


def in_an_object() -> tuple[Any, nn.Module]:
    trainer = Trainer()
    return trainer.loss, trainer.parts["net"]


FUNCTIONS = [in_a_closure, in_a_global, in_an_object]


def verified(function: Any) -> Any:
    return lowtide.wrap(function, budget="1TiB", costs="analytic", verify=True)


@pytest.mark.parametrize("make", FUNCTIONS, ids=lambda make: make.__name__)
def test_statistics_of_modules_in_a_function_move_once(make: Any) -> None:
    function, net = make()
    x, plain = torch.randn(8, 4), normalised()
    verified(function)(x)
    plain(x)
    for name, buffer in plain.named_buffers():
        assert torch.equal(net.get_buffer(name), buffer), name


@pytest.mark.parametrize("make", FUNCTIONS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("result", ["buffer", "gradient"])
def test_buffers_and_gradients_of_modules_in_a_function_are_compared(
    make: Any, result: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Wrapped.train
    function, net = make()

    def train(self: Wrapped, *args: Any) -> Any:
        loss = honest(self, *args)
        if result == "gradient":
            return loss + 0 * net[0].bias.sum() + (net[0].bias - net[0].bias.detach()).sum()
        net[1].running_mean.add_(1)
        return loss

    monkeypatch.setattr(Wrapped, "train", train)
    with pytest.raises(VerificationError, match=result):
        verified(function)(torch.randn(8, 4))


def test_tensors_of_a_function_are_compared_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, calls = torch.randn(4, 4, requires_grad=True), torch.zeros(1)

    def function(x: torch.Tensor) -> torch.Tensor:
        calls.add_(1)
        return (x @ weight).square().sum()

    verified(function)(torch.randn(8, 4))
    assert calls.item() == 1
    honest = Wrapped.train
    monkeypatch.setattr(Wrapped, "train", lambda self, *args: honest(self, *args) + (weight - weight.detach()).sum())
    with pytest.raises(VerificationError, match="gradient"):
        verified(function)(torch.randn(8, 4))


def test_a_function_that_fails_leaves_statistics_alone() -> None:
    net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()) for _ in range(6)))
    function = lowtide.wrap(lambda x: net(x).sum(), budget=64, costs="analytic")
    with pytest.raises(InfeasibleBudgetError):
        function(torch.randn(8, 4))
    assert all(not buffer.any() for name, buffer in net.named_buffers() if name.endswith("num_batches_tracked"))


@pytest.mark.parametrize("as_function", [False, True])
def test_a_lazy_model_is_verified_in_its_first_call(as_function: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    net, x, honest = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d()), torch.randn(8, 4), Wrapped.train
    model = verified((lambda x: net(x)) if as_function else net)
    monkeypatch.setattr(Wrapped, "train", lambda self, *args: honest(self, *args) + 1)
    with pytest.raises(VerificationError):
        model(x)
    monkeypatch.setattr(Wrapped, "train", honest)
    tracked = int(net[1].num_batches_tracked)
    model(x)
    assert net[1].num_batches_tracked == tracked + 1


def test_what_was_computed_before_a_function_can_still_be_differentiated() -> None:
    net, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(8, 4)
    before = net(x)
    verified(lambda x: (net(x) + before).square().sum())(x).backward()
    assert net[0].weight.grad.any()
