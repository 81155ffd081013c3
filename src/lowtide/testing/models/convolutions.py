"""Convolutional models: a ResNet, a DenseNet, an Inception net, a U-Net."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowtide.testing.models.common import Case, ConvNorm, images, seeded

EXPANSION = 4


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a residual."""

    def __init__(self, fan_in: int, width: int, stride: int) -> None:
        super().__init__()
        fan_out = EXPANSION * width
        self.body = nn.Sequential(
            ConvNorm(fan_in, width, 1), ConvNorm(width, width, 3, stride), ConvNorm(width, fan_out, 1, relu=False)
        )
        same = stride == 1 and fan_in == fan_out
        self.shortcut = nn.Identity() if same else ConvNorm(fan_in, fan_out, 1, stride, relu=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` after the block."""
        return F.relu(self.body(x) + self.shortcut(x))


class ResNet(nn.Module):
    """A residual classifier that returns its own loss."""

    def __init__(self, depths: Sequence[int], width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(ConvNorm(3, width, 7, 2), nn.MaxPool2d(3, 2, 1))
        blocks: list[nn.Module] = []
        fan_in = width
        for stage, depth in enumerate(depths):
            for index in range(depth):
                blocks.append(Bottleneck(fan_in, width << stage, stride=2 if stage and not index else 1))
                fan_in = EXPANSION * (width << stage)
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(fan_in, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross entropy of `labels` given `images`."""
        features = self.blocks(self.stem(images)).mean((2, 3))
        return F.cross_entropy(self.head(features), labels)


def resnet50(*, width: int = 64, size: int = 96, batch: int = 24, classes: int = 100, seed: int = 0) -> Case:
    """Return a ResNet-50 (`width=64` is the published one), and a batch of random images and labels."""
    with seeded(seed):
        return ResNet((3, 4, 6, 3), width, classes), images(batch, size, classes), {}


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


class Mixed(nn.Module):
    """Branches of 1x1, 3x3, two 3x3 and pooled convolutions, concatenated to `4 * width` channels."""

    def __init__(self, fan_in: int, width: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            [
                ConvNorm(fan_in, width, 1),
                nn.Sequential(ConvNorm(fan_in, width, 1), ConvNorm(width, width, 3)),
                nn.Sequential(ConvNorm(fan_in, width, 1), ConvNorm(width, width, 3), ConvNorm(width, width, 3)),
                nn.Sequential(nn.AvgPool2d(3, 1, 1), ConvNorm(fan_in, width, 1)),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the concatenated branches."""
        return torch.cat([branch(x) for branch in self.branches], 1)


class Head(nn.Module):
    """Global pooling, dropout and a linear classifier."""

    def __init__(self, fan_in: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(fan_in, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.linear(F.dropout(x.mean((2, 3)), 0.4, self.training))
        return logits


class Inception(nn.Module):
    """A branchy classifier that returns a dict with its loss and logits."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(ConvNorm(3, width, 3, 2), ConvNorm(width, 2 * width, 3), nn.MaxPool2d(3, 2, 1))
        self.early = nn.Sequential(Mixed(2 * width, width), Mixed(4 * width, width), nn.MaxPool2d(3, 2, 1))
        self.middle = nn.Sequential(Mixed(4 * width, 2 * width), Mixed(8 * width, 2 * width))
        self.late = nn.Sequential(nn.MaxPool2d(3, 2, 1), Mixed(8 * width, 4 * width), Mixed(16 * width, 4 * width))
        self.auxiliary, self.head = Head(8 * width, classes), Head(16 * width, classes)

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss, with the auxiliary head's share, and the logits."""
        middle = self.middle(self.early(self.stem(images)))
        logits = self.head(self.late(middle))
        auxiliary = F.cross_entropy(self.auxiliary(middle), labels)
        return {"logits": logits, "loss": F.cross_entropy(logits, labels) + 0.3 * auxiliary}


def inception(*, width: int = 32, size: int = 128, batch: int = 8, classes: int = 100, seed: int = 0) -> Case:
    """Return an Inception-like network, and a batch of random images and labels."""
    with seeded(seed):
        return Inception(width, classes), images(batch, size, classes), {}


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
