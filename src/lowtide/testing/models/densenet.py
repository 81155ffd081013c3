"""DenseNet-121 (Huang et al. 2017): every layer reads the concatenation of all layers before it in its block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowtide.testing.models.common import Case, ConvNorm, images, seeded


class DenseLayer(nn.Sequential):
    """Norm, ReLU, 1x1 bottleneck, norm, ReLU, 3x3 convolution giving `growth` new channels."""

    def __init__(self, fan_in: int, growth: int) -> None:
        super().__init__(
            nn.BatchNorm2d(fan_in),
            nn.ReLU(),
            ConvNorm(fan_in, 4 * growth, 1),
            nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )


class DenseBlock(nn.ModuleList):
    """Layers whose outputs are all concatenated."""

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` and the outputs of all layers, concatenated by channel."""
        parts = [x]
        for layer in self:
            parts.append(layer(torch.cat(parts, 1)))
        return torch.cat(parts, 1)


class Transition(nn.Sequential):
    """Halves channels and resolution between blocks."""

    def __init__(self, fan_in: int) -> None:
        super().__init__(
            nn.BatchNorm2d(fan_in), nn.ReLU(), nn.Conv2d(fan_in, fan_in // 2, 1, bias=False), nn.AvgPool2d(2)
        )


class DenseNet(nn.Module):
    """A densely connected classifier that returns its own loss."""

    def __init__(self, depths: Sequence[int], growth: int, classes: int) -> None:
        super().__init__()
        channels = 2 * growth
        layers: list[nn.Module] = [ConvNorm(3, channels, 7, 2), nn.MaxPool2d(3, 2, 1)]
        for stage, depth in enumerate(depths):
            if stage:
                layers.append(Transition(channels))
                channels //= 2
            layers.append(DenseBlock(DenseLayer(channels + growth * index, growth) for index in range(depth)))
            channels += growth * depth
        self.features = nn.Sequential(*layers, nn.BatchNorm2d(channels), nn.ReLU())
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross entropy of `labels` given `images`."""
        return F.cross_entropy(self.head(self.features(images).mean((2, 3))), labels)


def densenet121(*, growth: int = 32, size: int = 64, batch: int = 16, classes: int = 100, seed: int = 0) -> Case:
    """Return a DenseNet-121 (`growth=32` is the published one), and a batch of random images and labels."""
    with seeded(seed):
        return DenseNet((6, 12, 24, 16), growth, classes), images(batch, size, classes), {}
