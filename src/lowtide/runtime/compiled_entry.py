"""A function as PyTorch compiles it for lowtide: with a code object of its own, and usable again after an error."""

from __future__ import annotations

import logging
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from lowtide.errors import warn
from lowtide.pytorch.compiler.changing_floats import Floats, changing_floats
from lowtide.pytorch.compiler.known_breaks import KnownBreaks, note_breaks, noting_breaks
from lowtide.pytorch.compiler.tracing import (
    compile_again,
    count_functions_left_alone,
    end_graphs_at_random_floats,
    limit_queues,
    trace_inference_mode_as_no_grad,
    tracing_options,
)
from lowtide.pytorch.contents import contents_of
from lowtide.pytorch.modules import parameters_in
from lowtide.pytorch.nested import tensor_leaves
from lowtide.runtime.backend import Backend
from lowtide.runtime.entry_points import planned_call
from lowtide.runtime.input_branches import Originals, Variants, expecting_branches
from lowtide.runtime.log_noise import without_compiler_logs
from lowtide.runtime.masked_writes import leave_masked_writes_to_eager

# PyTorch's own limit is 8, which a model that reads a dozen values of Python attributes reaches; each takes seconds.
MOST_RECOMPILATIONS = 64
# Shapes whose code is kept; that of a large model takes some tens of megabytes.
MOST_SHAPES = 64
# Few enough to warn early: at seconds each, this many are noticed.
_MANY_RECOMPILATIONS = 6


class _AllEntries:
    """How often the compiler may compile one function, for all entries of this process together.

    It counts per code object, and the methods of models of one class are one: a process that wraps many models would
    come to the limit of one of them. What it has compiled for a model that is gone may still count.
    """

    def __init__(self) -> None:
        self.limit = 0


class Entry:
    """`plain`, compiled by `backend`.

    The compiler keeps its cache, and counts recompilations, per code object: models must not share one. Shapes do not
    either, so that there may be any number of them. Where there are very many, the code of the least recently used is
    dropped.

    Args:
        plain: The function.
        backend: Receives its graphs.
        whole: Raise where the function cannot be traced as one graph.
        expect_branches: Take branches on the contents of integer inputs as eager does, and check them at every call.
        inside: A context for the calls, which may be entered again.
        instances: How many objects it is called with; each may have to be compiled by itself.
        recurrent: Trace code that calls recurrent modules; they must run between the graphs by themselves.
        originals: Where it is called on fakes, the tensors that they stand for.
        breaks: Calls that are known to cut the graph; others are noted here.
    """

    def __init__(
        self,
        plain: Callable[..., Any],
        backend: Backend,
        *,
        whole: bool = False,
        expect_branches: bool = False,
        inside: AbstractContextManager[None] | None = None,
        instances: int = 0,
        recurrent: bool = False,
        originals: Originals | None = None,
        breaks: KnownBreaks | None = None,
    ) -> None:
        self._plain, self._inside = plain, inside or nullcontext()
        self._variants: Variants | None = defaultdict(set) if expect_branches else None
        self._originals, self._breaks = originals, breaks

        def entry(*args: Any, **kwargs: Any) -> Any:
            return plain(*args, **kwargs)

        def compiled() -> Callable[..., Any]:
            own = types.FunctionType(entry.__code__.replace(), entry.__globals__, "entry", None, entry.__closure__)
            return torch.compile(own, backend=backend, dynamic=False, fullgraph=whole)

        self._compiled = compiled
        self._most = MOST_RECOMPILATIONS + instances
        _all_entries.limit += self._most
        self._by_shapes: OrderedDict[Hashable, Callable[..., Any]] = OrderedDict()
        self._floats: Floats = {}
        self._recurrent = recurrent

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what `plain` returns."""
        planned = self._for_shapes(_shapes((args, kwargs)))
        branches = expecting_branches(self._variants, self._originals, lambda: _parameters((self._plain, args, kwargs)))
        options = tracing_options(
            ignored_functions=_LOGGING_FUNCTIONS, recompile_limit=_all_entries.limit, recurrent=self._recurrent
        )
        surroundings = (
            options,
            changing_floats(self._floats),
            without_compiler_logs(),
            planned_call,
            branches,
            noting_breaks(self._breaks),
            self._inside,
        )
        with ExitStack() as stack:
            for each in surroundings:
                stack.enter_context(each)
            return planned(*args, **kwargs)

    def _for_shapes(self, shapes: Hashable) -> Callable[..., Any]:
        """Return the function that is compiled for arguments of these shapes."""
        found = self._by_shapes.get(shapes)
        if found is None:
            if self._by_shapes:
                _all_entries.limit += self._most
            found = self._by_shapes[shapes] = self._compiled()
            if len(self._by_shapes) > MOST_SHAPES:
                self._by_shapes.popitem(last=False)
        self._by_shapes.move_to_end(shapes)
        return found

    def revive(self) -> None:
        """Let the compiler try again what it leaves alone because a call ended with an error.

        Otherwise one call that raises would leave every later one without a plan.
        """
        compile_again()


def warn_of_recompilations(calls: int) -> None:
    """Warn when a model is compiled again and again, long before the compiler gives up.

    Calls are counted, not graphs: the compiler's limit is for each piece of code, and a call may have many.

    Args:
        calls: How many calls of the model have compiled something by now.
    """
    if calls == _MANY_RECOMPILATIONS:
        warn(
            f"This model has been compiled {calls} times, once for each input shape and each value of Python "
            "attributes it reads (TORCH_LOGS=recompiles shows which). Every time takes seconds, and after "
            f"{MOST_RECOMPILATIONS} values for one shape training stops with an error. Pad inputs to fewer shapes, and "
            "keep changing numbers in tensors."
        )


def _parameters(called: Any) -> list[torch.Tensor]:
    """Return the parameters of the modules that a call refers to."""
    return list(parameters_in(contents_of(called).modules))


def _shapes(arguments: Any) -> Hashable:
    """Return the shapes of the tensors in the arguments of a call."""
    return tuple(each.shape for each in tensor_leaves(arguments))


def _logging_functions() -> set[Callable[..., Any]]:
    """Return the methods of loggers that write a message; a message is no reason to cut the graph in two."""
    words = ("debug", "info", "warn", "error", "exception", "critical", "log")
    methods = vars(logging.Logger).items()
    return {method for name, method in methods if callable(method) and name.lower().startswith(words)}


_LOGGING_FUNCTIONS = _logging_functions()
_all_entries = _AllEntries()
leave_masked_writes_to_eager()
count_functions_left_alone()
end_graphs_at_random_floats(active=lambda: planned_call.depth.here > 0)
limit_queues(active=lambda: planned_call.depth.here > 0)
trace_inference_mode_as_no_grad(active=lambda: planned_call.depth.here > 0)
note_breaks()
