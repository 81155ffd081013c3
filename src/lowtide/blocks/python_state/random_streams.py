"""The global random generators of Python and numpy, which a block may use beside those of PyTorch."""

from __future__ import annotations

import ctypes
import random
import sys
from typing import Any

from lowtide.blocks.python_state.restorable_types import Holder, NumpyStream, RandomStream

StreamStates = tuple[Any, ...]
# What numpy's usual generator keeps: 624 words and a place among them.
_BYTES = 625 * 4


def _numpy() -> Any:
    """Return the generator behind `numpy.random`, if numpy is there."""
    found = sys.modules.get("numpy.random")
    return None if found is None else found.mtrand._rand


def _streams() -> list[Holder]:
    found: list[Holder] = [RandomStream(random._inst)]
    numpy = _numpy()
    return found if numpy is None else [*found, NumpyStream(numpy)]


def read_streams() -> StreamStates:
    """Return the states of the global generators of Python and of numpy, if it is there."""
    return tuple(stream.read() for stream in _streams())


def restore_streams(states: StreamStates) -> None:
    """Set the global generators of Python and numpy, where they have changed."""
    for stream, state in zip(_streams(), states, strict=False):
        if not stream.same(state):
            stream.write(state)


def mark_streams() -> StreamStates:
    """Return what shows whether they were drawn from; it takes less time than reading their states."""
    mark: StreamStates = (random.getstate(),)
    numpy = _numpy()
    if numpy is None:
        return mark
    bits = numpy._bit_generator
    if type(bits).__name__ != "MT19937":
        return (*mark, NumpyStream(numpy).read())
    return (*mark, ctypes.string_at(bits.ctypes.state_address, _BYTES))
