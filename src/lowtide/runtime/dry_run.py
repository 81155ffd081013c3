"""Planning without running: the model is called on fake tensors, which have shapes and no memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from lowtide.errors import InvalidInputError, InvalidModelError
from lowtide.plan.core.result import Plan
from lowtide.runtime.backend import check_devices, make_backend
from lowtide.runtime.compiled_call import Entry
from lowtide.runtime.compiler_errors import lowtide_cause
from lowtide.runtime.failure_causes import failed_here
from lowtide.runtime.fake_copies import fake_copies
from lowtide.runtime.session import Session
from lowtide.runtime.wrap import wrapped_of
from lowtide.settings import Settings


def rehearse(model: Callable[..., Any], args: Any, kwargs: Any, settings: Settings) -> list[Plan]:
    """Return the plans of the graphs that a training call of `model` consists of.

    The call is made on a copy of the model and its inputs that is made of fake tensors, so that nothing of the
    user's changes and no memory is needed. Model and inputs may also be without data, on the meta device.
    """
    if isinstance(model, nn.Module) and not model.training:
        raise InvalidModelError("The model is in eval mode, in which lowtide plans nothing. Call model.train() first.")
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    check_devices(tensors + (list(model.parameters()) if isinstance(model, nn.Module) else []), data=False)
    session = Session(settings)
    session.begin_call()
    with torch.random.fork_rng(), torch.enable_grad():
        _call_on_fakes(model, args, kwargs, session)
    if not session.plans:
        raise InvalidInputError(
            "The call has no training graph: nothing it computes needs a gradient. Check that parameters (or inputs) "
            "require gradients and that the model does not switch them off."
        )
    session.end_call()
    return session.plans


def _call_on_fakes(model: Callable[..., Any], args: Any, kwargs: Any, session: Session) -> None:
    mode = _mode_of(args, kwargs) or FakeTensorMode(allow_non_fake_inputs=True)
    try:
        twin, args, kwargs = fake_copies(_without_wrapping(model), args, kwargs, mode)
        plain = twin._call_impl if isinstance(twin, nn.Module) else twin
        with mode:
            Entry(plain, make_backend(session, run=False))(*args, **kwargs)
    except Exception as error:
        own = lowtide_cause(error) or failed_here(error)
        raise own from own.__cause__


def _mode_of(args: Any, kwargs: Any) -> FakeTensorMode | None:
    """Return the mode of arguments that are fakes already: fakes of two modes cannot meet."""
    leaves = pytree.tree_leaves((args, kwargs))
    return next((leaf.fake_mode for leaf in leaves if isinstance(leaf, FakeTensor)), None)


def _without_wrapping(model: Callable[..., Any]) -> Callable[..., Any]:
    wrapped = wrapped_of(model)
    return model if wrapped is None or isinstance(model, nn.Module) else wrapped.plain
