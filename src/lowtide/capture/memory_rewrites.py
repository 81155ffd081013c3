"""A switch: whether programs may run ops in another way than they were traced, to the same bits in less memory.

There are two such rewrites: results written over what they are computed from (`capture.inplace_fusion`), and tensors
without memory in the place of those that are read for their shape alone (`capture.shape_only_inputs`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_allowed = ContextVar("lowtide_memory_rewrites", default=True)


def are_allowed() -> bool:
    """Return True if programs that are made now may be rewritten to need less memory."""
    return _allowed.get()


@contextmanager
def as_traced() -> Iterator[None]:
    """Leave ops as they were traced in programs made meanwhile: graphs as published, or as others would run them."""
    token = _allowed.set(False)
    try:
        yield
    finally:
        _allowed.reset(token)
