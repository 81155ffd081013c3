"""A child process that plans a LLaMA-like transformer of 70 billion parameters and prints what that took, as JSON.

Usage: plan_large.py <layers> <batch> <memory>; 80 layers are the 70 billion.
"""

from __future__ import annotations

import json
import resource
import sys
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowtide


class Block(nn.Module):
    """Grouped-query attention and a gated perceptron."""

    def __init__(self, dim: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, dim // heads
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.query, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(dim, groups * self.size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        query = self._split(self.query(y), self.heads)
        key, value = self._split(self.key(y), self.groups), self._split(self.value(y), self.groups)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def _split(self, x: Tensor, parts: int) -> Tensor:
        return x.unflatten(2, (parts, self.size)).transpose(1, 2)


class Model(nn.Module):
    def __init__(self, layers: int, dim: int = 8192, vocab: int = 32_000) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim, heads=64, groups=8, hidden=28_672) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def main(layers: int, batch: int, memory: str) -> None:
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = Model(layers)
        tokens = torch.empty(batch, 4096, dtype=torch.int64)
    start = time.perf_counter()
    plan = lowtide.plan(model, (tokens, tokens), memory=memory, optimizer="adam", costs="a100-80gb")
    assert plan.account is not None
    print(
        json.dumps(
            {
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "ops": plan.num_ops,
                "seconds": time.perf_counter() - start,
                "processor_seconds": sum(resource.getrusage(resource.RUSAGE_SELF)[:2]),
                "resident_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
                "baseline_peak_bytes": plan.baseline_peak_bytes,
                "peak_bytes": plan.peak_bytes,
                "budget_bytes": plan.budget_bytes,
                "training_bytes": plan.account.peak_bytes,
                "overhead": plan.overhead,
                "planning_seconds": plan.seconds,
            }
        )
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
