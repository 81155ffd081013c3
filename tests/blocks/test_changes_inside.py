"""What blocks of a chain do while they run: gradients of their own, other kernels, state in unusual places."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import checkpoint

import lowtide
from helpers.chain_cases import BATCH, DIM, Loop
from helpers.exactness import DropEverything
from lowtide import errors

DROP = DropEverything(again=True)
VARIABLE: ContextVar[int] = ContextVar("VARIABLE", default=0)


class Block(nn.Module):
    """A layer, and something that goes on inside."""

    def __init__(self, inside: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.inside = nn.Linear(DIM, DIM), inside

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.inside(self, x)


class Attention(nn.Module):
    """Attention with a learned bias, for which PyTorch takes another kernel if it needs a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.bias = nn.Linear(DIM, 3 * DIM), nn.Parameter(torch.randn(1, 2, BATCH, BATCH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x).view(BATCH, 3, 2, DIM // 2).permute(1, 2, 0, 3)[:, None]
        made = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias * 1.0)
        return x + made.transpose(1, 2).reshape(BATCH, DIM)


class Products(nn.Module):
    """Products of which PyTorch folds some only if they need a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), nn.Parameter(torch.randn(DIM, DIM) / 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.first(x).view(4, -1, DIM)
        return torch.tanh(torch.matmul(rows, (self.second * 1.0).tanh())).view(-1, DIM)


class Frozen(nn.Module):
    """Layers without gradients, which plain training runs with gradients on."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(DIM, DIM).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x[None])[0][0]


def outcome(model: nn.Module, steps: int = 3) -> list[Any]:
    found = []
    for step in range(steps):
        x = torch.randn(BATCH, DIM, generator=torch.Generator().manual_seed(step)).requires_grad_()
        loss = model(x).square().mean()
        loss.backward()
        grads = [None if p.grad is None else p.grad.tolist() for p in model.parameters()]
        found.append([loss.item(), x.grad.tolist(), grads, torch.get_rng_state().tolist()])
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
    return found


def assert_alike(make: Callable[[], list[Any]], seen: Callable[[], Any] = lambda: None) -> None:
    results = []
    for chained in (False, True):
        torch.manual_seed(0)
        blocks = make()
        model = lowtide.chain(blocks, budget="1TiB", planner=DROP) if chained else Loop(blocks)
        results.append((outcome(model), repr(seen())))
    assert results[0] == results[1]


@pytest.mark.parametrize("kind", [Attention, Products, Frozen])
def test_kernels_that_depend_on_gradients(kind: type[nn.Module]) -> None:
    assert_alike(lambda: [kind(), kind(), nn.Linear(DIM, DIM), kind(), nn.Linear(DIM, DIM)])


def _own_gradient(block: nn.Module, x: Tensor) -> Tensor:
    given = x.detach().requires_grad_()
    with torch.enable_grad():
        energy = block.linear(given).pow(3).sum()
    return torch.autograd.grad(energy, given)[0]


def _own_graph(block: nn.Module, x: Tensor) -> Tensor:
    (made,) = torch.autograd.grad(x.sin().sum(), x, create_graph=True) if x.requires_grad else (x,)
    return made


def _mode(block: nn.Module, x: Tensor) -> float:
    return 2.0 if torch.is_grad_enabled() and x.requires_grad else 1.0


def _variable(block: nn.Module, x: Tensor) -> float:
    VARIABLE.set(VARIABLE.get() + 1)
    return VARIABLE.get() / 7


class Scale(torch.autograd.Function):
    """Counts its calls in the class."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Scale.calls += 1
        ctx.scale = Scale.calls / 5
        return x * ctx.scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.scale


def _function(block: nn.Module, x: Tensor) -> Tensor:
    return Scale.apply(x)


def _checkpointed(block: nn.Module, x: Tensor) -> Tensor:
    def inner(given: Tensor) -> Tensor:
        block.runs = getattr(block, "runs", 0) + 1
        return F.dropout(block.linear(given).sin(), 0.3) * block.runs

    return checkpoint(inner, x, use_reentrant=False)


INSIDE = [_own_gradient, _own_graph, _mode, _variable, _function, _checkpointed]


@pytest.mark.parametrize("inside", INSIDE)
def test_what_blocks_do_inside(inside: Any) -> None:
    def make() -> list[Any]:
        VARIABLE.set(0)
        Scale.calls = 0
        # The first block has an input that nobody computed, whose gradient is needed all the same.
        return [nn.Linear(DIM, DIM), *(Block(inside) for _ in range(4))]

    assert_alike(make, lambda: (VARIABLE.get(), Scale.calls))


def test_a_block_that_keeps_its_graph_apart() -> None:
    """It goes back through a part of its graph in a run that does not keep its input."""
    make = functools.partial(list, [Block(_own_gradient) for _ in range(6)])
    for planner in ("rotor", "chen_sqrt", "greedy"):
        plain, chained = Loop(make()), lowtide.chain(make(), budget="90%", planner=planner)
        x = torch.randn(BATCH, DIM)
        results = []
        for model in (plain, chained):
            loss = model(x).sum()
            results.append(torch.autograd.grad(loss, list(model.parameters())))
        assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_transforms_inside_a_block_are_refused() -> None:
    def inside(block: nn.Module, x: Tensor) -> Tensor:
        return torch.func.grad(lambda given: given.pow(3).sum())(x)

    chained = lowtide.chain([Block(inside) for _ in range(3)], budget="1TiB", planner=DROP)
    with pytest.raises(errors.InvalidModelError, match=r"Block 0 \(Block\) uses a transform of torch\.func"):
        chained(torch.randn(BATCH, DIM))


def test_hooks_of_all_modules() -> None:
    seen: list[str] = []
    handle = register_module_forward_hook(lambda module, args, result: seen.append(type(module).__name__))
    try:

        def make() -> list[Any]:
            seen.clear()
            return [nn.Linear(DIM, DIM) for _ in range(4)]

        assert_alike(make, lambda: seen.count("Linear"))
    finally:
        handle.remove()


def test_a_block_that_freezes_itself_is_refused() -> None:
    def inside(block: nn.Module, x: Tensor) -> float:
        block.linear.weight.requires_grad_(not block.linear.weight.requires_grad)
        return 1.0

    blocks = [Block(inside) for _ in range(3)]
    chained = lowtide.chain(blocks, budget="1TiB", planner=DROP)
    with pytest.raises(errors.InvalidModelError, match=r"Block 0 \(Block\) changes its parameter 'weight'"):
        chained(torch.randn(BATCH, DIM))
    assert blocks[0].linear.weight.requires_grad


def test_a_block_that_changes_the_sign_of_zeros_is_refused() -> None:
    def inside(block: nn.Module, x: Tensor) -> float:
        block.linear.bias.data.neg_()
        return 1.0

    blocks = [Block(inside) for _ in range(3)]
    nn.init.zeros_(blocks[0].linear.bias)
    chained = lowtide.chain(blocks, budget="1TiB", planner=DROP)
    with pytest.raises(errors.InvalidModelError, match=r"Block 0 \(Block\) changes its parameter 'bias'"):
        chained(torch.randn(BATCH, DIM))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_blocks_are_refused() -> None:
    """Their bits depend on how often they have run, in plain training too."""
    block = torch.jit.script(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()))
    chained = lowtide.chain([block, nn.Linear(DIM, DIM)], budget="1TiB", planner=DROP)
    with pytest.raises(errors.InvalidModelError, match="TorchScript"):
        chained(torch.randn(BATCH, DIM))


def test_compiled_blocks() -> None:
    def make() -> list[Any]:
        layers = [nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(3)]
        return [torch.compile(layer, backend="eager") for layer in layers]

    assert_alike(make)


def test_a_chain_in_a_chain() -> None:
    def make() -> list[Any]:
        def inner() -> nn.Module:
            return lowtide.chain([Block(_function) for _ in range(2)], budget="1TiB", planner=DROP)

        Scale.calls = 0
        return [inner(), nn.Linear(DIM, DIM), inner()]

    assert_alike(make, lambda: Scale.calls)


def test_what_is_stored_is_let_go_with_the_block() -> None:
    """The chain does not hold on to tensors that a block has stored and dropped."""
    import gc
    import weakref

    class Keeps(nn.Linear):
        kept: Any = None

        def forward(self, x: Tensor) -> Tensor:
            self.kept = x.detach() * 2
            return super().forward(x)

    blocks = [Keeps(DIM, DIM) for _ in range(3)]
    chained = lowtide.chain(blocks, budget="1TiB", planner=DROP)
    for _ in range(2):
        chained(torch.randn(BATCH, DIM)).sum().backward()
    references = [weakref.ref(block.kept) for block in blocks]
    for block in blocks:
        block.kept = None
    gc.collect()
    assert [reference() for reference in references] == [None] * 3
