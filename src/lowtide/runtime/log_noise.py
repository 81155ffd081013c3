"""Suppresses PyTorch's messages while lowtide compiles: failures of the compiler are told in lowtide's own errors.

They come back with `LOWTIDE_DEBUG=1`, with `--debug` on the command line, and with `TORCH_LOGS`. Messages of compilers
that others run, in this thread or another, are not touched.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lowtide.environment import shows_compiler_messages
from lowtide.errors import LowtideWarning

_PACKAGES = ("torch._dynamo", "torch._functorch", "torch._subclasses", "torch._inductor", "torch.fx", "torch.__")
_COMPILER = r"torch\.(_dynamo|_functorch|_subclasses|_higher_order_ops|fx|autograd\.graph)(\.|$)"


class _OwnCalls(threading.local):
    """How many calls of lowtide's the thread is inside of."""

    depth = 0


_own_calls = _OwnCalls()


class _Filter(logging.Filter):
    """Lets records through unless the thread is inside a call of lowtide's."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True if the record is to be written."""
        return not _own_calls.depth


_filter = _Filter()
_num_loggers = 0


@contextmanager
def without_compiler_logs() -> Iterator[None]:
    """Suppress what PyTorch's compiler logs in this thread; costs about a microsecond."""
    if shows_compiler_messages():
        yield
        return
    _filter_loggers()
    _own_calls.depth += 1
    try:
        yield
    finally:
        _own_calls.depth -= 1


@contextmanager
def without_compiler_warnings() -> Iterator[None]:
    """Suppress the warnings that PyTorch's compiler gives; lowtide's own still follow the user's filters."""
    if shows_compiler_messages():
        yield
        return
    with warnings.catch_warnings():
        before = list(warnings.filters)
        warnings.filterwarnings("ignore", category=UserWarning, module=_COMPILER)
        # A warning of lowtide's may seem to come from a file of PyTorch's.
        warnings.simplefilter("default", LowtideWarning)
        for action, text, kind, module, line in reversed(before):
            if issubclass(LowtideWarning, kind):
                warnings.filterwarnings(action, _pattern(text), LowtideWarning, _pattern(module), line)  # type: ignore[arg-type]
        yield


def _pattern(text: Any) -> str:
    """Return the regular expression of a filter, which may be compiled or missing."""
    return text if isinstance(text, str) else getattr(text, "pattern", "")


def _filter_loggers() -> None:
    """Put the filter on every logger of the compiler, also on those that have come since the last time."""
    global _num_loggers
    known = logging.root.manager.loggerDict
    if len(known) == _num_loggers:
        return
    _num_loggers = len(known)
    for name, logger in list(known.items()):
        if name.startswith(_PACKAGES) and isinstance(logger, logging.Logger) and _filter not in logger.filters:
            logger.addFilter(_filter)
