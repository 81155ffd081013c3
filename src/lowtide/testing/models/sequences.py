"""Models of sequences: a GPT, an encoder-decoder, a mixture of experts, an unrolled LSTM."""

from __future__ import annotations

import math

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
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


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


class EncoderLayer(nn.Module):
    """Self-attention and a perceptron."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.attention = Attention(dim, heads, dropout)
        self.mlp = FeedForward(dim, dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Return `x` after the layer; `mask` is true where attention is allowed."""
        x = x + self.attention(self.norms[0](x), mask=mask)
        out: Tensor = x + self.mlp(self.norms[1](x))
        return out


class DecoderLayer(nn.Module):
    """Causal self-attention, attention over the encoder's output, and a perceptron."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(3))
        self.attention = Attention(dim, heads, dropout, causal=True)
        self.cross = Attention(dim, heads, dropout)
        self.mlp = FeedForward(dim, dropout)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None) -> Tensor:
        """Return `x` after the layer; `mask` is true where `memory` may be attended to."""
        x = x + self.attention(self.norms[0](x))
        x = x + self.cross(self.norms[1](x), memory, mask)
        out: Tensor = x + self.mlp(self.norms[2](x))
        return out


class EncoderDecoder(nn.Module):
    """A translation model that returns its loss and its logits."""

    def __init__(self, vocab: int, tokens: int, layers: int, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.positions = nn.Parameter(0.02 * torch.randn(tokens, dim))
        self.encoder = nn.ModuleList(EncoderLayer(dim, heads, dropout) for _ in range(layers))
        self.decoder = nn.ModuleList(DecoderLayer(dim, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab)

    def forward(
        self, source: Tensor, target: Tensor, *, labels: Tensor, source_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the mean cross entropy of `labels`, and the logits; `source_mask` is true at real tokens."""
        mask = None if source_mask is None else source_mask[:, None, None, :]
        memory = self.embedding(source) + self.positions
        for layer in self.encoder:
            memory = layer(memory, mask)
        x = self.embedding(target) + self.positions
        for layer in self.decoder:
            x = layer(x, memory, mask)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def encoder_decoder(
    *,
    layers: int = 3,
    dim: int = 128,
    heads: int = 4,
    tokens: int = 192,
    batch: int = 6,
    vocab: int = 512,
    dropout: float = 0.1,
    seed: int = 0,
) -> Case:
    """Return an encoder-decoder transformer, random source and target tokens, labels and a padding mask."""
    with seeded(seed):
        model = EncoderDecoder(vocab, tokens, layers, dim, heads, dropout)
        source, target, labels = torch.randint(vocab, (3, batch, tokens))
        mask = torch.rand(batch, tokens) < 0.9
    return model, (source, target), {"labels": labels, "source_mask": mask}


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
        taken = ((by_rank.cumsum(0) - 1) * by_rank).sum(-1)
        slot: Tensor = taken.unflatten(0, (self.chosen, tokens)).T  # type: ignore[no-untyped-call]
        room = F.one_hot(slot.clamp(max=capacity), capacity + 1)[..., :capacity]
        combine = torch.einsum("tk,tke,tkc->tec", weights, choice.to(weights.dtype), room.to(weights.dtype))
        return combine, choice[:, 0].to(weights.dtype)


class ExpertBlock(nn.Module):
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
        self.blocks = nn.ModuleList(ExpertBlock(dim, heads, experts, chosen, slack) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy of `targets` plus the load-balancing losses."""
        x = self.embedding(tokens)
        extra: Tensor = x.new_zeros(())
        for block in self.blocks:
            x, balance = block(x)
            extra = extra + balance
        loss = F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())
        return loss + 0.01 * extra


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


State = tuple[Tensor, Tensor]


class Cell(nn.Module):
    """One LSTM step, from one linear map of input and hidden state."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gates = nn.Linear(2 * dim, 4 * dim)

    def forward(self, x: Tensor, state: State) -> State:
        """Return the next hidden and cell state."""
        hidden, cell = state
        entry, forget, exit_, candidate = self.gates(torch.cat([x, hidden], -1)).chunk(4, -1)
        cell = forget.sigmoid() * cell + entry.sigmoid() * candidate.tanh()
        return exit_.sigmoid() * cell.tanh(), cell


class LSTM(nn.Module):
    """Stacked cells run token by token, with dropout between layers; returns the loss."""

    def __init__(self, vocab: int, layers: int, dim: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.cells = nn.ModuleList(Cell(dim) for _ in range(layers))
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(dim, vocab)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy of `targets`, given as (batch, time) like `tokens`."""
        embedded = self.embedding(tokens)
        zero = embedded.new_zeros(embedded.shape[0], embedded.shape[2])
        states: list[State] = [(zero, zero)] * len(self.cells)
        tops: list[Tensor] = []
        for x in embedded.unbind(1):
            for index, cell in enumerate(self.cells):
                states[index] = cell(x, states[index])
                x = self.dropout(states[index][0])
            tops.append(x)
        return F.cross_entropy(self.head(torch.stack(tops, 1)).flatten(0, 1), targets.flatten())


def lstm(
    *,
    layers: int = 2,
    dim: int = 256,
    tokens: int = 20,
    batch: int = 96,
    vocab: int = 256,
    dropout: float = 0.2,
    seed: int = 0,
) -> Case:
    """Return an unrolled LSTM, and a batch of random tokens and targets."""
    with seeded(seed):
        args = torch.randint(vocab, (batch, tokens)), torch.randint(vocab, (batch, tokens))
        return LSTM(vocab, layers, dim, dropout), args, {}
