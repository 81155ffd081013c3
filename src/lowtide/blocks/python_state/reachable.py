"""What a block can reach in Python: everything that may hold its state, found by following references.

Followed are attributes, containers, closures, defaults, class attributes, context variables, and the global names that
the code of the block reads and sets, there and a few files further. Objects of PyTorch, numpy and Python's own packages
are tools and not state, except for those that only hold what is put into them.
"""

from __future__ import annotations

import dis
import enum
import functools
import sys
import threading
import types
import weakref
from collections import UserDict, UserList
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from queue import Queue
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.autograd import Function

from lowtide.blocks.policy import PYTHON_STATE
from lowtide.blocks.python_state.derived_weights import derived_names
from lowtide.blocks.python_state.restorable_types import (
    EMPTY_IS_FALSE,
    NOT_STATE,
    ArrayBytes,
    Attributes,
    Buffers,
    ClosureCell,
    ContextVariable,
    Entries,
    Holder,
    Items,
    LargeContainer,
    Named,
    container,
    is_array,
    is_large,
    is_opaque,
    stream,
)
from lowtide.pytorch.modules import PARTS, STANDARD, buffers, children, hooks_of_all_modules, parameters

# How a thing is reached: the path before, a key, and how it is written; the empty path is the block.
Path = tuple[Any, ...]
_SIMPLE = (int, float, complex, str, bytes, bool, type(None), types.ModuleType, types.BuiltinFunctionType)
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


def is_plain(value: Any) -> bool:
    """Return True if a value that a block is given cannot remember anything."""
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    if isinstance(value, (*_SIMPLE, Tensor)):
        return True
    return not (
        container(value) is not None or stream(value) is not None or is_array(value) or is_followed(type(value))
    )


def named(path: Path) -> str:
    """Return a path as people write it."""
    text = ""
    while path:
        path, key, kind = path
        text = (f".{key}" if kind == "." else f"[{key!r:.40}]" if kind == "[" else f" {key}") + text
    return text.strip(" .")


