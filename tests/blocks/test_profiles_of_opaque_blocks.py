"""Opaque blocks are profiled where nothing of the call is held, so that the first call keeps its budget as well."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.blocks.opaque import opaque_block
from lowtide.blocks.step.session import StepSession
from lowtide.errors import InfeasibleBudgetError
from lowtide.measure import measure_peak

DIM = 32


class Untraceable(nn.Module):
    """A layer with a value that Python reads."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x) * (0.5 if x.mean().item() > 0 else 0.25)


class Layers(nn.Module):
    """Untraceable layers, with eager code between them that holds what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Untraceable() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).sigmoid()
        return x.square().mean()


class Recurrent(nn.Module):
    """Recurrent modules behind each other, with code between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.GRU(DIM, DIM, batch_first=True), nn.LSTM(2 * DIM, DIM, batch_first=True)
        self.wide = nn.Linear(DIM, 2 * DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = self.wide(self.first(x.view(8, -1, DIM))[0].sin()).cos()
        return self.second(x)[0].square().mean()


class Looking(nn.Module):
    """Both."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.recurrent = Layers().layers, nn.LSTM(DIM, DIM, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.recurrent(x.view(8, -1, DIM))[0].square().mean()


MODELS = [Layers, Recurrent, Looking]


def built(kind: type[nn.Module]) -> tuple[nn.Module, Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return kind(), torch.randn(512, DIM)


@pytest.mark.parametrize("kind", MODELS)
def test_no_block_is_profiled_in_a_planned_call(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    sessions: list[StepSession] = []
    profiled: list[str] = []
    begin, profile = StepSession.begin_call, opaque_block.profile_chain

    def beginning(self: StepSession, *args: Any) -> None:
        sessions.append(self)
        begin(self, *args)

    def profiling(blocks: Any, *args: Any) -> Any:
        assert sessions[-1]._call is None, f"{blocks.names} is profiled while other blocks hold what they keep"
        profiled.extend(blocks.names)
        return profile(blocks, *args)

    monkeypatch.setattr(StepSession, "begin_call", beginning)
    monkeypatch.setattr(opaque_block, "profile_chain", profiling)
    model, x = built(kind)
    lowtide.wrap(model, budget=50_000_000)
    for _ in range(2):
        model(x).backward()
    assert len(profiled) == len(set(profiled)) >= 2


@pytest.mark.parametrize("kind", MODELS)
def test_bits_are_those_of_eager(kind: type[nn.Module]) -> None:
    found = []
    for budget in (None, 50_000_000):
        model, x = built(kind)
        if budget is not None:
            lowtide.wrap(model, budget=budget)
        torch.manual_seed(1)
        for _ in range(2):
            loss = model(x)
            loss.backward()
        found.append([loss.detach(), *(each.grad for each in model.parameters()), torch.get_rng_state()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("kind", MODELS)
def test_the_first_step_is_in_the_budget(kind: type[nn.Module]) -> None:
    model, x = built(kind)
    budget = int(1.1 * measure_peak(lambda: model(x).backward()))
    model.zero_grad()
    lowtide.wrap(model, budget=budget)
    assert measure_peak(lambda: model(x).backward()) <= budget


@pytest.mark.parametrize("kind", MODELS)
def test_the_least_budget_that_is_named_works_in_the_first_call(kind: type[nn.Module]) -> None:
    model, x = built(kind)
    lowtide.wrap(model, budget=20_000)
    with pytest.raises(InfeasibleBudgetError) as refused:
        model(x).backward()
    model, x = built(kind)
    lowtide.wrap(model, budget=refused.value.least_bytes)
    for _ in range(3):
        assert measure_peak(lambda: model(x).backward()) <= refused.value.least_bytes
        model.zero_grad()
