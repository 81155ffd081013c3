"""ResNet-50 (He et al. 2016): bottleneck blocks with batch normalisation and the stride on the 3x3 convolution."""

from __future__ import annotations

from collections.abc import Sequence

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
