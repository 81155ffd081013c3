"""Fake tensors: shapes, types and storages without data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "fake_deep_copies",
    "fake_mode_of",
    "new_fake_mode",
]

# Tensors on the meta device become fakes of tensors here.
_STAND_IN = torch.device("cpu")


def fake_mode_of(tensor: torch.Tensor) -> FakeTensorMode:
    """Return the mode of a fake tensor: fakes of two modes cannot meet."""
    assert isinstance(tensor, FakeTensor)
    return tensor.fake_mode


def new_fake_mode() -> FakeTensorMode:
    """Return a mode in which real tensors, such as constants of the model, may meet fakes."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def fake_deep_copies(mode: FakeTensorMode) -> Iterator[None]:
    """Let `copy.deepcopy` make fakes of `mode` of tensors, also of those on the meta device."""
    with FakeCopyMode(mode), _CopiesOfMeta(mode):
        yield


class _CopiesOfMeta(TorchFunctionMode):
    """Makes deep copies of tensors on the meta device; all others are left to the mode below."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self.mode = mode

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return the fake copy that `func` asks for, or what `func` returns."""
        # The deep copy of a parameter clones its data; any other tensor copies itself.
        if func is torch.Tensor.__deepcopy__ and args[0].is_meta:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = self._fake(tensor)
            return memo[id(tensor)]
        if func is torch._C.TensorBase.clone and args[0].is_meta:
            return self._fake(args[0])
        return func(*args, **(kwargs or {}))

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            # Not a fresh storage: views of one storage remain views of one storage.
            made = FakeTensor(self.mode, tensor.detach(), _STAND_IN)
            return made.requires_grad_(tensor.requires_grad)
