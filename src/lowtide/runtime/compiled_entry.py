"""A function as PyTorch compiles it for lowtide: with a code object of its own, and usable again after an error."""

from __future__ import annotations

import logging
import types
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from lowtide.pytorch.compiler.tracing import compile_again, tracing_options
from lowtide.runtime.backend import Backend
from lowtide.runtime.entry_points import planned_call
from lowtide.runtime.input_branches import Variants, expecting_branches
from lowtide.runtime.log_noise import without_compiler_logs

# PyTorch's own limit is 8, which a model with a dozen input shapes reaches; each one takes seconds.
MOST_RECOMPILATIONS = 64


class Entry:
    """`plain`, compiled by `backend`.

    The compiler keeps its cache, and counts recompilations, per code object: models must not share one.

    Args:
        plain: The function.
        backend: Receives its graphs.
        whole: Raise where the function cannot be traced as one graph.
        expect_branches: Take branches on the contents of integer inputs as eager does, and check them at every call.
    """

    def __init__(
        self, plain: Callable[..., Any], backend: Backend, *, whole: bool = False, expect_branches: bool = False
    ) -> None:
        self._variants: Variants | None = defaultdict(set) if expect_branches else None

        def entry(*args: Any, **kwargs: Any) -> Any:
            return plain(*args, **kwargs)

        own = types.FunctionType(entry.__code__.replace(), entry.__globals__, "entry", None, entry.__closure__)
        self._planned = torch.compile(own, backend=backend, dynamic=False, fullgraph=whole)
        self._tracing = tracing_options(
            ignored_functions=_logging_functions(),
            recompile_limit=MOST_RECOMPILATIONS,
            total_recompile_limit=8 * MOST_RECOMPILATIONS,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what `plain` returns."""
        with self._tracing, without_compiler_logs(), planned_call, expecting_branches(self._variants):
            return self._planned(*args, **kwargs)

    def revive(self) -> None:
        """Let the compiler try again what it leaves alone because a call ended with an error.

        Otherwise one call that raises would leave every later one without a plan.
        """
        compile_again()


def _logging_functions() -> set[Callable[..., Any]]:
    """Return the methods of loggers that write a message; a message is no reason to cut the graph in two."""
    words = ("debug", "info", "warn", "error", "exception", "critical", "log")
    methods = vars(logging.Logger).items()
    return {method for name, method in methods if callable(method) and name.lower().startswith(words)}
