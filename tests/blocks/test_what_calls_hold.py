"""The first call of a model in several graphs holds no more than later ones: nothing of it outlives it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.runtime.model_state import ModelState

DIM = 64


class Note:
    """What a variable of `forward` holds."""


class Noted(nn.Module):
    """Its `forward` holds an object in a variable, of which the test knows whether it is alive."""

    def __init__(self, part: Callable[[Noted, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.part = nn.Linear(DIM, DIM), part
        self.register_buffer("table", torch.ones(DIM, DIM))
        self.notes: list[weakref.ref[Note]] = []

    @torch._dynamo.disable
    def note(self) -> Note:
        note = Note()
        self.notes.append(weakref.ref(note))
        return note

    def forward(self, x: Tensor) -> Tensor:
        held = self.note()
        x = self.part(self, x)
        assert held is not None
        return x.square().mean()


def number_of_numpy(model: Noted, x: Tensor) -> Tensor:
    """Trace twice: the number is first taken for an input of the graph."""
    x = model.layer(x)
    torch._dynamo.graph_break()
    return x * np.sqrt(DIM)


def size_from_data(model: Noted, x: Tensor) -> Tensor:
    """Leave an op to eager mode, whose result has a size that depends on data."""
    x = model.layer(x)
    rows = x.sum(1).gt(0).nonzero().squeeze(-1)
    return x[rows]


def untraceable(model: Noted, x: Tensor) -> Tensor:
    """Read a value in Python."""
    x = model.layer(x)
    return x * (2.0 if x.mean().item() > 0 else 3.0)


PARTS = [number_of_numpy, size_from_data, untraceable]


@pytest.mark.parametrize("part", PARTS)
def test_no_variable_of_a_call_outlives_it(part: Callable[[Noted, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = Noted(part)
    lowtide.wrap(model, budget=10_000_000)
    loss = model(torch.randn(32, DIM))
    gc.collect()
    assert model.notes
    assert not [note for note in model.notes if note() is not None]
    loss.backward()


@pytest.mark.parametrize("part", PARTS)
def test_no_copies_of_buffers_are_there_in_backward(part: Callable[[Noted, Tensor], Tensor]) -> None:
    # Errors that other tests have seen may hold theirs.
    earlier = [each for each in gc.get_objects() if type(each) is ModelState]
    torch.manual_seed(0)
    model = Noted(part)
    lowtide.wrap(model, budget=10_000_000)
    loss = model(torch.randn(32, DIM))
    found = [each for each in gc.get_objects() if type(each) is ModelState]
    assert not [each for each in found if not any(each is other for other in earlier)]
    loss.backward()
