"""Names and types: which global names a function reads and sets, and the attributes of which types are followed."""

from __future__ import annotations

import dis
import enum
import functools
import sys
import threading
import types
from collections import UserDict, UserList
from collections.abc import Callable, Iterator
from queue import Queue
from typing import Any, TypeVar

from lowtide.blocks.policy import PYTHON_STATE

Key = TypeVar("Key")
Found = TypeVar("Found")
_READ, _SET = "LOAD_GLOBAL", ("STORE_GLOBAL", "DELETE_GLOBAL")
# Packages whose objects are tools of the program and not state of a block.
_TOOLS = (frozenset(sys.stdlib_module_names) - {"__main__"}) | {"torch", "numpy", "lowtide", "builtins"}
# Of Python's own classes, those that only hold what is put into them.
_PLAIN = (types.SimpleNamespace, UserDict, UserList, Queue, threading.local)
_DATA = (
    types.FunctionType,
    classmethod,
    staticmethod,
    property,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)


def _remembered(function: Callable[[Key], Found]) -> Callable[[Key], Found]:
    """Return `function`, which finds out about a type or a piece of code only once."""
    return functools.lru_cache(maxsize=PYTHON_STATE.cached_types)(function)


@_remembered
def global_names(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Return the global names that `code` and the functions in it read, and those that they set."""
    read, sets = set(), set()
    for instruction in dis.get_instructions(code):
        if instruction.opname == _READ:
            read.add(instruction.argval)
        elif instruction.opname in _SET:
            sets.add(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = global_names(constant)
            read |= inner[0]
            sets |= inner[1]
    return frozenset(read), frozenset(sets)


@_remembered
def is_followed(kind: type) -> bool:
    """Return True if attributes of objects of this type may be state of a block."""
    if issubclass(kind, _PLAIN):
        return True
    return not issubclass(kind, type | enum.Enum) and package(kind) not in _TOOLS


@_remembered
def package(thing: type | types.FunctionType) -> str:
    """Return the name of the package that a class or a function comes from."""
    return (getattr(thing, "__module__", None) or "builtins").partition(".")[0]


def is_tool(function: types.FunctionType) -> bool:
    """Return True if a function comes with PyTorch or Python."""
    return package(function) in _TOOLS


@_remembered
def own_classes(kind: type) -> tuple[type, ...]:
    """Return those of a type's classes that somebody has written for the model."""
    return tuple(each for each in kind.__mro__ if package(each) not in _TOOLS)


@_remembered
def functions_of(kind: type) -> tuple[types.FunctionType, ...]:
    """Return the functions that the model's own classes of a type define."""
    return tuple(function for each in own_classes(kind) for value in vars(each).values() for function in _plain(value))


def _plain(value: Any) -> Iterator[types.FunctionType]:
    if isinstance(value, classmethod | staticmethod):
        value = value.__func__
    if isinstance(value, property):
        yield from (each for each in (value.fget, value.fset) if isinstance(each, types.FunctionType))
    if isinstance(value, types.FunctionType):
        yield value


def data_names(kind: type) -> list[str]:
    """Return the names of a class that hold data and are no part of its definition."""
    return [
        name
        for name, value in vars(kind).items()
        if not name.startswith(("__", "_abc_")) and not isinstance(value, _DATA)
    ]


@_remembered
def slots_of(kind: type) -> tuple[str, ...]:
    """Return the names of the slots of a type's objects."""
    found: list[str] = []
    for each in own_classes(kind):
        slots = vars(each).get("__slots__", ())
        found += [slots] if isinstance(slots, str) else list(slots)
    return tuple(name for name in found if name not in ("__dict__", "__weakref__"))
