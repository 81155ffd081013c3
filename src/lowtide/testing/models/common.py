"""What all test models share: their return types, seeding, fresh batches, and attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Output = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
Case = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run the block with the random state of `seed`, then restore the caller's."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def loss_of(output: Any) -> Tensor:
    """Return the loss in what a model returned: the value itself, its `loss`, or its first entry."""
    if isinstance(output, Tensor):
        return output
    loss: Tensor | None = output["loss"] if isinstance(output, dict) else getattr(output, "loss", None)
    if loss is not None:
        return loss
    first: Tensor = output[0]
    return first


def new_batch(value: Any, seed: int) -> Any:
    """Return `value` with every tensor in it replaced by a random one of the same shape, dtype and range.

    Floating-point tensors are drawn from a normal distribution. Integer and boolean tensors are shuffled, which keeps
    labels and token ids valid.
    """
    generator = torch.Generator().manual_seed(seed)
    return _replaced(value, generator)


def _replaced(value: Any, generator: torch.Generator) -> Any:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            return torch.randn(value.shape, generator=generator, dtype=value.dtype)
        order = torch.randperm(value.numel(), generator=generator)
        return value.flatten()[order].reshape(value.shape)
    if isinstance(value, dict):
        return {key: _replaced(entry, generator) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_replaced(entry, generator) for entry in value)
    return value


class Attention(nn.Module):
    """Multi-head attention of `x` over `memory` (itself when None), with dropout on weights and output."""

    def __init__(self, dim: int, heads: int, dropout: float = 0.0, causal: bool = False) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"dim {dim} is not a multiple of heads {heads}.")
        self.heads, self.dropout, self.causal = heads, dropout, causal
        self.query = nn.Linear(dim, dim)
        self.key_value = nn.Linear(dim, 2 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor, memory: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Return the attended values; `mask` is true where attention is allowed."""
        query = self._split(self.query(x))
        key, value = (self._split(part) for part in self.key_value(x if memory is None else memory).chunk(2, -1))
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, mask, dropout, is_causal=self.causal)
        merged = self.out(mixed.transpose(1, 2).flatten(2))
        return F.dropout(merged, self.dropout, self.training)

    def _split(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (self.heads, -1))  # type: ignore[no-untyped-call]
        return heads.transpose(1, 2)


class FeedForward(nn.Sequential):
    """The two-layer perceptron of a transformer block."""

    def __init__(self, dim: int, dropout: float = 0.0) -> None:
        super().__init__(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim), nn.Dropout(dropout))


class ConvNorm(nn.Sequential):
    """Convolution without bias, batch normalisation, and ReLU unless `relu` is false."""

    def __init__(self, fan_in: int, fan_out: int, kernel: int, stride: int = 1, relu: bool = True) -> None:
        layers: list[nn.Module] = [
            nn.Conv2d(fan_in, fan_out, kernel, stride, padding=kernel // 2, bias=False),
            nn.BatchNorm2d(fan_out),
        ]
        super().__init__(*layers, *([nn.ReLU()] if relu else []))


def images(batch: int, size: int, classes: int) -> tuple[Tensor, Tensor]:
    """Return random RGB images and their labels."""
    return torch.randn(batch, 3, size, size), torch.randint(classes, (batch,))
