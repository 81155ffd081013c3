"""Models and functions whose training calls run planned."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from lowtide.capture.source_lines import without_our_frames
from lowtide.errors import InfeasibleBudgetError, InvalidModelError, LowtideError, warn
from lowtide.pytorch.compiler.tracing import is_compiled
from lowtide.pytorch.modules import call_in_slot, hooks_of_all_modules, plain_call, put_in_slot
from lowtide.runtime.backend import training_backend
from lowtide.runtime.compiled_entry import MOST_RECOMPILATIONS, Entry
from lowtide.runtime.entry_points import ForwardOverride, between_graphs, override_forward, planned_call
from lowtide.runtime.failure_causes import (
    eager_error,
    failed_here,
    in_unusual_context,
    is_users_own,
    lowtide_cause,
    nothing_captured,
    refuse_context,
)
from lowtide.runtime.log_noise import without_compiler_warnings
from lowtide.runtime.model_plans import Session
from lowtide.runtime.output_tensors import output_tensors
from lowtide.runtime.verify import ModelState, as_module, has_lazy_tensors, verify_call
from lowtide.settings import Settings

# Few enough to warn early: at seconds each, this many are noticed.
_MANY_RECOMPILATIONS = 6


class Wrapped:
    """Runs calls of one model: planned if they train it, plainly if not.

    Args:
        plain: What the model did before it was wrapped.
        model: The model, or None if `plain` is a function.
        session: Plans its graphs.
        verify: Compare the first training call with plain training.
    """

    def __init__(self, plain: Callable[..., Any], model: nn.Module | None, session: Session, *, verify: bool) -> None:
        self.plain = plain
        self.model = model
        self.session = session
        self.overrides: list[ForwardOverride] = []
        self._forward: Wrapped | None = None
        self._verify = verify
        self._compiled_for = self._circumstances()
        self._entry = self._new_entry()
        self._compiling_calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns."""
        return self._train_by_itself(*args, **kwargs) if self.trains() else self.plain(*args, **kwargs)

    @between_graphs
    def _train_by_itself(self, *args: Any, **kwargs: Any) -> Any:
        if self._verify and not has_lazy_tensors(model := self._as_module(tensors=True)):
            self._verify = False
            verify_call(self.unplanned, self.train, model, args, kwargs)
        return self.train(*args, **kwargs)

    @between_graphs
    def call_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model's `forward` returns, called by itself: without the model's hooks."""
        if self._forward is None:
            self._forward = Wrapped(self.overrides[0].plain, self.model, self.session, verify=False)
        return self._forward(*args, **kwargs)

    def unplanned(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a call without a plan, also if it trains."""
        with planned_call:
            return self.plain(*args, **kwargs)

    def trains(self) -> bool:
        """Return True if a call made now is to be planned."""
        return (self.model is None or self.model.training) and torch.is_grad_enabled()

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a planned training call."""
        if in_unusual_context():
            refuse_context(self.model, args, kwargs)
        session, num_compiled = self.session, self.session.num_compiled
        session.drop_overdrawn()
        now = self._circumstances()
        if now != self._compiled_for:
            self._entry, self._compiled_for = self._new_entry(), now
        before = ModelState(self._as_module()) if not session.plans else None
        session.begin_call()
        try:
            result = self._run(args, kwargs)
        except Exception as error:
            self._entry.revive()
            if session.num_compiled > num_compiled:
                # What was compiled ends where the error is, and later calls without the error would find it.
                self._entry = self._new_entry()
            own = self._explain(error, args, kwargs)
            if before is not None and isinstance(own, LowtideError):
                before.restore()
            if own is error:
                raise
            raise own from own.__cause__
        if session.num_compiled > num_compiled:
            session.end_call()
            self._watch_limit()
        return result

    def _run(self, args: Any, kwargs: Any) -> Any:
        """Return the result of the compiled call; raise if no part of it was planned though it needs gradients."""
        with nullcontext() if self.session.plans else without_compiler_warnings():
            result = self._entry(*args, **kwargs)
        if not self.session.ran and any(tensor.requires_grad for tensor in output_tensors(result)):
            refuse_context(self.model, args, kwargs)
            raise nothing_captured(self.plain, args, kwargs, self.session.failure)
        return result

    def _circumstances(self) -> tuple[Any, ...]:
        """Return what the compiler does not guard: which plans are dropped, and the hooks of all modules, by number."""
        return self.session.generation, *map(tuple, hooks_of_all_modules())

    def _new_entry(self) -> Entry:
        return Entry(self.plain, training_backend(self.session), expect_branches=True)

    def _as_module(self, *, tensors: bool = False) -> nn.Module:
        """Return the model; of a function, what it refers to."""
        return as_module(self.plain, tensors=tensors) if self.model is None else self.model

    def _explain(self, error: Exception, args: Any, kwargs: Any) -> Exception:
        """Return what to raise in the place of `error`: the user's own error as it is, or one of ours."""
        own = lowtide_cause(error)
        if own is None and (is_users_own(error) or isinstance(error, MemoryError | torch.OutOfMemoryError)):
            return error
        if own is None or isinstance(own, InfeasibleBudgetError):
            try:
                refuse_context(self.model, args, kwargs)
            except LowtideError as refused:
                return refused
            eager = eager_error(self.unplanned, self._as_module(), args, kwargs)
            if eager is not None:
                return eager.with_traceback(without_our_frames(eager.__traceback__))
        return own or failed_here(error)

    def _watch_limit(self) -> None:
        """Warn when the model is compiled again and again, long before the compiler gives up.

        Calls are counted, not graphs: the compiler's limit is for each piece of code, and a call may have many.
        """
        self._compiling_calls += 1
        if self._compiling_calls == _MANY_RECOMPILATIONS:
            warn(
                f"This model has been compiled {self._compiling_calls} times, once for each input shape and each "
                "value of Python attributes it reads (TORCH_LOGS=recompiles shows which). Every time takes seconds, "
                f"and after {MOST_RECOMPILATIONS} training stops with an error. Pad inputs to fewer shapes, and keep "
                "changing numbers in tensors."
            )


