"""How much work the first call of a model in many graphs makes: counted in traces, compilations and menus."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.runtime import backend, model_plans, opaque_modules
from lowtide.runtime.wrapped import wrapped_of

DIM = 16
traces: Counter[str] = Counter()


@torch.compiler.assume_constant_result
def traced(what: str) -> int:
    """Count a trace: the compiler calls this while it traces, and puts the result into the graph."""
    traces[what] += 1
    return 0


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count calls of the compiler, of the search for menus, and decisions on layers."""
    found: Counter[str] = Counter()

    def counting(module: Any, name: str) -> None:
        plain = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            found[name] += 1
            return plain(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    counting(backend, "compile_step")
    counting(model_plans, "make_menu")
    counting(opaque_modules, "is_capturable")
    traces.clear()
    yield found
    traces.clear()


class Layer(nn.Module):
    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Experts(nn.Module):
    """Sends every row to one expert: sizes depend on data."""

    def __init__(self, number: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, number)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(number))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        total = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(-1)
            if rows.numel():
                total = total.index_add(0, rows, expert(x[rows]).relu() * weights[rows, None])
        return x + total


class Halves(nn.Module):
    """Two halves with a value read in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x) + traced("first half")
        scale = 0.5 if hidden.abs().mean().item() > 100 else 1.0
        return self.second(hidden) * scale


class Around(nn.Module):
    """A module that calls another one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 1.0


class Stacks(nn.Module):
    """Three lists of layers, of which the last one cannot be captured, behind something expensive to trace."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(Layer() for _ in range(2))
        self.second = nn.Sequential(*(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(2)))
        self.third = nn.ModuleList(Experts() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x + traced("stacks")
        for layer in self.first:
            x = layer(x)
        x = self.second(x)
        for layer in self.third:
            x = layer(x)
        return x


def rows(seed: int = 0, number: int = 256) -> Tensor:
    return torch.randn(number, DIM, generator=torch.Generator().manual_seed(seed))


def step(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    """Return the loss and the gradients of one training step, and take it."""
    loss = model(x).square().mean()
    loss.backward()
    found = [loss.detach(), *(None if each.grad is None else each.grad.clone() for each in model.parameters())]
    with torch.no_grad():
        for each in model.parameters():
            if each.grad is not None:
                each -= 0.3 * each.grad
            each.grad = None
    return found


def assert_same(one: list[Tensor | None], other: list[Tensor | None]) -> None:
    for left, right in zip(one, other, strict=True):
        assert (left is None) == (right is None)
        assert left is None or (right is not None and torch.equal(left, right))


def around(depth: int) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = Halves()
    for _ in range(depth):
        model = Around(model)
    return model


def test_functions_around_a_break_are_not_traced_again(counts: Counter[str]) -> None:
    found = []
    for depth in (1, 6):
        torch._dynamo.reset()
        plain = around(depth)
        model = lowtide.wrap(copy.deepcopy(plain), budget="90%")
        traces.clear()
        assert_same(step(plain, rows()), step(model, rows()))
        # The plain step has counted once.
        found.append(traces["first half"] - 1)
    assert found[0] == found[1] > 0


def stacks() -> nn.Module:
    torch.manual_seed(1)
    return Stacks()


def test_all_lists_of_layers_are_decided_on_in_one_call(counts: Counter[str]) -> None:
    plain = stacks()
    model = lowtide.wrap(copy.deepcopy(plain), budget="95%")
    traces.clear()
    assert_same(step(plain, rows()), step(model, rows()))
    assert counts["is_capturable"] == 3
    # What runs in eager mode is not priced for other gradients than come.
    opaque = [block.name for block in wrapped_of(model).session.step.blocks if block.price_for is None]
    assert opaque == [f"third.{number}" for number in range(4)]
    # Plainly; until the break is found; to decide; and twice with what was decided, up to the break and once more.
    assert traces["stacks"] <= 6


def test_a_routing_that_changes_compiles_nothing_again(counts: Counter[str]) -> None:
    plain = stacks()
    model = lowtide.wrap(copy.deepcopy(plain), budget="95%")
    assert_same(step(plain, rows(0)), step(model, rows(0)))
    compiled, budget = counts["compile_step"], wrapped_of(model).session.step.budget_bytes
    for seed in range(1, 7):
        x = rows(seed) + 0.5 * seed
        assert_same(step(plain, x), step(model, x))
        peak = lowtide.measure_peak(lambda x=x: model(x).square().mean().backward())
        assert peak <= budget
        model.zero_grad()
    assert counts["compile_step"] == compiled > 0


class Broken(nn.Module):
    """Equal layers with a break behind each."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(number))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            torch._dynamo.graph_break()
        return x


def test_thirty_equal_graphs_are_planned_like_three(counts: Counter[str]) -> None:
    found = []
    for number in (3, 30):
        torch._dynamo.reset()
        torch.manual_seed(2)
        plain = Broken(number)
        model = lowtide.wrap(copy.deepcopy(plain), budget="80%", costs="analytic")
        counts.clear()
        assert_same(step(plain, rows()), step(model, rows()))
        assert len(wrapped_of(model).session.step.plan().choice) == number
        found.append(counts["make_menu"])
    assert found[0] == found[1]
