"""Storages of tensors: which one it is, how large it is, how autograd lays gradients out in it, and its bits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._prims_common import is_non_overlapping_and_dense_or_false, make_contiguous_strides_for
from torch.multiprocessing.reductions import StorageWeakRef

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that tensors share if and only if they share their storage, while they are alive."""
    return int(tensor.untyped_storage()._cdata)


def storage_watch(tensor: torch.Tensor) -> Callable[[], bool]:
    """Return what tells, without holding the storage of `tensor`, whether it is still there."""
    reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    return lambda: not reference.expired()  # type: ignore[no-untyped-call]


def is_held_by_others(tensor: torch.Tensor) -> bool:
    """Return True if PyTorch itself holds `tensor`, or there are other tensors in its storage."""
    storage = tensor.untyped_storage()
    # The storage is held by the tensor and by the object that was just made for it.
    holders: int = tensor._use_count()  # type: ignore[attr-defined]
    return holders > 1 or torch._C._storage_Use_Count(storage._cdata) > 2


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


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors are of one kind and have the same bits: NaN is itself, and -0.0 is not 0.0."""
    if (one.shape, one.dtype, one.device, one.layout) != (other.shape, other.dtype, other.device, other.layout):
        return False
    if one.layout is torch.sparse_coo:
        return all(map(same_bits, (one._indices(), one._values()), (other._indices(), other._values())))
    return torch.equal(_as_integers(one), _as_integers(other))


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the contents as integers of the same width, without a copy where the layout allows it."""
    tensor = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.resolve_neg().view(_INTEGERS[tensor.element_size()])
