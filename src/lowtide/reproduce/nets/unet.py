"""U-Net (Ronneberger et al. 2015) with unpadded convolutions and cropped skips, as in Kusumoto et al.'s benchmark.

572x572 pixels come in and 388x388 labels go out. The last upward convolution keeps its 128 channels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def _two(fan_in: int, fan_out: int) -> list[nn.Module]:
    return [nn.Conv2d(fan_in, fan_out, 3), nn.ReLU(), nn.Conv2d(fan_out, fan_out, 3), nn.ReLU()]


class UNet(nn.Module):
    """Four levels down and up again; dropout after the two lowest ones."""

    def __init__(self, classes: int = 2) -> None:
        super().__init__()
        widths = (64, 128, 256, 512, 1024)
        fans = (1, *widths[:-1])
        self.down = nn.ModuleList(
            nn.Sequential(*_two(fan_in, width), *([nn.Dropout()] if width >= 512 else []))
            for fan_in, width in zip(fans, widths, strict=True)
        )
        ups = ((1024, 512), (512, 256), (256, 128), (128, 128))
        self.up = nn.ModuleList(nn.Sequential(nn.ConvTranspose2d(*fan, 2, 2), nn.ReLU()) for fan in ups)
        pairs = zip(widths[-2::-1], ups, strict=True)
        self.merge = nn.ModuleList(nn.Sequential(*_two(skip + up, skip)) for skip, (_, up) in pairs)
        self.pool = nn.MaxPool2d(2, ceil_mode=True)
        self.head = nn.Conv2d(64, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Return the class scores of every pixel whose surroundings are known."""
        x, skips = images, []
        for level, down in enumerate(self.down):
            x = down(self.pool(x) if level else x)
            skips.append(x)
        for up, merge, skip in zip(self.up, self.merge, skips[-2::-1], strict=True):
            x = up(x)
            rim = (skip.shape[-1] - x.shape[-1]) // 2
            x = merge(torch.cat([skip[:, :, rim : rim + x.shape[-2], rim : rim + x.shape[-1]], x], 1))
        return self.head(x)
