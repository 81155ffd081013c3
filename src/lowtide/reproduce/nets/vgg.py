"""VGG-11 to VGG-19 (Simonyan and Zisserman 2015) without batch normalisation, and AlexNet (Krizhevsky 2014)."""

from __future__ import annotations

from torch import nn

CONVOLUTIONS = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
"""For every depth, how many convolutions come before each of the five poolings."""


def vgg(depth: int, classes: int = 1000) -> nn.Module:
    """Return the VGG network with `depth` layers that have weights."""
    layers: list[nn.Module] = []
    fan_in = 3
    for width, number in zip((64, 128, 256, 512, 512), CONVOLUTIONS[depth], strict=True):
        for _ in range(number):
            layers += [nn.Conv2d(fan_in, width, 3, padding=1), nn.ReLU()]
            fan_in = width
        layers.append(nn.MaxPool2d(2))
    head = [nn.Linear(512 * 7 * 7, 4096), nn.ReLU(), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout()]
    return nn.Sequential(*layers, nn.Flatten(), *head, nn.Linear(4096, classes))


def alexnet(classes: int = 1000) -> nn.Module:
    """Return AlexNet in its one-tower form."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 11, stride=4, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(),
        nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(),
        nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Flatten(),
        nn.Dropout(), nn.Linear(256 * 6 * 6, 4096), nn.ReLU(),
        nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(),
        nn.Linear(4096, classes),
    )  # fmt: skip
