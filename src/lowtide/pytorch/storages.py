"""Storages of tensors: which one it is, how large it is, and how autograd lays gradients out in it."""

from __future__ import annotations

import torch
from torch._prims_common import is_non_overlapping_and_dense_or_false, make_contiguous_strides_for


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that tensors share if and only if they share their storage, while they are alive."""
    return int(tensor.untyped_storage()._cdata)


def storage_bytes(tensor: torch.Tensor) -> int:
    """Return the size of the tensor's whole storage; of a sparse tensor, that of its parts."""
    if tensor.layout is not torch.strided:
        return sum(part.numel() * part.element_size() for part in (tensor._indices(), tensor._values()))
    return int(tensor.untyped_storage().nbytes())


def gradient_strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the strides in which autograd keeps the gradient: the parameter's if it is dense, else row by row."""
    if is_non_overlapping_and_dense_or_false(parameter):
        return tuple(parameter.stride())
    return tuple(make_contiguous_strides_for(parameter.shape))
