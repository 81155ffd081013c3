"""A model of the shape of LLaMA 70B, to be made on the meta device."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LAYERS, DIM, HEADS, KEY_HEADS, HIDDEN, WORDS, TOKENS = 80, 8192, 64, 8, 28672, 128256, 4096


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.size = DIM // HEADS
        self.before, self.between = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.queries, self.mix = (nn.Linear(DIM, DIM, bias=False) for _ in range(2))
        self.keys, self.values = (nn.Linear(DIM, KEY_HEADS * self.size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(DIM, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.before(x)
        q, k, v = (
            part(h).unflatten(-1, (-1, self.size)).transpose(1, 2) for part in (self.queries, self.keys, self.values)
        )
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.mix(seen.transpose(1, 2).flatten(2))
        h = self.between(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return `x` with its positions, as rotations."""
    one, other = x.chunk(2, -1)
    return x * cos + torch.cat((-other, one), -1) * sin


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, WORDS, bias=False)
        self.register_buffer("cos", torch.zeros(TOKENS, DIM // HEADS))
        self.register_buffer("sin", torch.zeros(TOKENS, DIM // HEADS))

    def forward(self, words: Tensor, following: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), following.flatten())


def llama() -> Llama:
    """Return the model."""
    return Llama()
