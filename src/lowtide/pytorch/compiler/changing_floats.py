"""Numbers with a fraction that a traced function is given: inputs of the graph once they change, constants before.

Shapes are constants for lowtide, and with them the compiler makes constants of all numbers. A float that comes out of a
tensor (`.item()`) is another one at every step, and the code behind it would be compiled at every step. So it becomes
an input when it is seen with a second value, as the compiler does by itself where shapes may change.

Zeros stay constants, each with its sign: to the compiler 0.0 and -0.0 are one, and as an input -0.0 loses its sign.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch._dynamo.pgo import FrameStateSizeEntry, auto_dynamic
from torch._dynamo.source import is_constant_source
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables import builder as variable_builder

from lowtide.pytorch.compiler.input_guards import guard_values

# What is seen of one function's floats: the first value of each, by the code and the name in it.
Floats = dict[tuple[Any, str], float]
_Process = Callable[..., FrameStateSizeEntry]
_Wrap = Callable[[Any, float], Any]


class _Active(threading.local):
    """The floats of the functions that this thread traces, innermost last."""

    def __init__(self) -> None:
        self.seen: list[Floats] = []


_active = _Active()


@contextmanager
def changing_floats(seen: Floats) -> Iterator[None]:
    """Make inputs of the floats that differ from those in `seen`, in what this thread traces."""
    _active.seen.append(seen)
    try:
        yield
    finally:
        _active.seen.pop()


def _process(plain: _Process, tx: Any, name: str, entry: FrameStateSizeEntry, **options: Any) -> FrameStateSizeEntry:
    found = plain(tx, name, entry, **options)
    value = entry.scalar
    if not _active.seen or not isinstance(value, float) or value == 0:
        return found
    if _active.seen[-1].setdefault((tx.f_code, name), value) == value:
        return found
    return FrameStateSizeEntry(auto_dynamic, found.size, found.stride)


def _wrap(plain: _Wrap, builder: Any, value: float) -> Any:
    variable = plain(builder, value)
    source = builder.get_source()
    if not _active.seen or is_constant_source(source):
        return variable
    if value == 0:
        guard_values(partial(_is_zero_of_sign, math.copysign(1, value)), [source], "the sign of a zero")
    elif not isinstance(variable, ConstantVariable):
        guard_values(_is_not_zero, [source], "a number that is not zero")
    return variable


def _is_zero_of_sign(sign: float, value: float) -> bool:
    return value == 0 and math.copysign(1, value) == sign


def _is_not_zero(value: float) -> bool:
    return value != 0


def _watch_floats() -> None:
    """Look at every float that the compiler meets; it has no hook for that, and contexts of threads would undo it."""
    variable_builder.process_automatic_dynamic = partial(_process, variable_builder.process_automatic_dynamic)  # type: ignore[attr-defined]
    plain = variable_builder.VariableBuilder.wrap_symfloat
    variable_builder.VariableBuilder.wrap_symfloat = lambda builder, value: _wrap(plain, builder, value)  # type: ignore[method-assign, assignment]


_watch_floats()
