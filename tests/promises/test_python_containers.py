"""Containers in Python that the compiler models by classes of its own: they do what Python's do."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from helpers.exactness import assert_exact

pytestmark = pytest.mark.filterwarnings("ignore::lowtide.errors.LowtideWarning")


class Window(nn.Module):
    """A model whose loss depends on a queue of limited length."""

    def __init__(self, fill: str, length: int | None) -> None:
        super().__init__()
        self.lin, self.fill = nn.Linear(8, 8), fill
        self.queue: collections.deque[Any] = collections.deque([0.5], maxlen=length)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.lin(x))
        mean = h.detach().mean()
        if self.fill in ("append", "appendleft"):
            getattr(self.queue, self.fill)(mean)
        elif self.fill == "+=":
            self.queue += [mean, 2.0, mean]
        else:
            getattr(self.queue, self.fill)([mean, 2.0, mean])
        return h.square().mean() * (sum(self.queue) + 3 * self.queue[0] + len(self.queue))


@pytest.mark.parametrize("length", [None, 1, 2, 4])
@pytest.mark.parametrize("fill", ["append", "appendleft", "extend", "extendleft", "+="])
def test_queues_forget_what_is_too_old(fill: str, length: int | None) -> None:
    generator = torch.Generator().manual_seed(7)
    batches: list[Any] = [((torch.randn(4, 8, generator=generator),), {}) for _ in range(5)]
    assert_exact(Window(fill, length), batches)


def test_a_queue_that_is_replaced_by_a_longer_one() -> None:
    losses = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        model = Window("append", 2)
        if wrapped:
            lowtide.wrap(model, budget="1TiB", costs="analytic", planner="greedy")
        for length in (2, 3, 2):
            model.queue = collections.deque([0.5, 0.25], maxlen=length)
            losses.append(model(torch.ones(4, 8)).detach())
    assert losses[:3] == losses[3:]
    assert losses[0] != losses[1]
