"""Models and functions whose training calls run planned."""

from __future__ import annotations

import functools
import logging
import types
import warnings
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException
from torch.utils import _pytree as pytree

from lowtide.errors import InvalidInputError, InvalidModelError, LowtideWarning, UnsupportedBackwardError
from lowtide.run.backend import Backend, check_devices, make_backend
from lowtide.run.session import Session
from lowtide.run.settings import Settings
from lowtide.run.translate import lowtide_cause, own_error
from lowtide.run.verify import verify_call

_NEAR_LIMIT = 2


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
        num_plans = len(self.session.plans)
        self.session.begin_call()
        try:
            result = self._planned(*args, **kwargs)
        except Exception as error:
            if lowtide_cause(error) is None:
                self._explain_devices(args, kwargs)
                if not isinstance(error, TorchDynamoException):
                    raise
            own = own_error(error)
            raise own from own.__cause__
        if len(self.session.plans) > num_plans or not num_plans:
            self.session.end_call()
            self._watch_limit()
        _prepare_backward(result)
        return result

    def _trains(self) -> bool:
        training = self.model is None or self.model.training
        return training and torch.is_grad_enabled() and not torch.compiler.is_compiling()

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
        """Warn before PyTorch stops compiling new input signatures and would train unplanned."""
        limit = torch._dynamo.config.recompile_limit
        if len(self.session.plans) >= limit - _NEAR_LIMIT and not self._warned_of_limit:
            self._warned_of_limit = True
            warnings.warn(
                f"{len(self.session.plans)} different graphs have been planned for this model; PyTorch stops at "
                f"{limit} input signatures and would then train without a plan. Pad inputs to fewer shapes, or raise "
                "torch._dynamo.config.recompile_limit.",
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
    tracing = torch._dynamo.config.patch(ignore_logging_functions=_logging_functions())

    def call(*args: Any, **kwargs: Any) -> Any:
        with tracing:
            return planned(*args, **kwargs)

    return call


def _logging_functions() -> set[Callable[..., Any]]:
    """Return the methods of loggers that write a message; a message is no reason to cut the graph in two."""
    words = ("debug", "info", "warn", "error", "exception", "critical", "log")
    methods = vars(logging.Logger).items()
    return {method for name, method in methods if callable(method) and name.lower().startswith(words)}


def _prepare_backward(result: Any) -> None:
    """Tell autograd not to make zeros for gradients that do not come, and to refuse a second derivative at once."""
    for leaf in pytree.tree_leaves(result, is_leaf=is_dataclass):
        for tensor in vars(leaf).values() if is_dataclass(leaf) and not isinstance(leaf, type) else (leaf,):
            node = tensor.grad_fn if isinstance(tensor, torch.Tensor) else None
            if node is not None and node.name() == "CompiledFunctionBackward":
                node.set_materialize_grads(False)
                node.register_prehook(_refuse_second_derivative)
                return


def _refuse_second_derivative(gradients: Any) -> None:
    del gradients
    if torch.is_grad_enabled():
        raise UnsupportedBackwardError(
            "create_graph=True asks for a second derivative, which a planned graph does not have. Use "
            "lowtide.unwrap(model) for losses with gradient penalties, or leave that part of the model unwrapped."
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
