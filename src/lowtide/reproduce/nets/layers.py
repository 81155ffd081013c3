"""What several of the papers' networks share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

Pair = int | tuple[int, int]


def conv_norm(
    fan_in: int, fan_out: int, kernel: Pair, stride: int = 1, padding: Pair = 0, *, dilation: int = 1, relu: bool = True
) -> nn.Sequential:
    """Return a convolution without bias, a batch normalisation and, unless told otherwise, a ReLU."""
    conv = nn.Conv2d(fan_in, fan_out, kernel, stride, padding, dilation, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(fan_out), *([nn.ReLU()] if relu else []))


def norm_conv(fan_in: int, fan_out: int, kernel: int) -> nn.Sequential:
    """Return a batch normalisation, a ReLU and a convolution without bias that keeps the resolution."""
    conv = nn.Conv2d(fan_in, fan_out, kernel, padding=kernel // 2, bias=False)
    return nn.Sequential(nn.BatchNorm2d(fan_in), nn.ReLU(), conv)


class Branches(nn.ModuleList):
    """Modules that read the same tensor and whose results are concatenated by channel."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the results of all branches, concatenated."""
        return torch.cat([branch(x) for branch in self], 1)
