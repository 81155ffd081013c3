"""First calls that lowtide makes again, to find out how much of them fits: Python goes on from where it was."""

from __future__ import annotations

import collections
import contextvars
import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lowtide
from helpers.exactness import Record, assert_same, train
from lowtide.errors import CaptureError, InfeasibleBudgetError
from lowtide.runtime.wrapped import Wrapped

pytestmark = pytest.mark.filterwarnings("ignore::lowtide.errors.LowtideWarning")

SCALE = contextvars.ContextVar("scale", default=1)
calls = {"number": 0}
# The first of two graphs does not fit by itself, and the whole call does.
BEGUN_AGAIN = {"budget": "75%", "planner": "greedy", "costs": "analytic"}
REFUSED = BEGUN_AGAIN | {"budget": "50%"}


class Holder:
    """An object of the user's."""

    number = 0
    of_class = 0

    def __init__(self) -> None:
        self.seen = [0]


class Model(nn.Module):
    """A model that is captured in two graphs; `count` returns what the result is scaled by."""

    def __init__(self, count: Callable[[Model, Tensor], float | Tensor]) -> None:
        super().__init__()
        layers = [layer for _ in range(2) for layer in (nn.Linear(16, 16), nn.GELU())]
        self.net, self.count = nn.Sequential(*layers), count
        self.holder, self.queue, self.marks = Holder(), collections.deque([1.0], maxlen=3), {1.0}
        if count is in_an_iterator:
            self.steps = itertools.count(1)
        self.state = torch.ones(16)
        self.generator = torch.Generator().manual_seed(3)
        self.numpy = np.random.default_rng(5)
        self.python = random.Random(4)

    def forward(self, x: Tensor, extra: Tensor) -> Tensor:
        x = self.net(x)
        scale = self.count(self, extra)
        torch._dynamo.graph_break()
        return x.square().mean() * scale


def in_an_object(model: Model, extra: Tensor) -> float:
    model.holder.number += 1
    model.holder.seen.append(model.holder.number)
    return sum(model.holder.seen)


def in_a_class(model: Model, extra: Tensor) -> float:
    Holder.of_class += 1
    return Holder.of_class


def in_a_dictionary(model: Model, extra: Tensor) -> float:
    calls["number"] += 1
    return calls["number"]


def in_a_context(model: Model, extra: Tensor) -> float:
    torch._dynamo.graph_break()
    SCALE.set(SCALE.get() + 1)
    return SCALE.get()


def in_a_queue_and_a_set(model: Model, extra: Tensor) -> float:
    torch._dynamo.graph_break()
    model.queue.append(model.queue[-1] * 1.5)
    model.marks.add(model.queue[-1])
    return sum(model.queue) + max(model.marks)


def in_an_attribute_that_is_new(model: Model, extra: Tensor) -> float:
    model.again = getattr(model, "again", 0.0) + 1
    return model.again


def in_a_tensor_that_is_no_buffer(model: Model, extra: Tensor) -> Tensor:
    model.state.mul_(1.5)
    return model.state.sum()


def in_an_iterator(model: Model, extra: Tensor) -> float:
    torch._dynamo.graph_break()
    return next(model.steps)


def in_generators(model: Model, extra: Tensor) -> float:
    torch._dynamo.graph_break()
    return torch.rand((), generator=model.generator).item() + model.numpy.random() + model.python.random()


def in_a_gradient(model: Model, extra: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    bias = model.net[2].bias
    bias.grad = torch.full_like(bias, 0.5) if bias.grad is None else bias.grad + 1
    return bias.grad.sum()


RESTORED = [
    in_an_object,
    in_a_class,
    in_a_dictionary,
    in_a_context,
    in_a_queue_and_a_set,
    in_an_attribute_that_is_new,
    in_a_tensor_that_is_no_buffer,
    in_generators,
    in_a_gradient,
]


def batches() -> list[Any]:
    seeds = map(torch.Generator().manual_seed, range(2))
    return [((torch.randn(1024, 16, generator=seed), torch.ones(3)), {}) for seed in seeds]


def fresh_model(count: Callable[..., Any]) -> Model:
    calls["number"], Holder.of_class = 0, 0
    SCALE.set(1)
    torch.manual_seed(0)
    return Model(count)


def run(count: Callable[..., Any], options: dict[str, Any] | None, *, as_function: bool = False) -> list[Record]:
    model = fresh_model(count)
    call: Callable[..., Any] = (lambda x, extra: model(x, extra)) if as_function else model
    return train(model, call if options is None else lowtide.wrap(call, **options), batches())


@pytest.fixture
def begun_again(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """Return the reasons why calls were made again."""
    reasons, again = [], Wrapped._train_or_refuse

    def noting(wrapped: Wrapped, refused: Exception, *call: Any) -> Any:
        reasons.append(refused)
        return again(wrapped, refused, *call)

    monkeypatch.setattr(Wrapped, "_train_or_refuse", noting)
    return reasons


@pytest.mark.parametrize("count", RESTORED, ids=lambda count: count.__name__)
def test_python_goes_on_once(count: Callable[..., Any], begun_again: list[Exception]) -> None:
    expected = run(count, None)
    assert_same(expected, run(count, BEGUN_AGAIN))
    assert any(isinstance(reason, InfeasibleBudgetError) for reason in begun_again)


@pytest.mark.parametrize("count", [in_an_object, in_a_dictionary, in_a_tensor_that_is_no_buffer])
def test_in_functions_too(count: Callable[..., Any], begun_again: list[Exception]) -> None:
    assert_same(run(count, None, as_function=True), run(count, BEGUN_AGAIN, as_function=True))
    assert begun_again


def test_a_call_that_is_refused_leaves_python_as_it_was() -> None:
    model = lowtide.wrap(fresh_model(in_an_object), **REFUSED)
    with pytest.raises(InfeasibleBudgetError):
        model(*batches()[0][0])
    assert (model.holder.number, model.holder.seen) == (0, [0])
    lowtide.wrap(model, **BEGUN_AGAIN)
    assert_same(run(in_an_object, None), train(model, model, batches()))


def test_an_iterator_is_never_asked_twice() -> None:
    model = lowtide.wrap(fresh_model(in_an_iterator), **BEGUN_AGAIN)
    with pytest.raises(InfeasibleBudgetError):
        model(*batches()[0][0])
    assert next(model.steps) == 2
    assert_same(run(in_an_iterator, None), run(in_an_iterator, BEGUN_AGAIN | {"budget": "1TiB"}))


def in_an_input(model: Model, extra: Tensor) -> Tensor:
    extra.mul_(2)
    return extra.sum()


def in_a_parameter(model: Model, extra: Tensor) -> float:
    torch._dynamo.graph_break()
    with torch.no_grad():
        model.net[2].bias.mul_(0.5)
    return 1.0


@pytest.mark.parametrize(("count", "what"), [(in_an_input, "an input"), (in_a_parameter, "a parameter")])
def test_what_cannot_be_put_back_is_not_changed_twice_in_silence(count: Callable[..., Any], what: str) -> None:
    torch.manual_seed(0)
    model = lowtide.wrap(Model(count), **BEGUN_AGAIN)
    with pytest.raises(CaptureError, match=f"changes {what} in place"):
        model(*batches()[0][0])
