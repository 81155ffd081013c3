"""Models that make their parameters in the first call: parameters, statistics and random numbers are eager's."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.errors import CaptureError


class Lazy(nn.Module):
    """Convolves, normalises and projects; draws random numbers behind its last lazy layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.LazyConv2d(4, 3, padding=1), nn.LazyBatchNorm2d(), nn.LazyLinear(8)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.out(self.norm(self.conv(x)).relu().flatten(1))).square().mean()


class Mixed(Lazy):
    """Has a layer with statistics in front."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.first(x)) * float(np.random.rand()) * random.random()


class Unused(Lazy):
    """Has a lazy layer that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.LazyLinear(3)


class Between(Lazy):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.drop(x))


def steps(make: Callable[[], nn.Module], *, wrap: bool, verify: bool = False) -> list[object]:
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    model, found = make(), []
    call = lowtide.wrap(model, budget="1TiB", costs="analytic", verify=verify) if wrap else model
    for step in range(3):
        x = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(step))
        loss = call(x)
        loss.backward()
        made = [each for each in model.parameters() if not isinstance(each, nn.UninitializedParameter)]
        found += [loss.detach(), *[each.grad for each in made], *copy.deepcopy(list(model.buffers()))]
        found += [torch.get_rng_state(), torch.tensor(random.random()), torch.tensor(np.random.rand())]
        model.zero_grad()
    return found


@pytest.mark.filterwarnings("ignore::lowtide.errors.LowtideWarning")
@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("make", [Lazy, Mixed, Unused, lambda: nn.Sequential(nn.LazyConv2d(2, 3), Mean())])
def test_lazy_models_are_eagers(make: Callable[[], nn.Module], verify: bool) -> None:
    expected, found = steps(make, wrap=False), steps(make, wrap=True, verify=verify)
    assert len(expected) == len(found)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x.flatten(1), 0.2).square().mean()


def test_random_numbers_between_are_refused_with_a_way_out() -> None:
    torch.manual_seed(0)
    model = lowtide.wrap(Between(), budget="1TiB", costs="analytic")
    x, before = torch.randn(4, 3, 6, 6), torch.get_rng_state()
    with pytest.raises(CaptureError, match=r"'conv' makes its parameters .*torch.no_grad"):
        model(x)
    assert torch.equal(torch.get_rng_state(), before)
    with torch.no_grad():
        model(x)
    model(x).backward()
    assert lowtide.plans(model)
