"""A function as PyTorch compiles it for lowtide: with a code object of its own, and usable again after an error."""

from __future__ import annotations

import logging
import types
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch._C._dynamo.eval_frame import set_code_exec_strategy
from torch._dynamo.convert_frame import input_codes
from torch._dynamo.types import FrameAction, FrameExecStrategy
from torch.nn.modules import module as modules

from lowtide.run.backend import Backend
from lowtide.run.branches import Variants, foreseeing_branches
from lowtide.run.doors import inside
from lowtide.run.noise import quiet_logs

MOST_RECOMPILATIONS = 64
_TRY_AGAIN = FrameExecStrategy(FrameAction.DEFAULT, FrameAction.DEFAULT)


class Entry:
    """`plain`, compiled by `backend`.

    The compiler keeps its cache, and counts recompilations, per code object: models must not share one.

    Args:
        plain: The function.
        backend: Receives its graphs.
        whole: Raise where the function cannot be traced as one graph.
        foresee: Take branches on the contents of integer inputs as eager does, and check them at every call.
    """

    def __init__(
        self, plain: Callable[..., Any], backend: Backend, *, whole: bool = False, foresee: bool = False
    ) -> None:
        self._variants: Variants | None = defaultdict(set) if foresee else None

        def entry(*args: Any, **kwargs: Any) -> Any:
            return plain(*args, **kwargs)

        own = types.FunctionType(entry.__code__.replace(), entry.__globals__, "entry", None, entry.__closure__)
        self._planned = torch.compile(own, backend=backend, dynamic=False, fullgraph=whole)
        self._tracing = torch._dynamo.config.patch(
            ignore_logging_functions=_logging_functions(),
            # Hooks added later must run, as in eager.
            skip_nnmodule_hook_guards=False,
            # Traced, NumPy becomes PyTorch: other last bits, and random numbers of another generator.
            trace_numpy=False,
            # Tensors rebuilt from the cache have other storage sizes than the ops give.
            fake_tensor_cache_enabled=False,
            recompile_limit=MOST_RECOMPILATIONS,
            accumulated_recompile_limit=8 * MOST_RECOMPILATIONS,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what `plain` returns."""
        with self._tracing, quiet_logs(), inside, foreseeing_branches(self._variants):
            return self._planned(*args, **kwargs)

    def revive(self) -> None:
        """Let the compiler look again at what it has decided to leave alone because a call ended with an error.

        Otherwise one call that raises would leave every later one without a plan.
        """
        for reference in list(input_codes.seen):
            code = reference()
            if code is not None:
                set_code_exec_strategy(code, _TRY_AGAIN)


def hooks_of_all_modules() -> tuple[tuple[int, ...], ...]:
    """Return the numbers of the hooks that run for every module; the compiler traces them but has no guard on them."""
    found = (
        modules._global_forward_pre_hooks,
        modules._global_forward_hooks,
        modules._global_backward_pre_hooks,
        modules._global_backward_hooks,
    )
    return tuple(map(tuple, found))


def _logging_functions() -> set[Callable[..., Any]]:
    """Return the methods of loggers that write a message; a message is no reason to cut the graph in two."""
    words = ("debug", "info", "warn", "error", "exception", "critical", "log")
    methods = vars(logging.Logger).items()
    return {method for name, method in methods if callable(method) and name.lower().startswith(words)}
