"""Tensors of subclasses: refused where they have rules of their own, whatever PyTorch's compiler makes of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import InvalidInputError


class Twice(torch.Tensor):
    """Doubles what tanh gives."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * 2 if func is torch.tanh else result


class Silent(torch.Tensor):
    """Has the rules that every subclass has: results are of the same type."""


class Weight(nn.Parameter):
    """A parameter with another name; parameters have no rules."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor, scale: Any = None) -> torch.Tensor:
        y = torch.tanh(self.inner(x)) if scale is None else torch.tanh(self.inner(x) * scale["by"])
        return y.square().mean()


def in_argument(model: nn.Module, kind: type[torch.Tensor]) -> torch.Tensor:
    return model(torch.randn(64, 8).as_subclass(kind))


def in_dictionary(model: nn.Module, kind: type[torch.Tensor]) -> torch.Tensor:
    return model(torch.randn(64, 8), {"by": torch.ones(8).as_subclass(kind)})


def in_buffer(model: nn.Module, kind: type[torch.Tensor]) -> torch.Tensor:
    model.register_buffer("by", torch.ones(8).as_subclass(kind))
    return model(torch.randn(64, 8), {"by": model.by})


@pytest.mark.parametrize("warm", [False, True], ids=["first call", "later call"])
@pytest.mark.parametrize("kind", [Twice, Silent])
@pytest.mark.parametrize("call", [in_argument, in_dictionary, in_buffer])
def test_types_with_rules_are_refused(
    call: Callable[[nn.Module, type[torch.Tensor]], torch.Tensor], kind: type[torch.Tensor], warm: bool
) -> None:
    model = lowtide.wrap(Net(), budget="1GiB", costs="analytic")
    if warm:
        model(torch.randn(64, 8)).backward()
    with pytest.raises(InvalidInputError, match=f"subclasses {kind.__name__}"):
        call(model, kind)
    model(torch.randn(64, 8)).backward()
    assert lowtide.plans(model)


def test_the_compilers_own_door_refuses_them_too() -> None:
    model = torch.compile(Net(), backend="lowtide", options={"budget": "1GiB", "costs": "analytic"}, dynamic=False)
    with pytest.raises(Exception, match="subclasses Twice"):
        in_argument(model, Twice)


def test_parameters_of_another_name_are_served() -> None:
    model, x = Net(), torch.randn(64, 8)
    model.inner[0].weight = Weight(model.inner[0].weight.detach().clone())
    plain = copy.deepcopy(model)
    lowtide.wrap(model, budget="1GiB", costs="analytic")
    found, expected = model(x), plain(x)
    found.backward()
    expected.backward()
    assert torch.equal(found, expected)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_shapes_alone_can_be_planned() -> None:
    with torch.device("meta"):
        model, x = Net(), torch.randn(64, 8)
    assert lowtide.plan(model, (x,), budget="100%", costs="analytic").peak_bytes > 0
