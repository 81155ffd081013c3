"""From what the compiler raises to lowtide's own errors."""

from __future__ import annotations

from lowtide.errors import LowtideError
from lowtide.pytorch.compiler import BackendCompilerFailed


def lowtide_cause(error: BaseException) -> LowtideError | None:
    """Return the lowtide error that `error` is or was caused by, if there is one."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        if isinstance(current, LowtideError):
            return current
        seen.add(id(current))
        inner = current.inner_exception if isinstance(current, BackendCompilerFailed) else None
        pending += [inner, current.__cause__, current.__context__]
    return None
