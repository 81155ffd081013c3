"""What the tests of chains share: blocks of many kinds, and training a chain beside a plain loop over its blocks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowtide
from helpers.exactness import DropEverything, assert_same, train

BATCH, DIM = 24, 12
PLANNERS: dict[str, Any] = {
    "drop everything": DropEverything(),
    "drop everything again": DropEverything(again=True),
    "rotor": "rotor",
    "revolve": "revolve",
    "chen_sqrt": "chen_sqrt",
    "chen_recursive": "chen_recursive",
    "hong_linear": "hong_linear",
    "greedy": "greedy",
}


class Residual(nn.Module):
    """A residual block with everything that is easy to get wrong: normalisation statistics and dropout."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.dropout(torch.tanh(self.up(self.norm(x))), 0.3, self.training))


class Counting(nn.Module):
    """Reads and changes a buffer in every call, as spectral normalisation does."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.sin(self.linear(x) * (1 + self.calls / 7))


class Pair(nn.Module):
    """Takes and returns two tensors."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.first(b)) * a, a + self.second(b).sigmoid()


class WithExtra(nn.Module):
    """Takes an argument of its own beside the state, and a keyword that all blocks share."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: Tensor, extra: Tensor, *, scale: Tensor | None = None) -> Tensor:
        made = torch.tanh(self.linear(x) + extra * extra)
        return made if scale is None else made * scale + scale


class Loop(nn.Module):
    """The same blocks one after the other, in plain PyTorch."""

    def __init__(self, blocks: list[Callable[..., Any]]) -> None:
        super().__init__()
        self.blocks = blocks
        for number, block in enumerate(blocks):
            if isinstance(block, nn.Module):
                self.add_module(str(number), block)

    def forward(self, *state: Tensor, extras: Any = None, **keywords: Any) -> Any:
        for number, block in enumerate(self.blocks):
            row = () if extras is None else extras[number]
            row = row if isinstance(row, tuple) else () if row is None else (row,)
            result = block(*state, *row, **keywords)
            state = result if isinstance(result, tuple) else (result,)
        return state[0] if len(state) == 1 else state


def assert_chain_exact(
    blocks: list[Any], batches: list[Any], *, planner: Any = None, budget: str = "1TiB", **how: Any
) -> lowtide.Plan:
    """Train a loop over copies of `blocks` and a chain of them; raise on any differing bit. Returns the plan."""
    torch.manual_seed(0)
    plain = Loop(copy.deepcopy(blocks))
    chained = lowtide.chain(blocks, budget=budget, planner=DropEverything() if planner is None else planner)
    assert list(chained.state_dict()) == list(plain.state_dict())
    expected = train(plain, plain, batches, **how)
    found = train(chained, chained, batches, **how)
    assert_same(expected, found)
    assert chained.plans, "nothing was planned"
    return chained.plans[0]


def random_batches(*, needs: bool = True, steps: int = 3, tensors: int = 1) -> list[Any]:
    """Return batches for chains on `tensors` tensors."""
    generator = torch.Generator().manual_seed(5)
    rows = [[torch.randn(BATCH, DIM, generator=generator) for _ in range(tensors)] for _ in range(steps)]
    return [(tuple(tensor.requires_grad_(needs) for tensor in row), {}) for row in rows]
