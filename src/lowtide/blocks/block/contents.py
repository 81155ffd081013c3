"""What a block is made of: modules, parameters and buffers, also those that a plain function refers to."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lowtide.blocks.block.tensor_spec import Block, spec_of
from lowtide.pytorch.modules import (
    buffers,
    children,
    forward_hooks,
    forward_pre_hooks,
    parameters,
    parameters_in,
)

_SIMPLE = (int, float, complex, str, bytes, bool, type(None))
# Attributes that number the layers of a model.
_NUMBERS = frozenset({"layer_idx", "layer_id", "layer_index", "layer_number"})
_NORMS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)


@dataclass(frozen=True, eq=False)
class Contents:
    """Modules and loose tensors that a block refers to.

    Attributes:
        modules: All modules, each once, submodules included.
        tensors: Tensors that a function refers to directly.
    """

    modules: tuple[nn.Module, ...]
    tensors: tuple[Tensor, ...]

    def parameters(self) -> list[Tensor]:
        """Return parameters and loose tensors, each once."""
        found = (*parameters_in(self.modules), *self.tensors)
        return list({id(tensor): tensor for tensor in found}.values())


def contents_of(block: Block) -> Contents:
    """Return what `block` is made of.

    For a module these are its submodules; for a function all that it finds in its closure, defaults, globals, bound
    object or fixed arguments.
    """
    modules: dict[int, nn.Module] = {}
    tensors: dict[int, Tensor] = {}
    seen: set[int] = set()
    stack: list[Any] = [block]
    while stack:
        thing = stack.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, nn.Module):
            modules[id(thing)] = thing
            stack += [child for child in reversed(list(children(thing).values())) if child is not None]
        elif isinstance(thing, Tensor):
            tensors[id(thing)] = thing
        else:
            stack += _referred(thing)
    return Contents(tuple(modules.values()), tuple(tensors.values()))


def _referred(thing: Any) -> Iterable[Any]:
    """Return what a function or a plain container refers to."""
    if isinstance(thing, functools.partial):
        return [thing.func, *thing.args, *thing.keywords.values()]
    if isinstance(thing, types.MethodType):
        return [thing.__func__, thing.__self__]
    if isinstance(thing, types.FunctionType):
        return _of_function(thing)
    if isinstance(thing, list | tuple | set | frozenset):
        return list(thing)
    if isinstance(thing, dict):
        return list(thing.values())
    if isinstance(thing, type | types.ModuleType) or not hasattr(thing, "__dict__"):
        return []
    return [value for value in vars(thing).values() if _may_hold_tensors(value)]


def _of_function(function: types.FunctionType) -> list[Any]:
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    names = [name for name in function.__code__.co_names if name in function.__globals__]
    found = [function.__globals__[name] for name in names]
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return [value for value in (*cells, *found, *defaults) if _may_hold_tensors(value)]


def _may_hold_tensors(value: Any) -> bool:
    return not isinstance(value, (*_SIMPLE, types.ModuleType, type, types.BuiltinFunctionType))


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def statistics_norms(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the normalisations that update running statistics in training but do not read them."""
    return [module for module in modules if type(module) in _NORMS and module.track_running_stats]


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
