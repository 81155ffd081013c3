"""Inception v3 (Szegedy et al. 2016) without its auxiliary classifier."""

from __future__ import annotations

from torch import nn

from lowtide.reproduce.nets.layers import Branches, Pair, conv_norm

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
