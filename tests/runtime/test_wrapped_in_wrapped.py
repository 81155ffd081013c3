"""Wrapped models inside of wrapped models: the outermost one's plan and budget cover all of it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import lowtide
from helpers.exactness import STEPS, assert_same, train

DIM = 64


def stack() -> nn.Sequential:
    layers = [layer for _ in range(3) for layer in (nn.Linear(DIM, DIM), nn.GELU(), nn.Dropout(0.1))]
    return nn.Sequential(*layers)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = stack(), stack(), stack()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x))).square().mean()


class ThroughForward(Outer):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner.forward(self.first(x))).square().mean()


class Broken(Outer):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        torch._dynamo.graph_break()
        return self.last(self.inner(h)).square().mean()


class OfFunctions(Outer):
    """Its wrapped part is a function, which closes over a layer."""

    def __init__(self) -> None:
        super().__init__()
        inner = self.inner
        self.call = lowtide.wrap(lambda h: inner(h), budget="1TiB", costs="analytic")

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.call(self.first(x))).square().mean()


@pytest.mark.parametrize("make", [Outer, ThroughForward, Broken, OfFunctions])
def test_the_outermost_budget_is_kept_exactly(make: Callable[[], Outer]) -> None:
    torch.manual_seed(0)
    model = Outer() if make is OfFunctions else make()
    weights, plain = model.state_dict(), copy.deepcopy(model)
    x = torch.randn(128, DIM)

    def peak(of: nn.Module) -> int:
        of.zero_grad()
        return lowtide.measure_peak(lambda: of(x).backward())

    budget = int(0.7 * peak(copy.deepcopy(plain)))
    wrapped = make()
    wrapped.load_state_dict(weights)
    if make is not OfFunctions:
        lowtide.wrap(wrapped.inner, budget="1TiB", costs="analytic")
    lowtide.wrap(wrapped, budget=budget)
    batches = [((x + k,), {}) for k in range(STEPS)]
    assert_same(train(plain, plain, batches), train(wrapped, wrapped, batches))
    assert peak(wrapped) <= budget
    assert lowtide.plans(wrapped)


def test_the_inner_model_alone_has_its_own_plan() -> None:
    model, x = Outer(), torch.randn(8, DIM)
    lowtide.wrap(model.inner, budget="1TiB", costs="analytic")
    lowtide.wrap(model, budget="1TiB", costs="analytic")
    model(x).backward()
    assert not lowtide.plans(model.inner)
    model.inner(x).sum().backward()
    assert len(lowtide.plans(model.inner)) == 1


def test_an_infeasible_outer_budget_is_said_as_such() -> None:
    model, x = Outer(), torch.randn(128, DIM)
    lowtide.wrap(model.inner, budget="1TiB", costs="analytic")
    lowtide.wrap(model, budget=1000, costs="analytic")
    with pytest.raises(lowtide.errors.InfeasibleBudgetError):
        model(x)
