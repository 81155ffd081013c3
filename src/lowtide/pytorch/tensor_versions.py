"""Tensors: how often one was changed in place, and what it is made of."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["is_traceable_wrapper_subclass", "sparse_parts", "version_of", "versions_of"]


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; PyTorch counts it for its own checks and has no public way."""
    return 0 if tensor.is_inference() else tensor._version


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """Return how often each tensor was changed in place; none of them may be an inference tensor."""
    return [tensor._version for tensor in tensors]


def sparse_parts(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices and values of a sparse tensor; the public ways refuse one that has entries to add up."""
    return tensor._indices(), tensor._values()
