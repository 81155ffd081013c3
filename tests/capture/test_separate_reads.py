"""Values that several graphs read: their gradients are added up in eager's order, whichever graph reads them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide
from helpers.exactness import Batch, assert_exact, assert_same, train

pytestmark = pytest.mark.filterwarnings("ignore::lowtide.errors.LowtideWarning")

Part = Callable[["Broken", torch.Tensor], torch.Tensor]


class Broken(nn.Module):
    """Three graphs; the value `h` of the first is read by the second, several times, and by the third."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.part = part
        self.first, self.second, self.third, self.last = (nn.Linear(24, 24) for _ in range(4))
        self.attention = nn.MultiheadAttention(24, 2, dropout=0.1, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.dropout(self.first(x), 0.1)
        torch._dynamo.graph_break()
        y = self.part(self, h)
        torch._dynamo.graph_break()
        return (self.last(y) * h + h).square().mean()


def scaled(model: Broken, h: torch.Tensor) -> torch.Tensor:
    """The norm of language models: the cast of a float is no other tensor, and both readers are behind it."""
    h = h.to(torch.float32)
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)


def projected(model: Broken, h: torch.Tensor) -> torch.Tensor:
    """Keys and values of cross attention."""
    return model.second(h).sigmoid() * model.third(h)


def residual(model: Broken, h: torch.Tensor) -> torch.Tensor:
    return h + F.dropout(model.second(F.layer_norm(h, (24,))), 0.1)


def attended(model: Broken, h: torch.Tensor) -> torch.Tensor:
    """Read three times by one op."""
    return F.scaled_dot_product_attention(h, h, h) + model.second(h)


def multiplied(model: Broken, h: torch.Tensor) -> torch.Tensor:
    return torch.cat([h * h, h @ h.mT @ h], 1).sum(1, keepdim=True) + h.exp() + h.sin()


def by_module(model: Broken, h: torch.Tensor) -> torch.Tensor:
    """The module asks whether query, key and value are one tensor."""
    return model.attention(h, h, h, need_weights=False)[0] + model.third(h)


def normed(model: Broken, h: torch.Tensor) -> torch.Tensor:
    """One function, made of ops of which two read its argument."""
    return F.rms_norm(h, (24,)) * 3


def many_ways(model: Broken, h: torch.Tensor) -> torch.Tensor:
    return F.normalize(h, dim=-1) + F.softsign(F.tanhshrink(h)) + F.rms_norm(h, (24,)) + h.tanh() + F.softsign(input=h)


def viewed(model: Broken, h: torch.Tensor) -> torch.Tensor:
    rows = h.reshape(-1, 24)
    return (rows.tanh() * rows).view_as(h) + h[:, :1] * h.detach() + h.chunk(2, 1)[0].mean() * len(h)


def overwritten(model: Broken, h: torch.Tensor) -> torch.Tensor:
    h = h.clone()
    torch._dynamo.graph_break()
    h.mul_(2)
    return h.sin() * model.second(h) + h


def written_from(model: Broken, h: torch.Tensor) -> torch.Tensor:
    y = model.second(h)
    y += h
    y[:, 0] = h[:, 1]
    return y.mul_(h) + h.sin()


def given_back(model: Broken, h: torch.Tensor) -> torch.Tensor:
    y, z = h.sin() * h.cos() + h.exp(), h.view(-1)
    torch._dynamo.graph_break()
    return y * z.view_as(h) + z.view_as(h).tanh() + h


PARTS: list[Part] = [
    scaled,
    projected,
    residual,
    attended,
    multiplied,
    by_module,
    normed,
    many_ways,
    viewed,
    overwritten,
    written_from,
    given_back,
]


def batches(count: int = 3) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [((torch.randn(4, 6, 24, generator=generator),), {}) for _ in range(count)]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_readers_in_other_graphs_change_no_bit(part: Part) -> None:
    model = assert_exact(Broken(part), batches())
    assert len(lowtide.plans(model)) >= 3


@pytest.mark.parametrize("part", [scaled, projected, attended, normed], ids=lambda part: part.__name__)
def test_the_sum_of_a_graphs_readers_would_be_noticed(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle can fail: with one share for all readers of a graph, the terms are grouped in another way."""
    from lowtide.capture.separate_reads import SeparatedReads
    from lowtide.runtime import backend

    monkeypatch.setattr(backend, "separate_reads", SeparatedReads)
    with pytest.raises(AssertionError, match="differs"):
        assert_exact(Broken(part), batches())


def test_a_graph_that_reads_inside_of_a_checkpoint() -> None:
    """How often such a part reads is not known, so that the graph adds up its shares: as eager, if no other reads."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(24, 24), nn.Linear(24, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.first(x)
            torch._dynamo.graph_break()
            y = checkpoint(lambda h: self.second(h) * h, h, use_reentrant=False)
            return (y * h + h).square().mean()

    assert_exact(Checkpointed(), batches())


def test_a_wrapped_part_with_a_skip_around_it() -> None:
    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.second = nn.Linear(24, 24)

        def forward(self, h: torch.Tensor) -> torch.Tensor:
            return self.second(h).sigmoid() * h.pow(2)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.body = nn.Linear(24, 24), Body()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.first(x)
            return (h + self.body(h)).square().mean()

    plain = Whole()
    planned = copy.deepcopy(plain)
    lowtide.wrap(planned.body, budget="1TiB", costs="analytic")
    assert_same(train(plain, plain, batches()), train(planned, planned, batches()))


def test_hooks_and_kept_gradients_between_graphs() -> None:
    def run(call: Callable[[Any], Any], seen: list[torch.Tensor]) -> None:
        torch.manual_seed(0)
        h = (torch.randn(4, 24, requires_grad=True) * 2).requires_grad_()
        h.register_hook(lambda gradient: seen.append(gradient.clone()))
        h.retain_grad()
        (call(h) + h.sin()).square().mean().backward()
        assert h.grad is not None
        seen.append(h.grad)

    def body(h: torch.Tensor) -> torch.Tensor:
        return h.exp() * h.pow(3) + h

    expected: list[torch.Tensor] = []
    found: list[torch.Tensor] = []
    run(body, expected)
    run(lowtide.wrap(body, budget="1TiB", costs="analytic"), found)
    assert len(expected) == len(found) == 2
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
