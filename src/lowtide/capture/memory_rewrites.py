"""Whether programs may run ops otherwise than they were traced, to the same bits in less memory.

There are two such liberties: results written over what they are computed from (`capture.overwrite`), and hollow tensors
in the place of those read for their shape alone (`capture.shapes`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_allowed = ContextVar("lowtide_liberties", default=True)


def are_allowed() -> bool:
    """Whether programs made now may take liberties."""
    return _allowed.get()


@contextmanager
def as_traced() -> Iterator[None]:
    """Take no liberties in programs made meanwhile: graphs as published, or as others would run them."""
    token = _allowed.set(False)
    try:
        yield
    finally:
        _allowed.reset(token)
