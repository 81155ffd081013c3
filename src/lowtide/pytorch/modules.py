"""Calls of modules: the one with hooks, the slot in which PyTorch keeps another one, hooks of all modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules import module as all_modules

Call = Callable[..., Any]


def plain_call(module: nn.Module) -> Call:
    """Return the call of `module` with its hooks, which does not look into the slot."""
    return module._call_impl


def call_in_slot(module: nn.Module) -> Call | None:
    """Return what runs in the place of the plain call, or None."""
    return module._compiled_call_impl


def put_in_slot(module: nn.Module, call: Call | None) -> None:
    """Let calls of `module` run `call`, or the plain call if it is None."""
    module._compiled_call_impl = call


def global_hooks() -> tuple[tuple[int, ...], ...]:
    """Return the numbers of the hooks that run for every module; the compiler traces them but does not guard them."""
    found = (
        all_modules._global_forward_pre_hooks,
        all_modules._global_forward_hooks,
        all_modules._global_backward_pre_hooks,
        all_modules._global_backward_hooks,
    )
    return tuple(map(tuple, found))
