"""An encoder-decoder transformer (Vaswani et al. 2017): every decoder layer reads the encoder's output."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowtide.testing.models.common import Attention, Case, FeedForward, seeded


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
        return x + self.mlp(self.norms[1](x))


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
        return x + self.mlp(self.norms[2](x))


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
