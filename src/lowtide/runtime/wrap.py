"""Wrapping puts a planned call into a model or around a function, and unwrapping takes it out again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from lowtide.blocks.step.find_layers import Cuts, refuse_names_in_function
from lowtide.blocks.step.module_places import ModulePlaces
from lowtide.capture.source_lines import is_call_of_library
from lowtide.distributed.replicas import trained_module
from lowtide.errors import InvalidModelError, InvalidOptionError, warn
from lowtide.plan.core.result import Plan
from lowtide.pytorch.compiler.tracing import is_compiled
from lowtide.pytorch.modules import call_in_slot, plain_call, put_in_slot
from lowtide.runtime.entry_points import override_forward
from lowtide.runtime.inductor_backend import check_engine, refuse_model
from lowtide.runtime.layer_blocks import LayerBlocks, LayerCall
from lowtide.runtime.model_plans import Session
from lowtide.runtime.opaque_modules import LayerDecisions
from lowtide.runtime.wrapped import Wrapped, refuse_wrapped, wrapped_of
from lowtide.settings import Settings


def wrap_module(model: nn.Module, settings: Settings, *, verify: bool) -> nn.Module:
    """Make training calls of `model` run planned, in place, and return it; in a container, those of what is inside."""
    container, model = model, trained_module(model)
    if settings.engine == "inductor":
        check_engine(verify=verify)
        refuse_model(model, container)
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
    if call_in_slot(model) is not None and not isinstance(call_in_slot(model), Wrapped | LayerCall):
        raise InvalidModelError("The model was compiled in place by model.compile(); wrap a model that was not.")
    unwrap_module(model)
    _warn_of_own_call(model)
    cuts = Cuts(model, settings.blocks)
    found = cuts.first
    if found.modules and isinstance(settings.plan, Plan) and settings.blocks != "auto":
        raise InvalidOptionError(
            "plan is a plan of one graph, and blocks cuts the step into several. Give a budget and blocks, or the plan "
            "alone."
        )
    # The bound method, not the model: a call of the model would come back here.
    session = Session(settings, verifies=verify)
    session.step.modules = ModulePlaces(model.named_modules(), found.modules)
    session.cuts = cuts
    if session.by_layers:
        refuse_wrapped(found.modules)
    layers = LayerBlocks(found, session) if session.by_layers else None
    wrapped = Wrapped(plain_call(model), model, session, verify=verify, layers=layers)
    put_in_slot(model, wrapped)
    wrapped.overrides = override_forward(model, wrapped.call_forward, wrapped.trains)
    wrapped.decisions = LayerDecisions(model, session, wrapped.overrides)
    session.is_undecided = wrapped.decisions.are_open
    return container


def _warn_of_own_call(model: nn.Module) -> None:
    """Warn if the model's class has a `__call__` of its own, around the one that runs planned.

    Python looks it up in the class, which other models share, so it cannot be planned without changing them.
    """
    if not is_call_of_library(call := type(model).__call__):
        warn(
            f"{call.__qualname__} is around the call that runs planned: what it computes besides is not planned, and "
            "its memory is not counted within the budget. Put it into `forward`, or wrap a function that calls the "
            "model as it was before lowtide.wrap."
        )


def unwrap_module(model: nn.Module) -> nn.Module:
    """Make calls of `model` run as before `wrap_module`, in place, and return it."""
    wrapped = wrapped_of(model)
    if wrapped is not None:
        wrapped.session.improvements.stop()
        put_in_slot(trained_module(model), None)
        # They are on top: the model itself may run layers one after the other.
        if wrapped.layers is not None:
            wrapped.layers.remove()
        for override in wrapped.overrides:
            override.remove()
    return model


def wrap_function(function: Callable[..., Any], settings: Settings, *, verify: bool) -> Callable[..., Any]:
    """Return a function that runs `function` planned when gradients are recorded."""
    refuse_names_in_function(settings.blocks)
    if settings.engine == "inductor":
        check_engine(verify=verify)
    wrapped = Wrapped(function, None, Session(settings, verifies=verify), verify=verify)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapped(*args, **kwargs)

    call.__lowtide_wrapped__ = wrapped  # type: ignore[attr-defined]
    return call
