"""DenseNet-121 to DenseNet-201 (Huang et al. 2017), every layer concatenated to all before it at once."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lowtide.reproduce.nets.layers import conv_norm, norm_conv

LAYERS = {121: (6, 12, 24, 16), 161: (6, 12, 36, 24), 169: (6, 12, 32, 32), 201: (6, 12, 48, 32)}
"""For every depth, the number of layers in each of the four blocks."""


class Dense(nn.Module):
    """A bottleneck whose new channels are appended to its input."""

    def __init__(self, fan_in: int, growth: int) -> None:
        super().__init__()
        self.body = nn.Sequential(norm_conv(fan_in, 4 * growth, 1), norm_conv(4 * growth, growth, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` with the new channels."""
        return torch.cat([x, self.body(x)], 1)


def densenet(depth: int, classes: int = 1000) -> nn.Module:
    """Return the DenseNet with `depth` layers; growth is 48 at depth 161 and 32 otherwise."""
    growth = 48 if depth == 161 else 32
    channels = 2 * growth
    layers: list[nn.Module] = [conv_norm(3, channels, 7, 2, 3), nn.MaxPool2d(3, 2, 1)]
    for block, number in enumerate(LAYERS[depth]):
        if block:
            layers += [norm_conv(channels, channels // 2, 1), nn.AvgPool2d(2)]
            channels //= 2
        for _ in range(number):
            layers.append(Dense(channels, growth))
            channels += growth
    head = [nn.BatchNorm2d(channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    return nn.Sequential(*layers, *head)
