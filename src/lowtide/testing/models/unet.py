"""U-Net (Ronneberger et al. 2015): long skips keep the encoder's activations alive until the decoder reads them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowtide.testing.models.common import Case, ConvNorm, seeded


class DoubleConv(nn.Sequential):
    """Two 3x3 convolutions."""

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__(ConvNorm(fan_in, fan_out, 3), ConvNorm(fan_out, fan_out, 3))


class UNet(nn.Module):
    """A segmentation network that returns its own loss."""

    def __init__(self, levels: int, width: int, classes: int) -> None:
        super().__init__()
        widths = [width << level for level in range(levels)]
        self.down = nn.ModuleList(map(DoubleConv, [3, *widths[:-1]], widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * fan_out, fan_out, 2, 2) for fan_out in widths[-2::-1])
        self.merge = nn.ModuleList(DoubleConv(2 * fan_out, fan_out) for fan_out in widths[-2::-1])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross entropy of the pixel `labels` given `images`."""
        skips: list[Tensor] = []
        x = images
        for level, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if level else x)
            skips.append(x)
        skips.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], 1))
        return F.cross_entropy(self.head(x), labels)


def unet(*, levels: int = 4, width: int = 16, size: int = 128, batch: int = 4, classes: int = 5, seed: int = 0) -> Case:
    """Return a U-Net, and a batch of random images with a label per pixel."""
    with seeded(seed):
        args = torch.randn(batch, 3, size, size), torch.randint(classes, (batch, size, size))
        return UNet(levels, width, classes), args, {}
