"""The classification networks of the papers: VGG, ResNet, DenseNet, GoogLeNet, Inception v3."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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


# Channels of 1x1; of 3x3 and of 5x5 with their reductions; of the pooled branch.
_INCEPTIONS = {
    "3a": (192, 64, 96, 128, 16, 32, 32),
    "3b": (256, 128, 128, 192, 32, 96, 64),
    "4a": (480, 192, 96, 208, 16, 48, 64),
    "4b": (512, 160, 112, 224, 24, 64, 64),
    "4c": (512, 128, 128, 256, 24, 64, 64),
    "4d": (512, 112, 144, 288, 32, 64, 64),
    "4e": (528, 256, 160, 320, 32, 128, 128),
    "5a": (832, 256, 160, 320, 32, 128, 128),
    "5b": (832, 384, 192, 384, 48, 128, 128),
}


_WINDOW, _ALPHA, _BETA = 5, 2e-5, 0.75


class _ResponseNorm(torch.autograd.Function):
    """Local response normalisation as one op that keeps its input and the denominator's base for backward.

    Written as a formula, autograd would keep five tensors of its input's size.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return `x` divided by a power of the squares around each channel."""
        base = _window_sum(x * x).mul(_ALPHA).add(1.0)
        ctx.save_for_backward(x, base)
        return x * base.pow(-_BETA)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Return the gradient of `x`."""
        x: Tensor
        base: Tensor
        x, base = ctx.saved_tensors
        direct = gradient * base.pow(-_BETA)
        return direct - 2 * _ALPHA * _BETA * x * _window_sum(direct * x / base)


def _window_sum(x: Tensor) -> Tensor:
    """Return the sum over the channels around each channel."""
    padded = F.pad(x.unsqueeze(1), (0, 0, 0, 0, _WINDOW // 2, _WINDOW // 2))
    return F.avg_pool3d(padded, (_WINDOW, 1, 1), stride=1).squeeze(1) * _WINDOW


class ResponseNorm(nn.Module):
    """Local response normalisation over 5 channels."""

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`, normalised."""
        normalised: Tensor = _ResponseNorm.apply(x)  # type: ignore[no-untyped-call]
        return normalised


def _inception(name: str) -> nn.Module:
    fan_in, one, three_in, three, five_in, five, pool = _INCEPTIONS[name]
    branches = Branches([
        nn.Conv2d(fan_in, one, 1),
        nn.Sequential(nn.Conv2d(fan_in, three_in, 1), nn.ReLU(), nn.Conv2d(three_in, three, 3, padding=1)),
        nn.Sequential(nn.Conv2d(fan_in, five_in, 1), nn.ReLU(), nn.Conv2d(five_in, five, 5, padding=2)),
        nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(fan_in, pool, 1)),
    ])  # fmt: skip
    return nn.Sequential(branches, nn.ReLU())


def _classifier(fan_in: int, classes: int) -> nn.Module:
    """Return an auxiliary classifier; at 224x224 it pools its input to 4x4."""
    return nn.Sequential(
        nn.AvgPool2d(5, 3), nn.Conv2d(fan_in, 128, 1), nn.ReLU(), nn.Flatten(),
        nn.Linear(128 * 4 * 4, 1024), nn.ReLU(), nn.Linear(1024, classes),
    )  # fmt: skip


class GoogLeNet(nn.Module):
    """Returns the scores of the main and of the two auxiliary classifiers."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True), ResponseNorm(),
            nn.Conv2d(64, 64, 1), nn.ReLU(), nn.Conv2d(64, 192, 3, padding=1), nn.ReLU(), ResponseNorm(),
            nn.MaxPool2d(3, 2, ceil_mode=True), _inception("3a"), _inception("3b"),
            nn.MaxPool2d(3, 2, ceil_mode=True), _inception("4a"),
        )  # fmt: skip
        self.middle = nn.Sequential(*(_inception(name) for name in ("4b", "4c", "4d")))
        self.end = nn.Sequential(
            _inception("4e"), nn.MaxPool2d(3, 2, ceil_mode=True), _inception("5a"), _inception("5b"),
            nn.AdaptiveAvgPool2d(1), nn.Dropout(0.4), nn.Flatten(), nn.Linear(1024, classes),
        )  # fmt: skip
        self.first, self.second = _classifier(512, classes), _classifier(528, classes)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Return the scores of all three classifiers, the main one's first."""
        stem = self.stem(images)
        first = self.first(stem)
        middle = self.middle(stem)
        second = self.second(middle)
        return self.end(middle), first, second


