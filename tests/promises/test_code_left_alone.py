"""Functions that the compiler leaves alone as a whole: what runs there counts, or is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from helpers.exactness import STEPS, assert_same, train
from lowtide.errors import CaptureError, InfeasibleBudgetError

pytestmark = pytest.mark.filterwarnings("ignore::lowtide.errors.LowtideWarning")
DIM, BATCH = 64, 128


class Sorted(torch.autograd.Function):
    """Asks for missing gradients as None; the compiler always hands over zeros, for which this raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        values, order = x.sort(1)
        ctx.mark_non_differentiable(order)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(order)
        return values, order

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, none: Tensor | None) -> Tensor:
        if none is not None:
            raise ValueError("indices have no gradient")
        (order,) = ctx.saved_tensors
        return torch.zeros_like(gradient).scatter_(1, order, gradient)


@contextlib.contextmanager
def traced_by_nobody() -> Iterator[None]:
    torch._dynamo.graph_break()
    yield


def mixed(values: Tensor, order: Tensor) -> Tensor:
    """Is captured by itself: all that is, of a model that calls it with what cannot be traced."""
    return values + order.float() * 0.01


def sorted_by_function(h: Tensor) -> Tensor:
    return mixed(*Sorted.apply(h))


def break_in_a_context(h: Tensor) -> Tensor:
    with traced_by_nobody():
        return h.sin()


def break_in_a_handler(h: Tensor) -> Tensor:
    try:
        raise ValueError
    except ValueError:
        torch._dynamo.graph_break()
        return h.cos()


def break_in_a_generator(h: Tensor) -> Tensor:
    def parts() -> Iterator[Tensor]:
        for part in h.chunk(2):
            torch._dynamo.graph_break()
            yield part.exp()

    return torch.cat(list(parts()))


class Net(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.head, self.between = stack(), stack(), between

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.between(self.body(x))).square().mean()


def stack() -> nn.Sequential:
    return nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(DIM, DIM), nn.GELU())])


def made(between: Callable[[Tensor], Tensor]) -> Net:
    torch.manual_seed(0)
    return Net(between)


@pytest.mark.parametrize("between", [sorted_by_function, break_in_a_context, break_in_a_handler, break_in_a_generator])
def test_the_budget_is_kept_or_refused(between: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(BATCH, DIM, generator=torch.Generator().manual_seed(1))

    def step(model: nn.Module) -> int:
        model.zero_grad()
        return lowtide.measure_peak(lambda: model(x).backward())

    budget = int(0.6 * step(made(between)))
    model = lowtide.wrap(made(between), budget=budget)
    try:
        model(x).backward()
    except CaptureError:
        # Nothing at all was captured.
        return
    except InfeasibleBudgetError as error:
        budget = error.least_bytes
        model = lowtide.wrap(made(between), budget=budget)
        model(x).backward()
    assert max(step(model) for _ in range(2)) <= budget
    batches = [((x + k,), {}) for k in range(STEPS)]
    plain, again = made(between), lowtide.wrap(made(between), budget=budget)
    assert_same(train(plain, plain, batches), train(again, again, batches))
