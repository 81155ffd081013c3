"""Shape, layout, dtype and device of tensors, and the state that blocks hand to each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.errors import InvalidModelError
from lowtide.pytorch.storages import storage_key

State = tuple[Tensor, ...]
Block = Callable[..., Any]
Spec = tuple[Any, ...]
SHAPE, STRIDE, DTYPE, DEVICE, NEEDS_GRADIENT = range(5)


def spec_of(tensor: Tensor) -> Spec:
    """Return shape, strides, dtype, device and whether a gradient is needed, to compare."""
    strides = tensor.stride() if tensor.layout is torch.strided else tensor.layout
    return tensor.shape, strides, tensor.dtype, tensor.device, tensor.requires_grad


def specs_of(values: Sequence[Any]) -> tuple[Any, ...]:
    """Return what each of `values` is: tensors by `spec_of`, anything else by its type."""
    return tuple(spec_of(value) if isinstance(value, Tensor) else type(value) for value in values)


def aliases_of(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Return for each tensor the first one that has the same storage."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(storage_key(tensor), index) for index, tensor in enumerate(tensors))


def is_dense_tensor(tensor: Tensor) -> bool:
    """Return True if `tensor` is a dense one of PyTorch's own class."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided


def kind_of(tensor: Tensor) -> str:
    """Return what an unusual tensor is."""
    layout = "" if tensor.layout is torch.strided else f" with layout {tensor.layout}"
    return f"a {type(tensor).__name__}{layout}"


def as_state(result: Any, label: str) -> State:
    """Return what a block returned as a flat tuple of tensors; raise `InvalidModelError` if it is anything else."""
    if isinstance(result, Tensor):
        return (result,)
    if not isinstance(result, tuple | list) or not result:
        raise InvalidModelError(
            f"{label} returned {_a(result)}. A block of a chain returns a tensor or a flat tuple of tensors, which the "
            "next block takes; wrap the block in a function that does."
        )
    for index, entry in enumerate(result):
        if not isinstance(entry, Tensor):
            raise InvalidModelError(
                f"{label} returned a tuple whose entry {index} is {_a(entry)}. A block of a chain returns a tensor or "
                "a flat tuple of tensors; leave everything else out."
            )
    return tuple(result)


def label_of(name: str, block: Block) -> str:
    """Return how messages call a block."""
    block = getattr(block, "stands_for", block)
    kind = type(block).__name__ if isinstance(block, nn.Module) else getattr(block, "__name__", type(block).__name__)
    return f"Block {name} ({kind})"


def _a(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, tuple | list) and not value:
        return f"an empty {type(value).__name__}"
    return f"a {type(value).__name__}"
