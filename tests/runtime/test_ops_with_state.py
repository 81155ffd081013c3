"""Ops of the user's that remember something in Python: measuring what they take changes nothing of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lowtide
from helpers.exactness import STEPS, assert_same, train
from lowtide.errors import CaptureError

state: dict[str, Any] = {}


def counted(x: torch.Tensor) -> torch.Tensor:
    state["calls"] += 1
    return x * state["calls"]


def largest_so_far(x: torch.Tensor) -> torch.Tensor:
    state["largest"].copy_(torch.maximum(state["largest"], x.abs().amax()))
    return x / state["largest"].amax()


def scaled_by_numpy(x: torch.Tensor) -> torch.Tensor:
    return x * float(np.random.rand())


def scaled_by_python(x: torch.Tensor) -> torch.Tensor:
    return x * random.random()


def noted_in_a_closure() -> Callable[[torch.Tensor], torch.Tensor]:
    seen: list[int] = []

    def noted(x: torch.Tensor) -> torch.Tensor:
        seen.append(len(seen))
        return x * (1 + sum(seen))

    state["seen"] = seen
    return noted


def custom(name: str, function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    function.__annotations__ = {"x": torch.Tensor, "return": torch.Tensor}
    op = torch.library.custom_op(f"lowtide_measured::{name}", function, mutates_args=())
    op.register_fake(torch.empty_like)
    op.register_autograd(lambda _, gradient: gradient * 2)
    return op


OPS = {
    name: custom(name, function)
    for name, function in {
        "counted": counted,
        "largest_so_far": largest_so_far,
        "scaled_by_numpy": scaled_by_numpy,
        "scaled_by_python": scaled_by_python,
        "noted": noted_in_a_closure(),
    }.items()
}


class Model(nn.Module):
    def __init__(self, op: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 8)
        # Ops themselves cannot be copied with the model.
        self.op = lambda x: op(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.head(self.op(self.body(x)))).square().mean()


def begin(largest: int = 1) -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    state.update(calls=0, largest=torch.full((largest,), 1e-6))
    state["seen"].clear()


@pytest.mark.parametrize("name", OPS)
def test_what_an_op_remembers_is_that_of_plain_training(name: str) -> None:
    batches = [((torch.randn(16, 8, generator=torch.Generator().manual_seed(s)),), {}) for s in range(STEPS)]
    found = []
    for wrap in (lambda model: model, lambda model: lowtide.wrap(model, budget="90%")):
        begin()
        model = wrap(Model(OPS[name]))
        records = train(model, model, batches)
        found.append((records, dict(state, largest=float(state["largest"])), random.random(), np.random.rand()))
        found[-1][1]["seen"] = list(state["seen"])
    (expected, *remembered), (planned, *then) = found
    assert_same(expected, planned)
    assert remembered == then
    assert lowtide.plans(model)


@pytest.mark.parametrize("name", OPS)
def test_planning_alone_changes_nothing_either(name: str) -> None:
    begin()
    before = dict(state, largest=float(state["largest"]), seen=[]), random.getstate(), str(np.random.get_state())
    lowtide.plan(Model(OPS[name]), (torch.randn(16, 8),), budget="90%")
    after = dict(state, largest=float(state["largest"]), seen=list(state["seen"]))
    assert (after, random.getstate(), str(np.random.get_state())) == before


def test_a_large_tensor_that_an_op_writes_to_is_refused() -> None:
    begin(largest=1 << 16)
    model = lowtide.wrap(Model(OPS["largest_so_far"]), budget="90%")
    with pytest.raises(CaptureError, match=r"measured on made-up data .*largest_so_far.* has changed"):
        model(torch.randn(15, 8))
