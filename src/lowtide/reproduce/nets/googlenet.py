"""GoogLeNet (Szegedy et al. 2015) with local response normalisation and both auxiliary classifiers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowtide.reproduce.nets.layers import Branches

# Channels of 1x1; of 3x3 and of 5x5 with their reductions; of the pooled branch.
_INCEPTIONS = {
    "3a": (192, 64, 96, 128, 16, 32, 32),
    "3b": (256, 128, 128, 192, 32, 96, 64),
    "4a": (480, 192, 96, 208, 16, 48, 64),
    "4b": (512, 160, 112, 224, 24, 64, 64),
    "4c": (512, 128, 128, 256, 24, 64, 64),
    "4d": (512, 112, 144, 288, 32, 64, 64),
    "4e": (528, 256, 160, 320, 32, 128, 128),
    "5a": (832, 256, 160, 320, 32, 128, 128),
    "5b": (832, 384, 192, 384, 48, 128, 128),
}


_WINDOW, _ALPHA, _BETA = 5, 2e-5, 0.75


class _ResponseNorm(torch.autograd.Function):
    """Local response normalisation as one op that keeps its input and the denominator's base for backward.

    Written as a formula, autograd would keep five tensors of its input's size.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return `x` divided by a power of the squares around each channel."""
        base = _window_sum(x * x).mul(_ALPHA).add(1.0)
        ctx.save_for_backward(x, base)
        return x * base.pow(-_BETA)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Return the gradient of `x`."""
        x, base = ctx.saved_tensors
        direct = gradient * base.pow(-_BETA)
        return direct - 2 * _ALPHA * _BETA * x * _window_sum(direct * x / base)


def _window_sum(x: Tensor) -> Tensor:
    """Return the sum over the channels around each channel."""
    padded = F.pad(x.unsqueeze(1), (0, 0, 0, 0, _WINDOW // 2, _WINDOW // 2))
    return F.avg_pool3d(padded, (_WINDOW, 1, 1), stride=1).squeeze(1) * _WINDOW


class ResponseNorm(nn.Module):
    """Local response normalisation over 5 channels."""

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`, normalised."""
        return _ResponseNorm.apply(x)


def _inception(name: str) -> nn.Module:
    fan_in, one, three_in, three, five_in, five, pool = _INCEPTIONS[name]
    branches = Branches([
        nn.Conv2d(fan_in, one, 1),
        nn.Sequential(nn.Conv2d(fan_in, three_in, 1), nn.ReLU(), nn.Conv2d(three_in, three, 3, padding=1)),
        nn.Sequential(nn.Conv2d(fan_in, five_in, 1), nn.ReLU(), nn.Conv2d(five_in, five, 5, padding=2)),
        nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(fan_in, pool, 1)),
    ])  # fmt: skip
    return nn.Sequential(branches, nn.ReLU())


def _classifier(fan_in: int, classes: int) -> nn.Module:
    """Return an auxiliary classifier; at 224x224 it pools its input to 4x4."""
    return nn.Sequential(
        nn.AvgPool2d(5, 3), nn.Conv2d(fan_in, 128, 1), nn.ReLU(), nn.Flatten(),
        nn.Linear(128 * 4 * 4, 1024), nn.ReLU(), nn.Linear(1024, classes),
    )  # fmt: skip


class GoogLeNet(nn.Module):
    """Returns the scores of the main and of the two auxiliary classifiers."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True), ResponseNorm(),
            nn.Conv2d(64, 64, 1), nn.ReLU(), nn.Conv2d(64, 192, 3, padding=1), nn.ReLU(), ResponseNorm(),
            nn.MaxPool2d(3, 2, ceil_mode=True), _inception("3a"), _inception("3b"),
            nn.MaxPool2d(3, 2, ceil_mode=True), _inception("4a"),
        )  # fmt: skip
        self.middle = nn.Sequential(*(_inception(name) for name in ("4b", "4c", "4d")))
        self.end = nn.Sequential(
            _inception("4e"), nn.MaxPool2d(3, 2, ceil_mode=True), _inception("5a"), _inception("5b"),
            nn.AdaptiveAvgPool2d(1), nn.Dropout(0.4), nn.Flatten(), nn.Linear(1024, classes),
        )  # fmt: skip
        self.first, self.second = _classifier(512, classes), _classifier(528, classes)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Return the scores of all three classifiers, the main one's first."""
        stem = self.stem(images)
        first = self.first(stem)
        middle = self.middle(stem)
        second = self.second(middle)
        return self.end(middle), first, second
