"""Models and functions whose training calls run planned."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from lowtide.errors import InfeasibleBudgetError, InvalidModelError, LowtideError, warn
from lowtide.run.backend import make_backend
from lowtide.run.diagnose import (
    eager_error,
    failed_here,
    is_unusual,
    is_users_own,
    nothing_captured,
    refuse_context,
)
from lowtide.run.doors import Door, between_graphs, inside, open_doors
from lowtide.run.entry import MOST_RECOMPILATIONS, Entry, hooks_of_all_modules
from lowtide.run.noise import quiet_warnings
from lowtide.run.outputs import tensors_in
from lowtide.run.places import without_our_frames
from lowtide.run.session import Session
from lowtide.run.settings import Settings
from lowtide.run.translate import lowtide_cause
from lowtide.run.verify import ModelState, verify_call

_MANY_RECOMPILATIONS = 6


class Wrapped:
    """Runs calls of one model: planned when they train it, as if not wrapped otherwise."""

    def __init__(self, plain: Callable[..., Any], model: nn.Module | None, session: Session, *, verify: bool) -> None:
        self.plain = plain
        self.model = model
        self.session = session
        self.doors: list[Door] = []
        self._forward: Wrapped | None = None
        self._verify = verify
        self._hooks_of_all = hooks_of_all_modules()
        self._entry = self._new_entry()
        self._warned_of_limit = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns."""
        return self._train_by_itself(*args, **kwargs) if self.trains() else self.plain(*args, **kwargs)

    @between_graphs
    def _train_by_itself(self, *args: Any, **kwargs: Any) -> Any:
        if self._verify:
            self._verify = False
            verify_call(self.unplanned, self.train, self.model, args, kwargs)
        return self.train(*args, **kwargs)

    @between_graphs
    def call_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model's `forward` returns, called by itself: without the model's hooks."""
        if self._forward is None:
            self._forward = Wrapped(self.doors[0].plain, self.model, self.session, verify=False)
        return self._forward(*args, **kwargs)

    def unplanned(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a call without a plan, whether it trains or not."""
        with inside:
            return self.plain(*args, **kwargs)

    def trains(self) -> bool:
        """Whether a call made now is to be planned."""
        return (self.model is None or self.model.training) and torch.is_grad_enabled()

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a planned training call."""
        if is_unusual():
            refuse_context(self.model, args, kwargs)
        session, num_compiled = self.session, self.session.num_compiled
        hooks = hooks_of_all_modules()
        if session.drop_overdrawn() or hooks != self._hooks_of_all:
            self._entry, self._hooks_of_all = self._new_entry(), hooks
        before = ModelState(self.model) if not session.plans else None
        session.begin_call()
        try:
            result = self._run(args, kwargs)
        except Exception as error:
            self._entry.revive()
            if session.num_compiled > num_compiled:
                # What was compiled was cut where the error is, and would be found again by calls without it.
                self._entry = self._new_entry()
            own = self._explain(error, args, kwargs)
            if before is not None and isinstance(own, LowtideError):
                before.restore(self.model)
            if own is error:
                raise
            raise own from own.__cause__
        if session.num_compiled > num_compiled:
            session.end_call()
            self._watch_limit()
        return result

    def _run(self, args: Any, kwargs: Any) -> Any:
        """Return the result of the compiled call; raise if it ran outside of any plan but is to be differentiated."""
        with nullcontext() if self.session.plans else quiet_warnings():
            result = self._entry(*args, **kwargs)
        if not self.session.ran and any(tensor.requires_grad for tensor in tensors_in(result)):
            refuse_context(self.model, args, kwargs)
            raise nothing_captured(self.plain, args, kwargs, self.session.trouble)
        return result

    def _new_entry(self) -> Entry:
        return Entry(self.plain, make_backend(self.session), foresee=True)

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
            eager = eager_error(self.unplanned, self.model, args, kwargs)
            if eager is not None:
                return eager.with_traceback(without_our_frames(eager.__traceback__))
        return own or failed_here(error)

    def _watch_limit(self) -> None:
        """Warn when the model is compiled again and again, long before the compiler gives up."""
        if self.session.num_compiled >= _MANY_RECOMPILATIONS and not self._warned_of_limit:
            self._warned_of_limit = True
            warn(
                f"This model has been compiled {self.session.num_compiled} times, once for each input shape and each "
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
    if isinstance(model, torch._dynamo.OptimizedModule):
        raise InvalidModelError(
            "The model was already passed through torch.compile. Wrap the original model, or use "
            'torch.compile(model, backend="lowtide", options={"budget": ...}, dynamic=False).'
        )
    if model._compiled_call_impl is not None and not isinstance(model._compiled_call_impl, Wrapped):
        raise InvalidModelError("The model was compiled in place by model.compile(); wrap a model that was not.")
    # The bound method, not the model: a call of the model would come back here.
    unwrap_module(model)
    wrapped = Wrapped(model._call_impl, model, Session(settings, verifies=verify), verify=verify)
    model._compiled_call_impl = wrapped
    wrapped.doors = open_doors(model, wrapped.call_forward, wrapped.trains)
    return model


def unwrap_module(model: nn.Module) -> nn.Module:
    """Make calls of `model` run as before `wrap_module`, in place, and return it."""
    wrapped = wrapped_of(model)
    if wrapped is not None:
        model._compiled_call_impl = None
        for door in wrapped.doors:
            door.close()
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
    found = getattr(model, "_compiled_call_impl" if isinstance(model, nn.Module) else "__lowtide_wrapped__", None)
    return found if isinstance(found, Wrapped) else None
