"""Checks of the values of inputs, which the compiler makes before a call; where one fails it traces the call again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch._dynamo.guards import GuardBuilder, _get_closure_vars, install_guard


def guard_values(
    check: Callable[..., bool], sources: Sequence[Any], subject: str, installed: Callable[[], Any] | None = None
) -> None:
    """Trace the function again at calls in which `check` is False for the values of `sources`.

    It is called before anything of the traced code runs.

    Args:
        check: Receives the values in the order of `sources`.
        sources: Where the compiler finds the values when a call comes.
        subject: What is checked, for the compiler's log.
        installed: Called once the trace is complete.
    """
    install_guard(sources[0].make_guard(partial(_add_guard, check, sources, subject, installed)))


def _add_guard(
    check: Callable[..., bool],
    sources: Sequence[Any],
    subject: str,
    installed: Callable[[], Any] | None,
    builder: GuardBuilder,
    guard: Any,
) -> None:
    del guard
    if installed is not None:
        installed()
    name = f"lowtide_check_{id(check)}"
    call = f"{name}({', '.join(source.name for source in sources)})"
    known = {**_get_closure_vars(), name: check}
    builder.add_python_lambda_leaf_guard_to_root([call], [f"{call}  # {subject}"], known)
