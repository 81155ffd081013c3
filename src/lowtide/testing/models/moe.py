"""A transformer with a mixture of experts (Lepikhin et al. 2021, GShard): top-k routing with a fixed capacity.

Every expert has room for `capacity` tokens and a token that finds no room is passed by, so all shapes are static. The
routing is a discrete decision: recomputing it differently in backward would give wrong gradients.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowtide.testing.models.common import Attention, Case, seeded


class Experts(nn.Module):
    """Perceptrons, one per expert, each fed the tokens routed to it."""

    def __init__(self, dim: int, experts: int, chosen: int, slack: float) -> None:
        super().__init__()
        self.chosen, self.slack = chosen, slack
        self.router = nn.Linear(dim, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, dim, 2 * dim) / math.sqrt(dim))
        self.down = nn.Parameter(torch.randn(experts, 2 * dim, dim) / math.sqrt(2 * dim))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mixed outputs for `x` of shape (tokens, dim), and the load-balancing loss."""
        scores = self.router(x).softmax(-1)
        combine, first = self._assign(scores)
        routed = torch.einsum("tec,td->ecd", (combine > 0).to(x.dtype), x)
        out = torch.bmm(F.silu(torch.bmm(routed, self.up)), self.down)
        balance = (scores.mean(0) * first.mean(0)).sum() * scores.shape[1]
        return torch.einsum("tec,ecd->td", combine, out), balance

    def _assign(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weight of each token in each expert's slots, and each token's first choice."""
        tokens, experts = scores.shape
        capacity = int(self.slack * self.chosen * tokens / experts)
        weights, index = scores.topk(self.chosen, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        choice = F.one_hot(index, experts)
        # Slots are given out by rank first, so that no second choice displaces a first one.
        by_rank = choice.transpose(0, 1).flatten(0, 1)
        slot = ((by_rank.cumsum(0) - 1) * by_rank).sum(-1).unflatten(0, (self.chosen, tokens)).T
        room = F.one_hot(slot.clamp(max=capacity), capacity + 1)[..., :capacity]
        combine = torch.einsum("tk,tke,tkc->tec", weights, choice.to(weights.dtype), room.to(weights.dtype))
        return combine, choice[:, 0].to(weights.dtype)


class Block(nn.Module):
    """Causal attention, then experts, each beside a residual."""

    def __init__(self, dim: int, heads: int, experts: int, chosen: int, slack: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, causal=True)
        self.experts = Experts(dim, experts, chosen, slack)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return `x` after the block, and the load-balancing loss."""
        x = x + self.attention(self.norm1(x))
        mixed, balance = self.experts(self.norm2(x).flatten(0, 1))
        return x + mixed.view_as(x), balance


class MoE(nn.Module):
    """A sparse language model that returns its own loss."""

    def __init__(self, vocab: int, layers: int, dim: int, heads: int, experts: int, chosen: int, slack: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, experts, chosen, slack) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy of `targets` plus the load-balancing losses."""
        x = self.embedding(tokens)
        extra = x.new_zeros(())
        for block in self.blocks:
            x, balance = block(x)
            extra = extra + balance
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten()) + 0.01 * extra


def moe(
    *,
    layers: int = 4,
    dim: int = 128,
    heads: int = 4,
    tokens: int = 128,
    batch: int = 8,
    vocab: int = 512,
    experts: int = 4,
    chosen: int = 2,
    slack: float = 1.25,
    seed: int = 0,
) -> Case:
    """Return a mixture-of-experts transformer, and a batch of random tokens and targets."""
    with seeded(seed):
        model = MoE(vocab, layers, dim, heads, experts, chosen, slack)
        args = torch.randint(vocab, (batch, tokens)), torch.randint(vocab, (batch, tokens))
    return model, args, {}
