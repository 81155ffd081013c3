"""Holders: one class for each kind of thing that holds Python state. Each reads, compares and restores it."""

from __future__ import annotations

import array
import functools
import pickle
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from operator import is_, itemgetter
from typing import Any, Protocol

import torch

from lowtide.blocks.policy import PYTHON_STATE
from lowtide.pytorch.modules import STANDARD

_MISSING: Any = object()
_TRAINING = "training"
# lowtide puts a `forward` of its own into modules, and takes it out, also while a call is under way.
NOT_STATE = STANDARD | {"forward"}


class Holder(Protocol):
    """One thing that holds state."""

    def read(self) -> Any:
        """Return what it holds."""

    def same(self, content: Any) -> bool:
        """Return True if it still holds `content`."""

    def write(self, content: Any) -> None:
        """Make it hold `content`."""


class _Held:
    __slots__ = ("thing",)

    def __init__(self, thing: Any) -> None:
        self.thing = thing


class Entries(_Held):
    """A dictionary: its entries."""

    __slots__ = ()

    def read(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return keys and values."""
        return tuple(self.thing), tuple(self.thing.values())

    def same(self, content: Any) -> bool:
        """Return True if keys and values are the same objects."""
        keys, values = content
        thing = self.thing
        return len(thing) == len(keys) and all(map(is_, thing.values(), values)) and all(map(is_, thing, keys))

    def write(self, content: Any) -> None:
        """Put entries back; those that are in place stay."""
        keys, values = content
        thing = self.thing
        if tuple(thing) == keys:
            for key, value in zip(keys, values, strict=True):
                if thing[key] is not value:
                    thing[key] = value
            return
        thing.clear()
        for key, value in zip(keys, values, strict=True):
            thing[key] = value


class Attributes:
    """The attributes of a module, without those that every module has, and without `forward`."""

    __slots__ = ("_get", "_names", "_size", "thing")

    def __init__(self, thing: dict[str, Any], names: Sequence[str]) -> None:
        self.thing, self._names = thing, tuple(names)
        self._size = len(thing)
        # Two at least, for one alone would not come in a tuple.
        self._get = itemgetter(_TRAINING, _TRAINING, *names)

    def read(self) -> tuple[Any, ...]:
        """Return their values."""
        found: tuple[Any, ...] = self._get(self.thing)
        return found

    def same(self, content: Any) -> bool:
        """Return True if they are the same objects."""
        thing = self.thing
        try:
            return len(thing) == self._size and all(map(is_, self._get(thing), content))
        except KeyError:
            return False

    def write(self, content: Any) -> None:
        """Put them back, and take away what was added."""
        wanted = dict(zip((_TRAINING, *self._names), content[1:], strict=True))
        for name in [name for name in self.thing if name not in wanted and name not in NOT_STATE]:
            del self.thing[name]
        for name, value in wanted.items():
            if self.thing.get(name, _MISSING) is not value:
                self.thing[name] = value


class Buffers(_Held):
    """The buffers of a module: their names and which are None. `side_effects` restores their contents."""

    __slots__ = ()

    def read(self) -> dict[str, Any]:
        """Return a copy."""
        return dict(self.thing)

    def same(self, content: Any) -> bool:
        """Return True if there are the same buffers."""
        thing = self.thing
        return thing.keys() == content.keys() and all(
            (thing[name] is None) == (value is None) for name, value in content.items()
        )

    def write(self, content: Any) -> None:
        """Take out buffers that were added and put back those that are missing."""
        for name in [name for name in self.thing if name not in content]:
            del self.thing[name]
        for name, value in content.items():
            if name not in self.thing or (self.thing[name] is None) != (value is None):
                self.thing[name] = value


class Items(_Held):
    """A list or a deque."""

    __slots__ = ()

    def read(self) -> tuple[Any, ...]:
        """Return what is in it."""
        return tuple(self.thing)

    def same(self, content: Any) -> bool:
        """Return True if the same objects are in it."""
        return len(self.thing) == len(content) and all(map(is_, self.thing, content))

    def write(self, content: Any) -> None:
        """Put them back."""
        self.thing.clear()
        self.thing.extend(content)


class LargeContainer(_Held):
    """A container with too many entries to compare in every run."""

    __slots__ = ()

    def read(self) -> tuple[int, Any]:
        """Return their number and a copy."""
        return len(self.thing), self.thing.copy()

    def same(self, content: Any) -> bool:
        """Return True if the number is the same."""
        return bool(len(self.thing) == content[0])

    def write(self, content: Any) -> None:
        """Put all back."""
        self.thing.clear()
        self.thing.extend(content[1]) if hasattr(self.thing, "extend") else self.thing.update(content[1])


class Members(_Held):
    """A set."""

    __slots__ = ()

    def read(self) -> frozenset[Any]:
        """Return its members."""
        return frozenset(self.thing)

    def same(self, content: Any) -> bool:
        """Return True if it has the same members."""
        return bool(self.thing == content)

    def write(self, content: Any) -> None:
        """Put them back."""
        self.thing.clear()
        self.thing.update(content)


class ContextVariable(_Held):
    """A context variable."""

    __slots__ = ()

    def read(self) -> Any:
        """Return its value."""
        return self.thing.get(_MISSING)

    def same(self, content: Any) -> bool:
        """Return True if it has the same value."""
        return self.read() is content

    def write(self, content: Any) -> None:
        """Set it; it cannot be made unset, but that it is None shows."""
        self.thing.set(None if content is _MISSING else content)


class ClosureCell(_Held):
    """A variable that functions share."""

    __slots__ = ()

    def read(self) -> tuple[Any, ...]:
        """Return its contents, if it has any."""
        try:
            return (self.thing.cell_contents,)
        except ValueError:
            return ()

    def same(self, content: Any) -> bool:
        """Return True if it has the same contents."""
        now = self.read()
        return len(now) == len(content) and all(map(is_, now, content))

    def write(self, content: Any) -> None:
        """Set it."""
        if content:
            self.thing.cell_contents = content[0]
        else:
            del self.thing.cell_contents


class Named:
    """Some names of an object, a class or the global variables of a file."""

    __slots__ = ("_names", "thing")

    def __init__(self, thing: Any, names: Sequence[str]) -> None:
        self.thing, self._names = thing, tuple(names)

    def read(self) -> tuple[Any, ...]:
        """Return what the names stand for."""
        if isinstance(self.thing, dict):
            return tuple(self.thing.get(name, _MISSING) for name in self._names)
        if isinstance(self.thing, type):
            return tuple(vars(self.thing).get(name, _MISSING) for name in self._names)
        return tuple(getattr(self.thing, name, _MISSING) for name in self._names)

    def same(self, content: Any) -> bool:
        """Return True if they stand for the same objects."""
        return all(map(is_, self.read(), content))

    def write(self, content: Any) -> None:
        """Set those that have changed."""
        for name, now, value in zip(self._names, self.read(), content, strict=True):
            if now is not value:
                self._set(name, value)

    def _set(self, name: str, value: Any) -> None:
        if isinstance(self.thing, dict):
            self.thing[name] = value
            if value is _MISSING:
                del self.thing[name]
        elif value is _MISSING:
            delattr(self.thing, name)
        elif isinstance(self.thing, type):
            setattr(self.thing, name, value)
        else:
            object.__setattr__(self.thing, name, value)


class RandomStream(_Held):
    """A generator of random numbers: torch's or Python's."""

    __slots__ = ()

    def read(self) -> Any:
        """Return its state."""
        if isinstance(self.thing, torch.Generator):
            return self.thing.get_state().numpy().tobytes()
        return self.thing.getstate()

    def same(self, content: Any) -> bool:
        """Return True if nothing was drawn."""
        return bool(self.read() == content)

    def write(self, content: Any) -> None:
        """Set its state."""
        if isinstance(self.thing, torch.Generator):
            self.thing.set_state(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        else:
            self.thing.setstate(content)


class NumpyStream(_Held):
    """A generator of random numbers of numpy's."""

    __slots__ = ()

    def read(self) -> Any:
        """Return its state, in a form that can be compared."""
        if hasattr(self.thing, "get_state"):
            found = self.thing.get_state(legacy=False)
            if found["bit_generator"] == "MT19937":
                return found["state"]["key"].tobytes(), found["state"]["pos"], found["has_gauss"], found["gauss"]
            return pickle.dumps(found)
        return pickle.dumps(self._bits.state)

    @property
    def _bits(self) -> Any:
        return getattr(self.thing, "bit_generator", self.thing)

    def same(self, content: Any) -> bool:
        """Return True if nothing was drawn."""
        return bool(self.read() == content)

    def write(self, content: Any) -> None:
        """Set its state."""
        if isinstance(content, tuple):
            key, *rest = content
            numpy = sys.modules["numpy"]
            self.thing.set_state(("MT19937", numpy.frombuffer(key, numpy.uint32), *rest))
        elif hasattr(self.thing, "set_state"):
            self.thing.set_state(pickle.loads(content))
        else:
            self._bits.state = pickle.loads(content)


class ArrayBytes(_Held):
    """An array of numpy's or of bytes."""

    __slots__ = ()

    def read(self) -> bytes:
        """Return its bytes."""
        return bytes(self.thing) if isinstance(self.thing, bytearray) else self.thing.tobytes()

    def same(self, content: Any) -> bool:
        """Return True if it has the same bytes."""
        return bool(self.read() == content)

    def write(self, content: Any) -> None:
        """Put them back."""
        if isinstance(self.thing, bytearray):
            self.thing[:] = content
        elif isinstance(self.thing, array.array):
            self.thing[:] = array.array(self.thing.typecode, content)
        else:
            numpy = sys.modules["numpy"]
            self.thing[...] = numpy.frombuffer(content, self.thing.dtype).reshape(self.thing.shape)


def stream(thing: Any) -> Holder | None:
    """Return the holder for a generator of random numbers; None if it is none."""
    if isinstance(thing, torch.Generator | random.Random):
        return None if isinstance(thing, random.SystemRandom) else RandomStream(thing)
    if _is_numpy(thing, "random") and any(hasattr(thing, name) for name in ("bit_generator", "get_state", "state")):
        return NumpyStream(thing)
    return None


def is_array(thing: Any) -> bool:
    """Return True if `thing` is an array that can be written to."""
    if isinstance(thing, bytearray | array.array):
        return True
    return _is_numpy(thing, "") and hasattr(thing, "flags") and bool(thing.dtype != object and thing.flags.writeable)


def is_large(thing: Any) -> bool:
    """Return True if an array is too large to be compared in every run."""
    return memoryview(thing).nbytes > PYTHON_STATE.array_bytes


def _is_numpy(thing: Any, part: str) -> bool:
    return type(thing).__module__.startswith(f"numpy.{part}" if part else "numpy")


def is_opaque(thing: Any) -> bool:
    """Return True if `thing` goes on with every use and cannot be set back, as iterators do."""
    kind = type(thing)
    return isinstance(thing, types.GeneratorType) or (
        hasattr(kind, "__next__") and kind.__module__ in ("builtins", "itertools")
    )


class Underneath:
    """A container of a class that reads and writes in its own way, as Python's own class beneath it does.

    Such methods may do anything: registries, for instance, import what is looked at.
    """

    __slots__ = ("_base", "_thing")

    def __init__(self, thing: Any, base: type) -> None:
        self._thing, self._base = thing, base

    def __getattr__(self, name: str) -> Any:
        return functools.partial(getattr(self._base, name), self._thing)

    def __len__(self) -> int:
        return int(self.__getattr__("__len__")())

    def __iter__(self) -> Iterator[Any]:
        found: Iterator[Any] = self.__getattr__("__iter__")()
        return found

    def __getitem__(self, key: Any) -> Any:
        return self.__getattr__("__getitem__")(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.__getattr__("__setitem__")(key, value)

    def __eq__(self, other: object) -> bool:
        return bool(self.__getattr__("__eq__")(other))

    __hash__ = None  # type: ignore[assignment]


@functools.lru_cache(maxsize=PYTHON_STATE.cached_types)
def _base_beneath(kind: type) -> type | None:
    """Return the class of Python's own that `kind` is of, if `kind` replaces methods of it; else None."""
    base = next(each for each in _CONTAINERS if issubclass(kind, each))
    between = kind.__mro__[: kind.__mro__.index(base)]
    replaced = {name for each in between for name, value in vars(each).items() if isinstance(value, types.FunctionType)}
    return base if any(hasattr(base, name) for name in replaced - {"__init__", "__init_subclass__"}) else None


def container(thing: Any) -> Holder | None:
    """Return the holder for a container; None if it is none."""
    if not isinstance(thing, _CONTAINERS):
        return None
    base = _base_beneath(type(thing))
    plain = thing if base is None else Underneath(thing, base)
    if len(plain) > PYTHON_STATE.entries:
        return LargeContainer(plain)
    if isinstance(thing, dict):
        return Entries(plain)
    return Items(plain) if isinstance(thing, list | deque) else Members(plain)


# Those that others are of come last.
_CONTAINERS = (OrderedDict, dict, list, set, deque)
EMPTY_IS_FALSE = _CONTAINERS
