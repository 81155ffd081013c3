"""The compiled call: numbers that change between calls, and many models in one process."""

from __future__ import annotations

import copy
import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.pytorch.compiler.changing_floats import changing_floats
from lowtide.pytorch.storages import same_bits
from lowtide.runtime import compiled_entry
from lowtide.runtime.wrapped import wrapped_of

INFINITY = float("inf")
NAN = float("nan")


class Scaled(nn.Module):
    """Reads a number from wherever the test puts it."""

    def __init__(self, read: Callable[[Any, Any], float]) -> None:
        super().__init__()
        self.linear, self.read = nn.Linear(4, 4), read
        self.number, self.numbers = 0.0, [0.0]

    def forward(self, x: torch.Tensor, given: Any) -> torch.Tensor:
        value = self.read(self, given)
        return torch.cat([torch.full((1, 4), value), self.linear(x), (x * 0) * value, x + value])


PLACES = {
    "argument": lambda model, given: given,
    "list": lambda model, given: given[0],
    "keyed": lambda model, given: given["number"],
    "attribute": lambda model, given: model.number,
    "listed attribute": lambda model, given: model.numbers[0],
}


def put(model: Scaled, place: str, value: float) -> Any:
    model.number, model.numbers[0] = value, value
    return {"list": [value], "keyed": {"number": value}}.get(place, value)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "values",
    [(0.0, -0.0), (-0.0, 0.0), (1.0, 2.0, -0.0, 0.0, 3.0, -0.0), (NAN, -0.0, 0.0), (1.0, INFINITY, -INFINITY, 1e-310)],
    ids=str,
)
def test_numbers_that_change_keep_their_bits(place: str, values: Sequence[float]) -> None:
    torch.manual_seed(0)
    model, x = Scaled(PLACES[place]), torch.randn(2, 4)
    expected = [model(x, put(model, place, value)).detach() for value in values]
    lowtide.wrap(model, budget="1GiB", costs="analytic")
    for value, wanted in zip(values, expected, strict=True):
        assert same_bits(model(x, put(model, place, value)).detach(), wanted), value


def test_floats_of_two_threads_do_not_mix() -> None:
    """Threads that trace at the same time leave nothing behind, in whatever order they end."""
    from torch._dynamo.variables import builder

    before = builder.process_automatic_dynamic  # type: ignore[attr-defined]
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with changing_floats({}):
            entered.set()
            leave.wait(30)

    thread = threading.Thread(target=other)
    with changing_floats({}):
        thread.start()
        assert entered.wait(30)
    assert builder.process_automatic_dynamic is before  # type: ignore[attr-defined]
    leave.set()
    thread.join(30)
    assert builder.process_automatic_dynamic is before  # type: ignore[attr-defined]


class Halves(nn.Module):
    """Two graphs: the methods of all models of this class, and our own, are compiled as the same code."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).relu()
        torch._dynamo.graph_break()
        return self.second(hidden).square().sum()


def trained(model: nn.Module, rows: int) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(rows)
    model(torch.randn(rows, 4)).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


class Whole(nn.Module):
    """One graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu()).square().sum()


@pytest.mark.filterwarnings("ignore::lowtide.errors.LowtideWarning")
@pytest.mark.parametrize("kind", [Whole, Halves])
def test_there_may_be_any_number_of_shapes(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_entry, "MOST_RECOMPILATIONS", 2)
    monkeypatch.setattr(compiled_entry, "MOST_SHAPES", 3)
    monkeypatch.setattr(compiled_entry._all_entries, "limit", 0)
    torch.manual_seed(0)
    plain = kind()
    model = lowtide.wrap(copy.deepcopy(plain), budget="1GiB", costs="analytic")
    for rows in (2, 3, 4, 5, 6, 2, 6):
        expected, found = trained(plain, rows), trained(model, rows)
        assert all(same_bits(one, other) for one, other in zip(expected, found, strict=True))


@pytest.mark.filterwarnings("ignore::lowtide.errors.LowtideWarning")
def test_shapes_that_are_dropped_leave_nothing_behind_and_those_in_use_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_entry, "MOST_SHAPES", 2)
    model = lowtide.wrap(Whole(), budget="1GiB", costs="analytic")
    wrapped = wrapped_of(model)
    assert wrapped is not None
    trained(model, 2)
    code = weakref.ref(wrapped._entry._for_shapes((torch.Size((2, 4)),)))
    for rows in (3, 2, 4, 2):
        trained(model, rows)
    # The one for 3 rows was used longest ago.
    assert wrapped.session.num_compiled == 3
    assert code() is not None
    for rows in (5, 6):
        trained(model, rows)
    gc.collect()
    assert code() is None
    trained(model, 2)
    assert wrapped.session.num_compiled == 6


def test_as_many_models_of_a_class_as_one_likes_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_entry, "MOST_RECOMPILATIONS", 2)
    monkeypatch.setattr(compiled_entry._all_entries, "limit", 0)
    models = [lowtide.wrap(Halves(), budget="1GiB", costs="analytic") for _ in range(6)]
    for model, rows in itertools.chain(((each, 2) for each in models), ((models[0], 3),)):
        model(torch.ones(rows, 4)).backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
