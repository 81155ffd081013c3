"""Networks of searched cells for CIFAR: NASNet-A (Zoph et al. 2018), AmoebaNet-A (Real et al. 2019), DARTS (Liu 2019).

All three are built in the frame of the DARTS evaluation network: a 3x3 stem, 20 cells, two of which halve the
resolution and double the channels, global pooling and a linear layer; no auxiliary head, no dropped paths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Genotype:
    """The two cells of a network.

    A cell is written as pairs of operations, `op:input`, each pair making one new state by addition; inputs 0 and 1
    are the results of the two cells before. The result is the concatenation of the states listed.
    """

    normal: str
    normal_result: tuple[int, ...]
    reduce: str
    reduce_result: tuple[int, ...]


GENOTYPES = {
    "nasnet": Genotype(
        "sep5:1 sep3:0, sep5:0 sep3:0, avg:1 skip:0, avg:0 avg:0, sep3:1 skip:1", (2, 3, 4, 5, 6),
        "sep5:1 sep7:0, max:1 sep7:0, avg:1 sep5:0, skip:3 avg:2, sep3:2 max:1", (4, 5, 6),
    ),
    "amoebanet": Genotype(
        "avg:0 max:1, sep3:0 sep5:2, sep3:0 avg:3, sep3:1 skip:1, skip:0 avg:1", (4, 5, 6),
        "avg:0 sep3:1, max:0 sep7:2, sep7:0 avg:1, max:0 max:1, line7:0 sep3:5", (3, 4, 6),
    ),
    "darts": Genotype(
        "sep3:0 sep3:1, sep3:0 sep3:1, sep3:1 skip:0, skip:0 dil3:2", (2, 3, 4, 5),
        "max:0 max:1, skip:2 max:1, max:0 skip:2, skip:2 max:1", (2, 3, 4, 5),
    ),
}  # fmt: skip


def _relu_conv_norm(fan_in: int, fan_out: int) -> nn.Sequential:
    return nn.Sequential(nn.ReLU(), nn.Conv2d(fan_in, fan_out, 1, bias=False), nn.BatchNorm2d(fan_out))


def _separable(width: int, kernel: int, stride: int, dilation: int = 1) -> list[nn.Module]:
    """Return a ReLU, a depthwise and a pointwise convolution, and a batch normalisation."""
    padding = dilation * (kernel // 2)
    depthwise = nn.Conv2d(width, width, kernel, stride, padding, dilation, groups=width, bias=False)
    return [nn.ReLU(), depthwise, nn.Conv2d(width, width, 1, bias=False), nn.BatchNorm2d(width)]


def _separable_twice(kernel: int) -> Callable[[int, int], nn.Module]:
    return lambda width, stride: nn.Sequential(*_separable(width, kernel, stride), *_separable(width, kernel, 1))


def _line(width: int, stride: int) -> nn.Module:
    """Return a 7x7 convolution factorised into a row and a column."""
    row = nn.Conv2d(width, width, (1, 7), (1, stride), (0, 3), bias=False)
    column = nn.Conv2d(width, width, (7, 1), (stride, 1), (3, 0), bias=False)
    return nn.Sequential(nn.ReLU(), row, column, nn.BatchNorm2d(width))


class Halve(nn.Module):
    """Halves the resolution with two 1x1 convolutions that look at different pixels."""

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(fan_in, fan_out // 2, 1, 2, bias=False)
        self.odd = nn.Conv2d(fan_in, fan_out // 2, 1, 2, bias=False)
        self.norm = nn.BatchNorm2d(fan_out)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` at half the resolution."""
        x = torch.relu(x)
        halved: Tensor = self.norm(torch.cat([self.even(x), self.odd(x[:, :, 1:, 1:])], 1))
        return halved


_OPS: dict[str, Callable[[int, int], nn.Module]] = {
    "avg": lambda width, stride: nn.AvgPool2d(3, stride, 1, count_include_pad=False),
    "max": lambda width, stride: nn.MaxPool2d(3, stride, 1),
    "skip": lambda width, stride: nn.Identity() if stride == 1 else Halve(width, width),
    "sep3": _separable_twice(3),
    "sep5": _separable_twice(5),
    "sep7": _separable_twice(7),
    "dil3": lambda width, stride: nn.Sequential(*_separable(width, 3, stride, dilation=2)),
    "line7": _line,
}


class Cell(nn.Module):
    """One cell, which reads the results of the two before it."""

    def __init__(self, genotype: Genotype, fans: tuple[int, int], width: int, *, reduce: bool, reduced: bool) -> None:
        super().__init__()
        self.first = Halve(fans[0], width) if reduced else _relu_conv_norm(fans[0], width)
        self.second = _relu_conv_norm(fans[1], width)
        steps = (genotype.reduce if reduce else genotype.normal).replace(",", " ").split()
        words = [step.split(":") for step in steps]
        self.sources = [int(source) for _, source in words]
        self.result = genotype.reduce_result if reduce else genotype.normal_result
        self.ops = nn.ModuleList(_OPS[op](width, 2 if reduce and int(source) < 2 else 1) for op, source in words)

    def forward(self, before: Tensor, last: Tensor) -> Tensor:
        """Return the cell's result."""
        states = [self.first(before), self.second(last)]
        for left in range(0, len(self.ops), 2):
            parts = [self.ops[k](states[self.sources[k]]) for k in (left, left + 1)]
            states.append(parts[0] + parts[1])
        return torch.cat([states[index] for index in self.result], 1)


class CellNetwork(nn.Module):
    """A row of cells between a stem and a linear classifier."""

    def __init__(self, genotype: Genotype, *, width: int = 36, cells: int = 20, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 3 * width, 3, padding=1, bias=False), nn.BatchNorm2d(3 * width))
        self.cells = nn.ModuleList()
        fans, reduced = (3 * width, 3 * width), False
        for index in range(cells):
            reduce = index in (cells // 3, 2 * cells // 3)
            width *= 2 if reduce else 1
            cell = Cell(genotype, fans, width, reduce=reduce, reduced=reduced)
            self.cells.append(cell)
            fans, reduced = (fans[1], len(cell.result) * width), reduce
        self.head = nn.Linear(fans[1], classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the class scores."""
        before = last = self.stem(images)
        for cell in self.cells:
            before, last = last, cell(before, last)
        scores: Tensor = self.head(last.mean((2, 3)))
        return scores