class Reachable:
    """Everything that can be reached from some blocks.

    Attributes:
        holders: What holds state that is compared in every run and can be restored.
        empty: Containers with nothing in them; that they still are can be asked of all at once.
        structure: Parameters and submodules of modules, which must not change.
        tensors: All tensors, by identity.
        opaque: Where the first thing is that cannot be restored, such as an iterator.
        large: What is too large to be compared in every run.
    """

    def __init__(self, roots: Sequence[Any]) -> None:
        self.holders: list[Holder] = []
        self.empty: list[Any] = []
        self.structure: list[tuple[Path, Holder]] = []
        self.tensors: dict[int, tuple[Path, Tensor]] = {}
        self.opaque: Path | None = None
        self.large: list[tuple[Path, Holder]] = []
        self._seen: set[int] = set()
        self._own = {id(root) for root in roots}
        self._files: dict[int, int] = {}
        everywhere = hooks_of_all_modules()
        self._stack: list[tuple[Path, Any]] = [
            *((((), "hooks of all modules", " "), hooks) for hooks in (everywhere.forward, everywhere.forward_pre)),
            *(((), root) for root in reversed(roots)),
        ]
        # What is made on the way must not share its identity with something else.
        self._alive: list[Any] = []
        while self._stack and len(self._seen) < PYTHON_STATE.things:
            path, thing = self._stack.pop()
            if not isinstance(thing, _SIMPLE) and id(thing) not in self._seen:
                self._seen.add(id(thing))
                self._visit(path, thing)

    def _visit(self, path: Path, thing: Any) -> None:
        if isinstance(thing, Tensor):
            self.tensors[id(thing)] = (path, thing)
        elif isinstance(thing, nn.Module):
            self._module(path, thing)
        elif isinstance(thing, types.FunctionType):
            self._function(path, thing)
        elif isinstance(thing, type):
            if not issubclass(thing, enum.Enum | BaseException):
                self._classes(path, thing, functions=issubclass(thing, Function))
        elif isinstance(thing, ContextVar):
            self.holders.append(ContextVariable(thing))
            self._stack.append((path, thing.get(None)))
        elif isinstance(thing, types.MethodType):
            self._own_too(thing, thing.__self__)
            self._stack += [(path, thing.__self__), (path, thing.__func__)]
        elif isinstance(thing, functools.partial):
            inside = (thing.func, *thing.args, *thing.keywords.values())
            self._own_too(thing, *inside)
            self._stack += [(path, each) for each in inside]
        elif isinstance(thing, tuple | frozenset):
            self._stack += [((path, index, "["), each) for index, each in enumerate(thing)]
        elif (holder := container(thing)) is not None:
            self._container(path, thing, holder)
        elif (generator := stream(thing)) is not None:
            self.holders.append(generator)
        elif is_array(thing):
            if is_large(thing):
                self.large.append((path, ArrayBytes(thing)))
            else:
                self.holders.append(ArrayBytes(thing))
        elif isinstance(thing, weakref.ref):
            self._stack.append((path, thing()))
        elif is_opaque(thing):
            self.opaque = self.opaque or path
        elif is_followed(type(thing)):
            self._object(path, thing)

    def _own_too(self, thing: Any, *others: Any) -> None:
        """Treat what belongs to a block as the block itself."""
        if id(thing) in self._own:
            self._own.update(map(id, others))
            self._alive += others

    def _container(self, path: Path, thing: Any, holder: Any) -> None:
        if type(thing) in EMPTY_IS_FALSE and not thing:
            self.empty.append(thing)
            return
        self.holders.append(holder)
        if isinstance(holder, LargeContainer):
            self.large.append((path, Entries(holder.thing) if isinstance(thing, dict) else Items(holder.thing)))
        else:
            pairs = holder.thing.items() if isinstance(thing, dict) else enumerate(holder.thing)
            self._stack += [((path, key, "["), value) for key, value in pairs if not isinstance(value, _SIMPLE)]
        if is_followed(type(thing)) and getattr(thing, "__dict__", None):
            self._attributes(path, vars(thing))

    def _attributes(self, path: Path, own: dict[str, Any]) -> None:
        self.holders.append(Entries(own))
        self._stack += [((path, name, "."), value) for name, value in own.items() if not isinstance(value, _SIMPLE)]

    def _module(self, path: Path, module: nn.Module) -> None:
        own, derived = vars(module), derived_names(module)
        own_parameters = parameters(module)
        if not isinstance(own_parameters, dict) or "training" not in own:
            # Compiled and scripted modules look like modules but keep things elsewhere.
            self._unusual(path, module)
            return
        own_buffers, own_children = buffers(module), children(module)
        self.holders.append(Attributes(own, [name for name in own if name not in NOT_STATE]))
        for name, value in own.items():
            if name in STANDARD:
                self._standard((path, name, "."), value)
            elif not isinstance(value, _SIMPLE) and name not in derived:
                self._stack.append(((path, name, "."), value))
        self.structure += [(path, Entries(own_parameters))] if own_parameters else []
        self.holders += [Buffers(own_buffers)] if own_buffers else []
        if id(module) in self._own:
            there = [(name, child) for name, child in own_children.items() if child is not None]
            self._own.update(id(child) for _, child in there)
            self._stack += [((path, name, "."), child) for name, child in reversed(there)]
        self.structure += [(path, Entries(own_children))] if own_children else []
        self.empty += [each for each in (own_parameters, own_buffers, own_children) if not each]
        self._classes(path, type(module))

    def _unusual(self, path: Path, module: nn.Module) -> None:
        own = {id(child): ((path, name, "."), child) for name, child in module.named_children()}
        self._own.update(own)
        self._stack += own.values()

    def _standard(self, path: Path, value: Any) -> None:
        """Follow one of the dictionaries of hooks that every module has."""
        if isinstance(value, dict | set) and path[1] not in PARTS:
            if value:
                self._stack.append((path, value))
            else:
                self.empty.append(value)

    def _object(self, path: Path, thing: Any) -> None:
        if isinstance(getattr(thing, "__dict__", None), dict):
            self._attributes(path, vars(thing))
        if slots := slots_of(type(thing)):
            self.holders.append(Named(thing, slots))
            self._stack += [((path, name, "."), getattr(thing, name, None)) for name in slots]
        self._classes(path, type(thing), functions=id(thing) in self._own)

    def _classes(self, path: Path, kind: type, *, functions: bool = True) -> None:
        for each in own_classes(kind):
            if each is kind or id(each) not in self._seen:
                self._seen.add(id(each))
                names = data_names(each)
                if names:
                    self.holders.append(Named(each, names))
                    self._stack += [((path, name, "."), vars(each)[name]) for name in names]
        for function in functions_of(kind) if functions else ():
            self._files.setdefault(id(function), 0)
            self._stack.append((path, function))

    def _function(self, path: Path, function: types.FunctionType) -> None:
        variables = function.__code__.co_freevars
        files = self._files.setdefault(id(function), 0 if id(function) in self._own else PYTHON_STATE.files)
        for name, cell in zip(variables, function.__closure__ or (), strict=True):
            if id(cell) not in self._seen:
                self._seen.add(id(cell))
                self.holders.append(ClosureCell(cell))
                contents = ClosureCell(cell).read()
                self._own_too(function, *contents)
                self._files.update((id(value), files) for value in contents if isinstance(value, types.FunctionType))
                self._stack += [((path, name, " "), value) for value in contents]
        if is_tool(function):
            return
        read, sets = global_names(function.__code__)
        around = function.__globals__
        if sets:
            self.holders.append(Named(around, sorted(sets)))
        for name in read:
            value = around.get(name)
            if isinstance(value, type | types.FunctionType):
                far = files + (value.__module__ != function.__module__)
                if far > PYTHON_STATE.files:
                    continue
                self._files.setdefault(id(value), far)
            self._stack.append(((path, name, " "), value))
        if function.__dict__:
            self._attributes(path, function.__dict__)
        else:
            self.empty.append(function.__dict__)
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        self._stack += [(path, value) for value in defaults]
