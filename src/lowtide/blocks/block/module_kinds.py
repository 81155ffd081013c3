"""Modules in blocks: which of them cost the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from lowtide.blocks.block.tensor_spec import spec_of
from lowtide.pytorch.modules import buffers, children, forward_hooks, forward_pre_hooks, parameters

_SIMPLE = (int, float, complex, str, bytes, bool, type(None))
# Attributes that number the layers of a model.
_NUMBERS = frozenset({"layer_idx", "layer_id", "layer_index", "layer_number"})


def module_key(module: nn.Module) -> tuple[Any, ...]:
    """Return what two modules must share to cost the same: classes, settings, and what their tensors are."""
    return tuple(_own_key(each, path) for path, each in _walk(module))


def _walk(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    stack = [("", module)]
    while stack:
        path, each = stack.pop()
        yield path, each
        stack += [(f"{path}.{name}", child) for name, child in children(each).items() if child is not None]


def _own_key(module: nn.Module, path: str) -> tuple[Any, ...]:
    owned = (("parameters", parameters(module)), ("buffers", buffers(module)))
    tensors = tuple((kind, name, spec_of(t)) for kind, own in owned for name, t in own.items() if t is not None)
    settings = tuple(
        (name, _comparable(value))
        for name, value in sorted(vars(module).items())
        if not name.startswith("_") and name not in _NUMBERS
    )
    hooks = tuple(map(id, (*forward_hooks(module).values(), *forward_pre_hooks(module).values())))
    return path, type(module), module.training, tensors, settings, hooks


def _comparable(value: Any) -> Any:
    """Return `value` if it can be compared, else its identity."""
    if isinstance(value, _SIMPLE):
        return type(value), value
    if isinstance(value, tuple):
        return tuple(map(_comparable, value))
    return id(value)
