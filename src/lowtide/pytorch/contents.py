"""What a module or a plain function is made of: modules, parameters and loose tensors."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lowtide.pytorch.modules import children, parameters_in

_SIMPLE = (int, float, complex, str, bytes, bool, type(None))


@dataclass(frozen=True, eq=False)
class Contents:
    """Modules and loose tensors that a module or function refers to.

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


def contents_of(called: Callable[..., Any]) -> Contents:
    """Return what `called` refers to.

    For a module these are its submodules; for a function all that it finds in its closure, defaults, globals, bound
    object or fixed arguments.
    """
    modules: dict[int, nn.Module] = {}
    tensors: dict[int, Tensor] = {}
    seen: set[int] = set()
    stack: list[Any] = [called]
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
