"""Models and functions whose training calls run planned."""

from __future__ import annotations

import functools
import logging
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from lowtide.errors import CaptureError, InvalidInputError, InvalidModelError, LowtideError, LowtideWarning
from lowtide.pytorch.compiler import TorchDynamoException
from lowtide.run.backend import Backend, check_devices, make_backend
from lowtide.run.outputs import tensors_in
from lowtide.run.session import Session
from lowtide.run.settings import Settings
from lowtide.run.translate import lowtide_cause, own_error
from lowtide.run.verify import ModelState, verify_call

_MANY_RECOMPILATIONS = 6
_MOST_RECOMPILATIONS = 64


class Wrapped:
    """Runs calls of one model: planned when they train it, as if not wrapped otherwise."""

    def __init__(self, plain: Callable[..., Any], model: nn.Module | None, settings: Settings, *, verify: bool) -> None:
        self.plain = plain
        self.model = model
        self.session = Session(settings)
        self._verify = verify
        self._planned = compiled(plain, make_backend(self.session))
        self._warned_of_limit = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns."""
        if not self._trains():
            return self.plain(*args, **kwargs)
        if self._verify:
            self._verify = False
            verify_call(self.plain, self.train, self.model, args, kwargs)
        return self.train(*args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a planned training call."""
        session, num_compiled = self.session, self.session.num_compiled
        before = None if session.plans else ModelState(self.model)
        session.begin_call()
        try:
            result = self._run(args, kwargs)
            self._refuse_unplanned(result)
        except LowtideError:
            if before is not None:
                before.restore(self.model)
            raise
        if session.num_compiled > num_compiled:
            session.end_call()
            self._watch_limit()
        return result

    def _run(self, args: Any, kwargs: Any) -> Any:
        """Return the result of the compiled call; what the compiler raises becomes an error of ours."""
        try:
            return self._planned(*args, **kwargs)
        except Exception as error:
            if lowtide_cause(error) is None:
                self._explain_devices(args, kwargs)
                if not isinstance(error, TorchDynamoException):
                    raise
            own = own_error(error)
            raise own from own.__cause__

    def _refuse_unplanned(self, result: Any) -> None:
        """Raise if the call ran outside of any plan although it is to be differentiated."""
        if not self.session.ran and any(tensor.requires_grad for tensor in tensors_in(result)):
            raise CaptureError(
                "Nothing of this call could be captured, so it would train without a budget: Python code in the model "
                "cannot be traced (TORCH_LOGS=graph_breaks shows where), or its Python values change with every call "
                f"and more than {_MOST_RECOMPILATIONS} variants of it have been compiled (TORCH_LOGS=recompiles shows "
                "which). lowtide.chain and lowtide.chain_layers(model, budget=...) plan such a model layer by layer, "
                "without tracing it."
            )

    def _trains(self) -> bool:
        training = self.model is None or self.model.training
        return training and torch.is_grad_enabled() and not torch.compiler.is_dynamo_compiling()

    def _explain_devices(self, args: Any, kwargs: Any) -> None:
        """Raise our own error if the call failed because tensors are on several devices."""
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if self.model is not None:
            tensors += list(self.model.parameters())
        try:
            check_devices(tensors)
        except InvalidInputError as error:
            raise error from None

    def _watch_limit(self) -> None:
        """Warn when the model is compiled again and again, long before the compiler gives up."""
        if self.session.num_compiled >= _MANY_RECOMPILATIONS and not self._warned_of_limit:
            self._warned_of_limit = True
            warnings.warn(
                f"This model has been compiled {self.session.num_compiled} times, once for each input shape and each "
                "value of Python attributes it reads (TORCH_LOGS=recompiles shows which). Every time takes seconds, "
                f"and after {_MOST_RECOMPILATIONS} training stops with an error. Pad inputs to fewer shapes, and keep "
                "changing numbers in tensors.",
                LowtideWarning,
                stacklevel=4,
            )


def compiled(plain: Callable[..., Any], backend: Backend) -> Callable[..., Any]:
    """Return `plain` compiled by `backend`, with a code object of its own.

    The compiler keeps its cache, and counts recompilations, per code object: models must not share one.
    """

    def entry(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs)

    own = types.FunctionType(entry.__code__.replace(), entry.__globals__, "entry", None, entry.__closure__)
    planned = torch.compile(own, backend=backend, dynamic=False)
    tracing = torch._dynamo.config.patch(
        ignore_logging_functions=_logging_functions(),
        # Hooks added later must run, as in eager.
        skip_nnmodule_hook_guards=False,
        # Traced, NumPy becomes PyTorch: other last bits, and random numbers of another generator.
        trace_numpy=False,
        # Tensors rebuilt from the cache have other storage sizes than the ops give.
        fake_tensor_cache_enabled=False,
        recompile_limit=_MOST_RECOMPILATIONS,
        accumulated_recompile_limit=8 * _MOST_RECOMPILATIONS,
    )

    def call(*args: Any, **kwargs: Any) -> Any:
        with tracing:
            return planned(*args, **kwargs)

    return call


def _logging_functions() -> set[Callable[..., Any]]:
    """Return the methods of loggers that write a message; a message is no reason to cut the graph in two."""
    words = ("debug", "info", "warn", "error", "exception", "critical", "log")
    methods = vars(logging.Logger).items()
    return {method for name, method in methods if callable(method) and name.lower().startswith(words)}


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
    model._compiled_call_impl = Wrapped(model._call_impl, model, settings, verify=verify)
    return model


def wrap_function(function: Callable[..., Any], settings: Settings, *, verify: bool) -> Callable[..., Any]:
    """Return a function that runs `function` planned when gradients are recorded."""
    wrapped = Wrapped(function, None, settings, verify=verify)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapped(*args, **kwargs)

    call.__lowtide_wrapped__ = wrapped  # type: ignore[attr-defined]
    return call


def wrapped_of(model: Any) -> Wrapped | None:
    """Return what `wrap` put on a model or function, or None."""
    found = getattr(model, "_compiled_call_impl" if isinstance(model, nn.Module) else "__lowtide_wrapped__", None)
    return found if isinstance(found, Wrapped) else None
