"""Ops whose memory is not known beforehand: the budget is kept all the same, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from helpers.exactness import STEPS, Batch, assert_exact
from lowtide.errors import InfeasibleBudgetError
from lowtide.measure import record_parts

pytestmark = pytest.mark.filterwarnings("ignore::lowtide.errors.LowtideWarning")


def floats(*shape: int) -> list[Batch]:
    return [((torch.randn(*shape, generator=torch.Generator().manual_seed(s)),), {}) for s in range(STEPS)]


def stack(depth: int) -> nn.Sequential:
    return nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(64, 64), nn.Tanh())])


class Choice(nn.Module):
    """Takes one of two branches, one of which needs much more memory."""

    def __init__(self, sign: float) -> None:
        super().__init__()
        self.body, self.head, self.sign = stack(6), nn.Linear(64, 64), sign

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(x)
        h = torch.cond(self.sign + 0 * h.sum() > 0, self.wide, self.narrow, (h,))
        return torch.tanh(self.head(h)).square().mean()

    def wide(self, h: torch.Tensor) -> torch.Tensor:
        return torch.cat([h, h, h, h], dim=1).sin().view(-1, 4, 64).sum(1).cos()

    def narrow(self, h: torch.Tensor) -> torch.Tensor:
        return h.cos()


class Scanned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = stack(6), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch._higher_order_ops.scan import scan

        h = self.body(x)
        _, h = scan(lambda c, x: (c + x.sin(), (c * x).exp()), torch.zeros(64), h, dim=0)
        return torch.tanh(self.head(h)).square().mean()


def measured(model: nn.Module, x: torch.Tensor) -> int:
    model.zero_grad()
    return lowtide.measure_peak(lambda: model(x).backward())


MODELS = {"wide": lambda: Choice(1.0), "narrow": lambda: Choice(-1.0), "scan": Scanned}


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("wide", 0.9),
        ("narrow", 1.0),
        ("scan", 0.9),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("wide", 1.0), ("narrow", 0.9), ("scan", 1.0))),
    ],
)
def test_ops_that_run_graphs_keep_the_budget(name: str, share: float) -> None:
    make, x = MODELS[name], torch.randn(64, 64)
    least = lowtide.plan(make(), (x,), budget="100%").baseline_peak_bytes
    model = lowtide.wrap(make(), budget=int(share * least))
    model(x).backward()
    assert measured(model, x) <= int(share * least)
    predicted = lowtide.plans(model)[-1].peak_bytes
    assert measured(model, x) <= predicted


def test_two_graphs_of_one_shape_are_told_apart() -> None:
    from lowtide.costs.op_signature import graph_digest

    one, other = torch.fx.symbolic_trace(lambda x: x.sin()), torch.fx.symbolic_trace(lambda x: x.cos())
    assert graph_digest(one) == graph_digest(torch.fx.symbolic_trace(lambda x: x.sin()))
    assert graph_digest(one) != graph_digest(other)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_ops_that_run_graphs_are_exact(sign: float) -> None:
    assert_exact(Choice(sign), floats(16, 64))


copies = {"number": 1}


@torch.library.custom_op("lowtide_tests::hungry", mutates_args=())
def hungry(x: torch.Tensor) -> torch.Tensor:
    """Needs more memory on some data than on other."""
    number = copies["number"] if x.min() < 0 else 1
    return torch.cat([x] * (1 + number))[: len(x)].sin()


@hungry.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


hungry.register_autograd(
    lambda ctx, gradient: gradient * ctx.saved_tensors[0].cos(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


class Hungry(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = stack(12), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.head(hungry(self.body(x)))).square().mean()


@pytest.mark.parametrize("costs", ["measured", "analytic"])
def test_a_hungry_op_is_planned_again(costs: str) -> None:
    copies["number"] = 9
    x = torch.randn(512, 64)
    budget = int(0.9 * lowtide.plan(Hungry(), (x,), budget="100%", costs=costs).baseline_peak_bytes)
    model = lowtide.wrap(Hungry(), budget=budget, costs=costs)
    model(x).backward()
    first = lowtide.plans(model)[-1]
    for _ in range(3):
        model.zero_grad()
        model(x).backward()
    assert measured(model, x) <= budget
    assert lowtide.plans(model)[-1].problem.costs.workspace_bytes != first.problem.costs.workspace_bytes


def test_an_op_that_turns_hungry_later() -> None:
    copies["number"] = 1
    x = torch.randn(512, 64)
    budget = int(0.9 * lowtide.plan(Hungry(), (x,), budget="100%").baseline_peak_bytes)
    model = lowtide.wrap(Hungry(), budget=budget)
    for _ in range(3):
        model.zero_grad()
        model(x).backward()
    copies["number"] = 9
    for _ in range(3):
        model.zero_grad()
        model(x).backward()
    assert measured(model, x) <= budget


def test_an_op_that_is_too_hungry_is_refused() -> None:
    copies["number"] = 60
    x = torch.randn(512, 64)
    model = lowtide.wrap(Hungry(), budget="60%")
    model(x).backward()
    with pytest.raises(InfeasibleBudgetError, match="hungry"):
        model(x)
    copies["number"] = 1


@pytest.mark.parametrize("extra", [60_000, 10_000_000])
def test_a_step_that_needs_more_for_no_known_reason(extra: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the prediction misses is kept free from the second step on, or the budget is refused."""
    from lowtide.measure import Recording
    from lowtide.runtime import peak_watch as watch

    honest = watch.record_parts

    def hungrier(run: Any, labels: Any) -> tuple[Any, Recording]:
        result, recording = honest(run, labels)
        return result, Recording(recording.peak_bytes + extra, recording.inside_bytes)

    monkeypatch.setattr(watch, "record_parts", hungrier)
    net, x = nn.Sequential(stack(12), nn.Linear(64, 1)), torch.randn(256, 64)
    budget = int(0.7 * lowtide.plan(net, (x,), budget="100%").baseline_peak_bytes)
    model = lowtide.wrap(net, budget=budget)
    model(x).sum().backward()
    first = lowtide.plans(model)[-1]
    if extra > budget:
        with pytest.raises(InfeasibleBudgetError):
            model(x)
        return
    for _ in range(3):
        model(x).sum().backward()
    second = lowtide.plans(model)[-1]
    assert first not in lowtide.plans(model)
    assert second.peak_bytes <= budget
    missed = max(0, first.peak_bytes + extra - budget)
    assert second.problem.price(first.schedule).peak_bytes > budget
    assert max(second.problem.costs.workspace_bytes) >= missed


