"""The segmentation networks of the papers: U-Net and PSPNet."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowtide.reproduce.nets.classification import BLOCKS, bottleneck, conv_norm


class Pyramid(nn.Module):
    """Appends averages over grids of several sizes, brought back to the input's resolution."""

    def __init__(self, fan_in: int, grids: tuple[int, ...]) -> None:
        super().__init__()
        self.grids = grids
        self.levels = nn.ModuleList(conv_norm(fan_in, fan_in // len(grids), 1) for _ in grids)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` and all levels, concatenated by channel."""
        pooled = (F.avg_pool2d(x, (x.shape[-1] - 1) // grid) for grid in self.grids)
        parts = [level(part) for level, part in zip(self.levels, pooled, strict=True)]
        return torch.cat([x, *(_resized(part, x.shape[-2:]) for part in parts)], 1)


class PSPNet(nn.Module):
    """Returns main and auxiliary scores of every pixel."""

    def __init__(self, classes: int = 17) -> None:
        super().__init__()
        stem = [conv_norm(3, 64, 3, 2, 1), conv_norm(64, 64, 3, 1, 1), conv_norm(64, 128, 3, 1, 1)]
        self.early = nn.Sequential(*stem, nn.MaxPool2d(3, 2, 1, ceil_mode=True), *_stages(128, range(3)))
        self.late = nn.Sequential(*_stages(1024, range(3, 4)), Pyramid(2048, (6, 3, 2, 1)))
        self.head = nn.Sequential(conv_norm(4096, 512, 3, 1, 1), nn.Dropout(0.1), nn.Conv2d(512, classes, 1))
        self.aux = nn.Sequential(conv_norm(1024, 512, 3, 1, 1), nn.Dropout(0.1), nn.Conv2d(512, classes, 3, padding=1))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return main and auxiliary scores at the resolution of the images."""
        features = self.early(images)
        aux = _resized(self.aux(features), images.shape[-2:])
        return _resized(self.head(self.late(features)), images.shape[-2:]), aux


def _stages(fan_in: int, stages: range) -> list[nn.Module]:
    """Return blocks of ResNet-101 whose last two stages dilate instead of halving the resolution."""
    blocks: list[nn.Module] = []
    for stage in stages:
        width, stride, dilation = 64 * 2**stage, (1, 2, 1, 1)[stage], (1, 1, 2, 4)[stage]
        for index in range(BLOCKS[101][stage]):
            blocks.append(bottleneck(fan_in, width, 1 if index else stride, dilation=dilation))
            fan_in = 4 * width
    return blocks


def _resized(x: Tensor, size: torch.Size) -> Tensor:
    return F.interpolate(x, size, mode="bilinear", align_corners=True)


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
        scores: Tensor = self.head(x)
        return scores
