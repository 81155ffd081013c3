"""Seeing every op that runs, also those of backward: a dispatch mode that changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.pytorch.nested import tensor_leaves


class OpWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside of it, what every op returns is shown to a function.

    Args:
        see: Is given the tensors.
        before: Is called before every op, and may raise to end the run.
    """

    def __init__(
        self, see: Callable[[list[torch.Tensor]], None] | None = None, *, before: Callable[[], None] | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._see = see
        self._before = before

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: what the compiler has made may run inside of it."""
        return True

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return what `func` returns."""
        if self._before is not None:
            self._before()
        result = func(*args, **(kwargs or {}))
        if self._see is not None:
            self._see(tensor_leaves(result))
        return result
