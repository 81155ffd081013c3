"""ResNet-18 to ResNet-152 (He et al. 2016).

A block that halves the resolution does so in its first 1x1 convolution in the paper and in Chainer, and in its 3x3
convolution in torchvision; the bytes of its activations differ.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lowtide.reproduce.nets.layers import conv_norm

BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
"""For every depth, the number of blocks in each of the four stages."""


class Residual(nn.Module):
    """Adds a body and a shortcut, which is the input itself where shapes allow."""

    def __init__(self, body: nn.Module, shortcut: nn.Module | None) -> None:
        super().__init__()
        self.body = body
        self.shortcut = shortcut or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return the rectified sum."""
        return torch.relu(self.body(x) + self.shortcut(x))


def basic(fan_in: int, width: int, stride: int) -> Residual:
    """Return a block of two 3x3 convolutions."""
    body = nn.Sequential(conv_norm(fan_in, width, 3, stride, 1), conv_norm(width, width, 3, 1, 1, relu=False))
    return Residual(body, _shortcut(fan_in, width, stride))


def bottleneck(fan_in: int, width: int, stride: int, *, early: bool = False, dilation: int = 1) -> Residual:
    """Return a 1x1, 3x3, 1x1 block with four times `width` channels; `early` strides in the first convolution."""
    body = nn.Sequential(
        conv_norm(fan_in, width, 1, stride if early else 1),
        conv_norm(width, width, 3, 1 if early else stride, dilation, dilation=dilation),
        conv_norm(width, 4 * width, 1, relu=False),
    )
    return Residual(body, _shortcut(fan_in, 4 * width, stride))


def _shortcut(fan_in: int, fan_out: int, stride: int) -> nn.Module | None:
    return None if fan_in == fan_out and stride == 1 else conv_norm(fan_in, fan_out, 1, stride, relu=False)


def resnet(depth: int, *, early: bool = False, classes: int = 1000) -> nn.Module:
    """Return the ResNet with `depth` layers; `early` strides in the first convolution of a bottleneck."""
    layers: list[nn.Module] = [conv_norm(3, 64, 7, 2, 3), nn.MaxPool2d(3, 2, 1)]
    fan_in, widening = 64, 1 if depth < 50 else 4
    for stage, number in enumerate(BLOCKS[depth]):
        width = 64 * 2**stage
        for index in range(number):
            stride = 2 if stage and not index else 1
            block = basic(fan_in, width, stride) if widening == 1 else bottleneck(fan_in, width, stride, early=early)
            layers.append(block)
            fan_in = widening * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(fan_in, classes))