Step = tuple[int, Pair] | tuple[int, Pair, int]


def _path(fan_in: int, *steps: Step) -> nn.Sequential:
    """Return convolutions in a row, each given by channels, kernel and stride; those that do not stride are padded."""
    layers = []
    for width, kernel, *stride in steps:
        high, wide = kernel if isinstance(kernel, tuple) else (kernel, kernel)
        padding = (0, 0) if stride else (high // 2, wide // 2)
        layers.append(conv_norm(fan_in, width, kernel, stride[0] if stride else 1, padding))
        fan_in = width
    return nn.Sequential(*layers)


def _pooled(fan_in: int, width: int) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, 1, 1), *_path(fan_in, (width, 1)))


def _grid_35(fan_in: int, pool: int) -> nn.Module:
    """Return a block for the 35x35 grid."""
    return Branches([
        _path(fan_in, (64, 1)),
        _path(fan_in, (48, 1), (64, 5)),
        _path(fan_in, (64, 1), (96, 3), (96, 3)),
        _pooled(fan_in, pool),
    ])  # fmt: skip


def _grid_17(width: int) -> nn.Module:
    """Return a block for the 17x17 grid with `width` channels inside its factorised 7x7 convolutions."""
    return Branches([
        _path(768, (192, 1)),
        _path(768, (width, 1), (width, (1, 7)), (192, (7, 1))),
        _path(768, (width, 1), (width, (7, 1)), (width, (1, 7)), (width, (7, 1)), (192, (1, 7))),
        _pooled(768, 192),
    ])  # fmt: skip


def _grid_8(fan_in: int) -> nn.Module:
    """Return a block for the 8x8 grid, two of whose branches fork at their end."""
    return Branches([
        _path(fan_in, (320, 1)),
        nn.Sequential(_path(fan_in, (384, 1)), _fork()),
        nn.Sequential(_path(fan_in, (448, 1), (384, 3)), _fork()),
        _pooled(fan_in, 192),
    ])  # fmt: skip


def _fork() -> nn.Module:
    return Branches([_path(384, (384, (1, 3))), _path(384, (384, (3, 1)))])


def inception_v3(classes: int = 1000) -> nn.Module:
    """Return Inception v3; its input is 299x299 in the paper, at least 75x75 here."""
    to_17 = Branches([_path(288, (384, 3, 2)), _path(288, (64, 1), (96, 3), (96, 3, 2)), nn.MaxPool2d(3, 2)])
    to_8 = Branches([
        _path(768, (192, 1), (320, 3, 2)),
        _path(768, (192, 1), (192, (1, 7)), (192, (7, 1)), (192, 3, 2)),
        nn.MaxPool2d(3, 2),
    ])  # fmt: skip
    return nn.Sequential(
        _path(3, (32, 3, 2), (32, 3, 1), (64, 3)), nn.MaxPool2d(3, 2),
        _path(64, (80, 1), (192, 3, 1)), nn.MaxPool2d(3, 2),
        _grid_35(192, 32), _grid_35(256, 64), _grid_35(288, 64), to_17,
        _grid_17(128), _grid_17(160), _grid_17(160), _grid_17(192), to_8,
        _grid_8(1280), _grid_8(2048),
        nn.AdaptiveAvgPool2d(1), nn.Dropout(), nn.Flatten(), nn.Linear(2048, classes),
    )  # fmt: skip
