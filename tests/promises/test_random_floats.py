"""Random floats of Python's own generator in a model: the type and the bits of eager, and its stream."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import lowtide

pytestmark = pytest.mark.filterwarnings("ignore::lowtide.errors.LowtideWarning")
own = random.Random(3)
CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "random": lambda loss: loss * random.random(),
    "uniform and gauss": lambda loss: loss * random.uniform(0.0, 1.0) + random.gauss(0.0, 1.0),
    "an own generator": lambda loss: loss / (1 + own.random()),
    "an exponent": lambda loss: loss ** (1 + random.random()),
    "an integer": lambda loss: loss * random.randint(1, 5),
    "in between": lambda loss: (loss * random.random()).sin() * random.random(),
}


class Net(nn.Module):
    def __init__(self, end: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.end = nn.Linear(8, 8), end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.body(x).square().mean())


@pytest.mark.parametrize("name", CASES)
def test_type_and_bits_are_eagers(name: str) -> None:
    found = []
    for wrap in (False, True):
        torch.manual_seed(0)
        random.seed(0)
        own.seed(3)
        model, records = Net(CASES[name]), []
        call = lowtide.wrap(model, budget="1TiB", costs="analytic") if wrap else model
        for step in range(3):
            loss = call(torch.ones(4, 8) * step + 0.3)
            loss.backward()
            records.append(
                (loss.dtype, loss.item(), model.body.weight.grad.tolist(), random.getstate(), own.getstate())
            )
            model.zero_grad()
        found.append(records)
    assert found[0] == found[1]
