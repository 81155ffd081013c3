"""The gradients that a backward pass is given: which do not come, and which have another layout than was traced.

A graph is traced with gradients in the layout of its outputs. What comes may be transposed, expanded, or a part of a
larger tensor, and kernels add up in an order that depends on it, as in eager.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lowtide import device as devices
from lowtide.errors import UnsupportedBackwardError


@dataclass(frozen=True)
class Layout:
    """The layout of a gradient.

    Attributes:
        position: Which gradient.
        strides: Strides that say the same as those of the gradient; see `meaning_of`.
        bytes: What a tensor with these strides takes.
    """

    position: int
    strides: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class Arrived:
    """What a backward pass is given.

    Attributes:
        missing: Positions of the gradients that do not come.
        layouts: The layouts of those that come in another one than was traced.
    """

    missing: frozenset[int] = frozenset()
    layouts: tuple[Layout, ...] = ()

    @property
    def strides(self) -> dict[int, tuple[int, ...]]:
        """Strides by position, where they are not the traced ones."""
        return {layout.position: layout.strides for layout in self.layouts}

    def bytes_of(self, traced: Sequence[int]) -> list[int]:
        """Return the bytes of the gradients that come, given those of all gradients as traced."""
        found = dict(enumerate(traced)) | {layout.position: layout.bytes for layout in self.layouts}
        return [size for position, size in found.items() if position not in self.missing]


AS_TRACED = Arrived()


@dataclass(frozen=True)
class TracedGradients:
    """The gradients that a graph was traced with: the strides of each; None for parts of one that are no tensors."""

    strides: tuple[tuple[int, ...] | None, ...]

    @classmethod
    def of(cls, fakes: Sequence[Any]) -> TracedGradients:
        """Return the layouts of these tensors."""
        return cls(tuple(tuple(fake.stride()) if isinstance(fake, torch.Tensor) else None for fake in fakes))

    def read(self, gradients: Sequence[Any]) -> Arrived:
        """Return what has come."""
        missing = frozenset(position for position, each in enumerate(gradients) if each is None)
        found = [self._layout(position, each) for position, each in enumerate(gradients) if each is not None]
        return Arrived(missing, tuple(each for each in found if each is not None))

    def _layout(self, position: int, gradient: Any) -> Layout | None:
        """Return the layout of a gradient if it is not the traced one."""
        traced = self.strides[position]
        if traced is None:
            return None
        if gradient.layout is not torch.strided:
            raise UnsupportedBackwardError(
                f"The gradient of output {position} of a planned graph has the layout {gradient.layout}; a planned "
                "graph takes dense gradients. Call to_dense() on it, or leave the part behind the graph that makes it "
                "out of the loss."
            )
        if gradient.stride() == traced:
            return None
        strides = meaning_of(gradient, traced)
        if strides == traced:
            return None
        last = sum((size - 1) * stride for size, stride in zip(gradient.shape, strides, strict=True))
        size = (last + 1) * gradient.element_size() if gradient.numel() else 0
        return Layout(position, strides, devices.round_bytes(size, gradient.device))


def meaning_of(tensor: torch.Tensor, traced: Sequence[int]) -> tuple[int, ...]:
    """Return the strides that stand for all that are traced as those of `tensor` are.

    A part of a larger tensor has gaps between its rows. How wide they are changes with the larger tensor, and nothing
    that is traced depends on it: it depends on the order of the dimensions, on which of them are expanded, and on where
    there are gaps. So all gaps are made as narrow as possible. Strides along a size of 1 say nothing: there they are
    those of `traced`.
    """
    strides = list(traced)
    dims = [dim for dim, size in enumerate(tensor.shape) if size != 1]
    own = {dim: tensor.stride(dim) for dim in dims}
    end, narrow = 1, 1
    for dim in sorted(dims, key=lambda dim: (own[dim], -dim)):
        if own[dim] == 0:
            strides[dim] = 0
            continue
        if own[dim] < end:
            # Elements overlap, in one of many ways.
            return tuple(tensor.stride())
        strides[dim] = narrow + (own[dim] > end)
        end, narrow = own[dim] * tensor.shape[dim], strides[dim] * tensor.shape[dim]
    return tuple(strides)
