"""Snapshots of what a block remembers in Python: attributes, lists, counters, closures, random generators.

A snapshot is taken before and after a run. If nothing has changed, both are the same object, which costs a few
comparisons of identity for every module. If something has, everything is followed again. Tensors are compared by
identity and version; their contents are not copied.
"""

from __future__ import annotations

import copy
import enum
import functools
import types
import weakref
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function

from lowtide.blocks import refusals as refused
from lowtide.blocks.policy import PYTHON_STATE
from lowtide.blocks.python_state.derived_weights import derived_names
from lowtide.blocks.python_state.function_names import (
    data_names,
    functions_of,
    global_names,
    is_followed,
    is_tool,
    own_classes,
    slots_of,
)
from lowtide.blocks.python_state.holders import (
    EMPTY_IS_FALSE,
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
from lowtide.errors import InvalidModelError
from lowtide.pytorch.module_parts import PARTS, STANDARD, buffers, children, hooks_of_all_modules, parameters
from lowtide.pytorch.tensor_versions import version_of

_SIMPLE = (int, float, complex, str, bytes, bool, type(None), types.ModuleType, types.BuiltinFunctionType)
Path = tuple[Any, ...]


class Snapshot:
    """What the things that a block can reach hold at one moment."""

    __slots__ = ("_held", "empty", "large", "opaque", "structure", "tensors", "versions")

    def __init__(self, found: _Walk) -> None:
        self.empty = found.empty
        self.structure = [(path, holder, holder.read()) for path, holder in found.structure]
        self._held = [(holder, holder.read()) for holder in found.holders]
        self._held += [(holder, known) for _, holder, known in self.structure]
        self.tensors: dict[int, tuple[Path, Tensor]] = found.tensors
        self.versions = {key: version_of(tensor) for key, (_, tensor) in found.tensors.items()}
        self.opaque = found.opaque
        self.large = found.large

    def holds(self) -> bool:
        """Return True if everything still holds what it held then."""
        if any(self.empty):
            return False
        return all(holder.same(known) for holder, known in self._held)

    def restore(self) -> None:
        """Make everything hold again what it held then."""
        for each in self.empty:
            if each:
                each.clear()
        for holder, known in self._held:
            if not holder.same(known):
                holder.write(known)

    def renewed(self) -> Snapshot:
        """Return the same with the present versions of tensors."""
        found = copy.copy(self)
        found.versions = {key: version_of(tensor) for key, (_, tensor) in self.tensors.items()}
        return found

    def overwritten(self) -> Path | None:
        """Return where the first tensor is that was changed in place since; None if there is none."""
        for key, (path, tensor) in self.tensors.items():
            if version_of(tensor) != self.versions[key]:
                return path
        return None

    def rebuilt(self) -> Path | None:
        """Return the module that has other parameters or submodules than then; None if there is none."""
        return next((path for path, holder, known in self.structure if not holder.same(known)), None)

    def new_tensors(self, before: Snapshot) -> list[tuple[Path, Tensor]]:
        """Return the tensors that were not there `before`."""
        return [found for key, found in self.tensors.items() if key not in before.tensors]


class PythonState:
    """The Python state of some blocks: read as a snapshot, restored from one."""

    __slots__ = ("_now", "_roots")

    def __init__(self, roots: Sequence[Any]) -> None:
        self._roots = tuple(roots)
        self._now: Snapshot | None = None

    def snapshot(self) -> Snapshot:
        """Return what they remember now; the same object as before if nothing has changed."""
        now = self._now
        if now is None or not now.holds():
            now = Snapshot(_Walk(self._roots))
        elif now.tensors and now.overwritten() is not None:
            now = now.renewed()
        self._now = now
        return now

    def restore(self, snapshot: Snapshot) -> None:
        """Make them remember what they did at `snapshot`."""
        snapshot.restore()
        self._now = snapshot

    def forget(self) -> None:
        """Drop the last snapshot, which keeps what it holds alive."""
        self._now = None


def why_not_repeatable(
    label: str, before: Snapshot, after: Snapshot, *, recorded: bool, known: bool
) -> InvalidModelError | None:
    """Return why a run that led from `before` to `after` could not be repeated; None if it could.

    Tensors that a run without gradients stores look as if they needed none. They are allowed if it is `known` from a
    run that was `recorded` that they do not.
    """
    if (path := before.rebuilt()) is not None:
        return refused.rebuilt(label, named(path))
    if (path := before.overwritten()) is not None:
        return refused.overwritten(label, named(path))
    for path, tensor in after.new_tensors(before) if after is not before else ():
        if tensor.requires_grad and not tensor.is_leaf:
            return refused.stored(label, named(path))
        if not (recorded or known) and tensor.is_floating_point():
            return refused.stored_late(label, named(path))
    return None


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


class _Walk:
    """Goes through everything that can be reached from some blocks."""

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
        # A path is the path before, a key, and how it is written; the empty path is the block.
        self._stack: list[tuple[Path, Any]] = [
            *((((), "hooks of all modules", " "), hooks) for hooks in hooks_of_all_modules()),
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

    def _container(self, path: Path, thing: Any, holder: Holder) -> None:
        if not thing and type(thing) in EMPTY_IS_FALSE:
            self.empty.append(thing)
            return
        self.holders.append(holder)
        if isinstance(holder, LargeContainer):
            self.large.append((path, Entries(thing) if isinstance(thing, dict) else Items(thing)))
        else:
            pairs = thing.items() if isinstance(thing, dict) else enumerate(thing)
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
        self.holders.append(Attributes(own, [name for name in own if name not in STANDARD]))
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
