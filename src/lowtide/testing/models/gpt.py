"""A decoder-only transformer (Radford et al. 2019): pre-norm, dropout, learned positions, optional tied embedding."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowtide.testing.models.common import Attention, Case, FeedForward, seeded


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm and beside a residual."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, dropout, causal=True)
        self.mlp = FeedForward(dim, dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` after the block."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A language model that returns its own loss."""

    def __init__(self, vocab: int, tokens: int, layers: int, dim: int, heads: int, dropout: float, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.positions = nn.Parameter(0.02 * torch.randn(tokens, dim))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dim, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy of `targets` given `tokens`."""
        x = self.dropout(self.embedding(tokens) + self.positions)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def gpt(
    *,
    layers: int = 6,
    dim: int = 192,
    heads: int = 6,
    tokens: int = 256,
    batch: int = 4,
    vocab: int = 512,
    dropout: float = 0.1,
    tied: bool = True,
    seed: int = 0,
) -> Case:
    """Return a GPT, and a batch of random tokens and targets."""
    with seeded(seed):
        model = GPT(vocab, tokens, layers, dim, heads, dropout, tied)
        args = torch.randint(vocab, (batch, tokens)), torch.randint(vocab, (batch, tokens))
    return model, args, {}
