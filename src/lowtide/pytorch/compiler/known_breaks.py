"""Dynamo: a module in whose call the graph was cut is not traced into again from outside.

Where the tracer cannot go on inside of an inlined call, it cuts the graph at the outermost function and traces the next
one inside by itself, up to the same place, and so on: as often as there are functions around it, each time with all
that comes before. Once a call is known to cut the graph, the functions around it are cut there at once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

from torch import nn
from torch._dynamo.exc import Unsupported
from torch._dynamo.symbolic_convert import InliningInstructionTranslator
from torch._dynamo.variables import LazyVariableTracker, UnspecializedNNModuleVariable, UserMethodVariable

# Code that was called with a module first, by the module's `id`; and what the tracer said.
KnownBreaks = dict[tuple[CodeType, int], str]


class _Noted(threading.local):
    """Where breaks are noted in this thread, if they are."""

    here: KnownBreaks | None = None


_noted = _Noted()


@contextmanager
def noting_breaks(known: KnownBreaks | None) -> Iterator[None]:
    """Note calls that cut graphs in `known`, in this thread, and do not trace into those that are there."""
    before, _noted.here = _noted.here, known
    try:
        yield
    finally:
        _noted.here = before


def note_breaks() -> None:
    """Let the tracer note breaks, from now on, wherever it is told to."""
    plain: Any = InliningInstructionTranslator.inline_call.__func__  # type: ignore[attr-defined]

    def inline_call(cls: Any, /, parent: Any, func: Any, args: Any, kwargs: Any, **more: Any) -> Any:
        known = _noted.here
        key = None if known is None else _key(func, args)
        if known is None or key is None:
            return plain(cls, parent, func, args, kwargs, **more)
        if key in known:
            raise Unsupported(known[key], "A call that cuts the graph")
        try:
            return plain(cls, parent, func, args, kwargs, **more)
        except Unsupported as error:
            if not error.skip_frame:
                known[key] = error.msg
            raise

    InliningInstructionTranslator.inline_call = classmethod(inline_call)  # type: ignore[assignment, method-assign]


def _key(func: Any, args: Any) -> tuple[CodeType, int] | None:
    """Return the code that is called and the module that it is called with first, or None if that is no module."""
    first: Any = _receiver(func) if isinstance(func, UserMethodVariable) else next(iter(args), None)
    # What nothing was asked of yet is only looked at: the tracer guards what it is asked.
    lazy = type(first) is LazyVariableTracker
    value = first.peek_value() if lazy and not first.is_realized() else _module(first.unwrap() if lazy else first)
    return (func.get_code(), id(value)) if isinstance(value, nn.Module) else None


def _receiver(method: Any) -> Any:
    """Return what a traced method is bound to. It was `obj` before PyTorch 2.15."""
    return method.im_self if hasattr(method, "im_self") else method.obj


def _module(variable: Any) -> Any:
    """Return the module that a traced variable stands for, or None if it is no module."""
    return variable.value if isinstance(variable, UnspecializedNNModuleVariable) else None