def test_parts_of_a_recording() -> None:
    from lowtide.lower.emit_graphs import run_labelled

    def work() -> torch.Tensor:
        kept = run_labelled("one", lambda: torch.cat([torch.ones(100)] * 8)[:100].clone())
        return run_labelled("two", lambda: kept.neg())

    result, recording = record_parts(work, ["one", "two", "never"])
    assert result.sum() == -100
    assert recording.inside_bytes == {"one": 3200, "two": 0, "never": 0}
    assert recording.peak_bytes == 3600


class ChannelsLast(nn.Module):
    """Makes weight gradients in another layout than the weights have."""

    def __init__(self, *, transposed: bool = False, frozen: bool = False) -> None:
        super().__init__()
        convolution = nn.ConvTranspose2d if transposed else nn.Conv2d
        self.first, self.last = convolution(16, 64, 3, padding=1), convolution(64, 64, 3, padding=1)
        self.last.weight.requires_grad_(not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(memory_format=torch.channels_last)
        return self.last(self.first(x).relu()).sin().mean()


@pytest.mark.parametrize("options", [{}, {"transposed": True}, {"frozen": True}], ids=str)
def test_gradients_in_another_layout_are_planned(options: dict[str, bool]) -> None:
    model = assert_exact(ChannelsLast(**options), floats(1, 16, 4, 4), wrap={"planner": "greedy", "costs": "measured"})
    x = torch.randn(1, 16, 4, 4)
    predicted = lowtide.plans(model)[-1].peak_bytes
    assert measured(model, x) <= predicted
    assert model.first.weight.grad.stride() == model.first.weight.stride()


def test_gradients_of_parameters_in_another_layout() -> None:
    model = ChannelsLast().to(memory_format=torch.channels_last)
    model.first.bias = nn.Parameter(torch.zeros(128)[::2])
    assert_exact(model, floats(1, 16, 4, 4))
    assert_exact(ChannelsLast(), floats(1, 16, 4, 4), zero_every=2)


def test_both_ways_of_calling_a_model_are_planned_again() -> None:
    copies["number"] = 1
    x = torch.randn(512, 64)
    budget = int(0.9 * lowtide.plan(Hungry(), (x,), budget="100%").baseline_peak_bytes)
    model = lowtide.wrap(Hungry(), budget=budget)
    for call in (model, model.forward):
        call(x).backward()
        model.zero_grad()
    copies["number"] = 9
    for call in (model, model.forward) * 3:
        call(x).backward()
        model.zero_grad()
    try:
        for call in (model, model.forward):
            assert lowtide.measure_peak(lambda call=call: call(x).backward()) <= budget
            model.zero_grad()
    finally:
        copies["number"] = 1
