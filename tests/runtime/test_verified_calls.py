"""The first call under `verify=True`: what is compared, how exactly, and that it leaves no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import VerificationError
from lowtide.runtime.wrap import Wrapped

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
