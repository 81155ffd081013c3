"""Calls that end before they communicate: a rank that runs a model by itself, to see what happens, must not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.pytorch.ops import is_collective
from lowtide.pytorch.process_groups import is_distributed_tensor


class CollectiveStopError(Exception):
    """Raised in the place of a collective, which does not run."""


class CollectiveStop(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside of it every collective raises `CollectiveStopError` before it communicates, also one without a graph."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: what the compiler has made may run inside of it."""
        return True

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return what `func` returns."""
        if is_collective(func):
            raise CollectiveStopError(f"{func} would communicate with other ranks.")
        if any(map(is_distributed_tensor, types)):
            # They take the op apart first, and come back with its parts, collectives among them.
            return NotImplemented
        return func(*args, **(kwargs or {}))
