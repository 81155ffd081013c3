"""A child process that builds a model, trains it for three steps under a saved plan, and prints the measured peak.

Usage: train_within.py <model> <batch> <optimizer> <plan file>; the peak is that of everything, from an empty process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import lowtide
from lowtide.testing.models import loss_of
from lowtide.testing.models.convolutions import UNet
from lowtide.testing.models.sequences import GPT

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
}


def perceptron() -> nn.Module:
    layers = [layer for _ in range(6) for layer in (nn.Linear(96, 96), nn.GELU(), nn.Dropout(0.1))]
    return nn.Sequential(*layers, nn.Linear(96, 1), nn.Flatten(0), nn.Softplus())


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Any, ...]]]] = {
    "perceptron": (perceptron, lambda size: (torch.randn(size, 96),)),
    "gpt": (
        lambda: GPT(vocab=64, tokens=48, layers=2, dim=48, heads=2, dropout=0.1, tied=True),
        lambda size: (torch.randint(64, (size, 48)), torch.randint(64, (size, 48))),
    ),
    "unet": (
        lambda: UNet(levels=3, width=4, classes=3),
        lambda size: (torch.randn(size, 3, 32, 32), torch.randint(3, (size, 32, 32))),
    ),
}


def train(name: str, batch: int, optimizer: str, path: str) -> None:
    make_model, make_batch = MODELS[name]
    model = lowtide.wrap(make_model(), plan=path)
    updates = OPTIMIZERS[optimizer](model.parameters())
    for _ in range(3):
        # As in any training loop, the batch is there until the next one.
        args = make_batch(batch)
        output = loss_of(model(*args))
        (output if output.dim() == 0 else output.sum()).backward()
        updates.step()
        updates.zero_grad()


if __name__ == "__main__":
    name, batch, optimizer, path = sys.argv[1:]
    print(lowtide.measure_peak(lambda: train(name, int(batch), optimizer, path), "cpu"))