def wrap_module(model: nn.Module, settings: Settings, *, verify: bool) -> nn.Module:
    """Make training calls of `model` run planned, in place, and return it."""
    if not any(True for _ in model.parameters()):
        raise InvalidModelError(
            f"{type(model).__name__} has no parameters, so there is no training step to plan. Wrap the model that is "
            "trained, or a function that calls it."
        )
    if is_compiled(model):
        raise InvalidModelError(
            "The model was already passed through torch.compile. Wrap the original model, or use "
            'torch.compile(model, backend="lowtide", options={"budget": ...}, dynamic=False).'
        )
    if call_in_slot(model) is not None and wrapped_of(model) is None:
        raise InvalidModelError("The model was compiled in place by model.compile(); wrap a model that was not.")
    unwrap_module(model)
    # The bound method, not the model: a call of the model would come back here.
    wrapped = Wrapped(plain_call(model), model, Session(settings, verifies=verify), verify=verify)
    put_in_slot(model, wrapped)
    wrapped.overrides = override_forward(model, wrapped.call_forward, wrapped.trains)
    return model


def unwrap_module(model: nn.Module) -> nn.Module:
    """Make calls of `model` run as before `wrap_module`, in place, and return it."""
    wrapped = wrapped_of(model)
    if wrapped is not None:
        put_in_slot(model, None)
        for override in wrapped.overrides:
            override.remove()
    return model


def wrap_function(function: Callable[..., Any], settings: Settings, *, verify: bool) -> Callable[..., Any]:
    """Return a function that runs `function` planned when gradients are recorded."""
    wrapped = Wrapped(function, None, Session(settings, verifies=verify), verify=verify)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapped(*args, **kwargs)

    call.__lowtide_wrapped__ = wrapped  # type: ignore[attr-defined]
    return call


def wrapped_of(model: Any) -> Wrapped | None:
    """Return what `wrap` put on a model or function, or None."""
    found = call_in_slot(model) if isinstance(model, nn.Module) else getattr(model, "__lowtide_wrapped__", None)
    return found if isinstance(found, Wrapped) else None
