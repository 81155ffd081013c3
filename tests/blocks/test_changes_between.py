"""What is changed between the layers of a model, or between forward and backward: noticed, never a wrong number."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lowtide
from helpers.chain_cases import BATCH, DIM, WithExtra
from helpers.exactness import DropEverything
from lowtide import errors

DROP = DropEverything(again=True)


class Layer(nn.Module):
    """A layer that reads an attribute of its own, and something that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale, self.draws = nn.Linear(DIM, DIM), 1.0, False

    def forward(self, x: Tensor, given: Any = None) -> Tensor:
        number = given if given is None or isinstance(given, Tensor) else given["n"]
        drawn = random.random() + np.random.rand() if self.draws else 0.0
        return torch.tanh(self.linear(x)) * self.scale * (1.0 if number is None else number) + drawn


class Model(nn.Module):
    """A loop over layers in which something else happens."""

    def __init__(self, between: Callable[[Any, int, Any], Any], given: Callable[[], Any] = lambda: None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.between, self.given = between, given

    def forward(self, x: Tensor) -> Tensor:
        given = self.given()
        for number, layer in enumerate(self.layers):
            self.between(layer, number, given)
            x = layer(x, given)
        return x


def _earlier_layer(layer: Any, number: int, given: Any) -> None:
    _earlier_layer.seen = [*getattr(_earlier_layer, "seen", []), layer][-2:]
    if number:
        _earlier_layer.seen[0].linear.extra = number


def _given_tensor(layer: Any, number: int, given: Any) -> None:
    given.add_(1)


def _given_object(layer: Any, number: int, given: Any) -> None:
    given["n"] = number + 1.0


def _python_random(layer: Any, number: int, given: Any) -> None:
    layer.draws = True
    random.random()


def _numpy_random(layer: Any, number: int, given: Any) -> None:
    layer.draws = True
    np.random.rand()


class Thing(dict[str, float]):
    """Something that PyTorch does not take apart."""


CASES: dict[str, tuple[Callable[..., None], Callable[[], Any], str]] = {
    "attribute": (_earlier_layer, lambda: None, "an attribute of it"),
    "tensor": (_given_tensor, lambda: torch.zeros(DIM), "a tensor that it was given"),
    "object": (_given_object, lambda: Thing(n=0.0), "an attribute of it or of something that it reads"),
    "python": (_python_random, lambda: None, "random numbers between its layers"),
    "numpy": (_numpy_random, lambda: None, "random numbers between its layers"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_model_changes_between_its_layers(name: str) -> None:
    between, given, message = CASES[name]
    model = lowtide.chain_layers(Model(between, given), budget="1TiB", planner=DROP)
    with pytest.raises(errors.InvalidModelError, match=message):
        model(torch.randn(BATCH, DIM))


def test_what_is_set_once_before_each_layer_is_as_in_plain_training() -> None:
    def before(layer: Any, number: int, given: Any) -> None:
        layer.scale = 1.0 + number

    results = []
    for chained in (False, True):
        torch.manual_seed(0)
        model = Model(before)
        if chained:
            lowtide.chain_layers(model, budget="1TiB", planner=DROP)
        for step in range(3):
            loss = model(torch.randn(BATCH, DIM, generator=torch.Generator().manual_seed(step))).sum()
            loss.backward()
            results.append([loss.item(), *(p.grad.sum().item() for p in model.parameters())])
    assert results[:3] == results[3:]


def test_loops_that_ask_for_the_class_of_a_layer() -> None:
    def between(layer: Any, number: int, given: Any) -> None:
        assert isinstance(layer, Layer)
        assert isinstance(layer, nn.Module)
        layer.mark = number
        del layer.mark

    model = lowtide.chain_layers(Model(between), budget="1TiB", planner=DROP)
    model(torch.randn(BATCH, DIM)).sum().backward()
    assert not any("mark" in vars(layer) for layer in model.layers._modules.values())


def test_arguments_changed_before_backward() -> None:
    chained = lowtide.chain([WithExtra() for _ in range(4)], budget="1TiB", planner=DROP)
    extras, scale = [torch.randn(DIM) for _ in range(4)], torch.ones(DIM)
    for changed in (extras[1], scale):
        loss = chained(torch.randn(BATCH, DIM), extras=extras, scale=scale).sum()
        changed.add_(1)
        with pytest.raises(errors.UnsupportedBackwardError, match="An extra argument was changed"):
            loss.backward()
    chained(torch.randn(BATCH, DIM), extras=extras, scale=scale).sum().backward()


class Masked(nn.Module):
    """Reads a buffer that it does not change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM).eval()
        self.register_buffer("mask", torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.linear(x)) * self.mask)


@pytest.mark.parametrize("how", ["in place", "replaced", "statistics"])
def test_buffers_changed_before_backward(how: str) -> None:
    blocks = [Masked() for _ in range(4)]
    chained = lowtide.chain(blocks, budget="1TiB", planner=DROP)
    for _ in range(2):
        loss = chained(torch.randn(BATCH, DIM)).sum()
        if how == "in place":
            blocks[1].mask.zero_()
        elif how == "replaced":
            blocks[1].mask = torch.zeros(DIM)
        else:
            blocks[1].norm.running_mean.add_(1)
        with pytest.raises(errors.UnsupportedBackwardError, match=r"A buffer of Block 1 \(Masked\) was changed"):
            loss.backward()
    chained(torch.randn(BATCH, DIM)).sum().backward()


def test_sequences_changed_before_backward() -> None:
    model = lowtide.unroll(nn.GRUCell(DIM, DIM), budget="1TiB", planner=DROP, chunk=2)
    sequence = torch.randn(8, BATCH, DIM)
    outputs, _ = model(sequence)
    sequence.zero_()
    with pytest.raises(errors.UnsupportedBackwardError, match="An extra argument was changed"):
        outputs.sum().backward()
