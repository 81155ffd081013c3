"""A network of Inception modules (Szegedy et al. 2015): four branches, concatenated, and an auxiliary head."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowtide.testing.models.common import Case, ConvNorm, images, seeded


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
        return self.linear(F.dropout(x.mean((2, 3)), 0.4, self.training))


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
