"""Planning without running: the model is called on fake tensors, which have shapes and no memory."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from lowtide.errors import InvalidInputError, InvalidModelError
from lowtide.plan.core.result import Plan
from lowtide.pytorch.fake_tensors import FakeTensor, FakeTensorMode, fake_deep_copies, fake_mode_of, new_fake_mode
from lowtide.pytorch.modules import plain_call
from lowtide.pytorch.nested import tensor_leaves
from lowtide.runtime.backend import planning_backend
from lowtide.runtime.compiled_entry import Entry
from lowtide.runtime.failure_causes import failed_here, lowtide_cause
from lowtide.runtime.input_checks import check_devices
from lowtide.runtime.model_plans import Session
from lowtide.runtime.wrap import wrapped_of


def plan_call(model: Callable[..., Any], args: Any, kwargs: Any, session: Session) -> list[Plan]:
    """Return the plans that `session` makes for the graphs that a training call of `model` consists of.

    The call is made on a copy of the model and its inputs that is made of fake tensors, so that nothing of the
    user's changes and no memory is needed. Model and inputs may also be without data, on the meta device.
    """
    if isinstance(model, nn.Module) and not model.training:
        raise InvalidModelError("The model is in eval mode, in which lowtide plans nothing. Call model.train() first.")
    tensors = tensor_leaves((args, kwargs))
    check_devices(tensors + (list(model.parameters()) if isinstance(model, nn.Module) else []), data=False)
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
    mode = _mode_of(args, kwargs) or new_fake_mode()
    try:
        twin, args, kwargs = fake_copies(_without_wrapping(model), args, kwargs, mode)
        plain = plain_call(twin) if isinstance(twin, nn.Module) else twin
        with mode:
            Entry(plain, planning_backend(session))(*args, **kwargs)
    except Exception as error:
        own = lowtide_cause(error) or failed_here(error)
        raise own from own.__cause__


def _mode_of(args: Any, kwargs: Any) -> FakeTensorMode | None:
    """Return the mode of arguments that are fakes already: fakes of two modes cannot meet."""
    fakes = (leaf for leaf in tensor_leaves((args, kwargs)) if isinstance(leaf, FakeTensor))
    return next(map(fake_mode_of, fakes), None)


def _without_wrapping(model: Callable[..., Any]) -> Callable[..., Any]:
    wrapped = wrapped_of(model)
    return model if wrapped is None or isinstance(model, nn.Module) else wrapped.plain


def fake_copies(model: Callable[..., Any], args: Any, kwargs: Any, mode: FakeTensorMode) -> tuple[Any, Any, Any]:
    """Return copies of `model` and its arguments whose tensors are fakes of `mode`.

    A function is returned as it is, for what it reaches becomes fake when it is traced; unless its closure has tensors
    on the meta device: then it is a new function over copies of what the closure holds.
    """
    with fake_deep_copies(mode):
        memo: dict[int, Any] = {}
        if isinstance(model, types.FunctionType) and _closes_over_meta(model):
            twin: Any = _copy_function(model, memo)
        else:
            twin = copy.deepcopy(model, memo)
        return twin, *copy.deepcopy((tuple(args), dict(kwargs or {})), memo)


def _closes_over_meta(function: types.FunctionType) -> bool:
    return any(tensor.is_meta for tensor in _tensors_of(_contents(function)))


def _contents(function: types.FunctionType) -> list[Any]:
    return [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]


def _tensors_of(things: Iterable[Any]) -> Iterable[torch.Tensor]:
    for thing in things:
        if isinstance(thing, nn.Module):
            yield from thing.parameters()
            yield from thing.buffers()
        else:
            yield from tensor_leaves(thing)


def _copy_function(function: types.FunctionType, memo: dict[int, Any]) -> Callable[..., Any]:
    cells = tuple(
        types.CellType(copy.deepcopy(cell.cell_contents, memo)) if cell != types.CellType() else cell
        for cell in function.__closure__ or ()
    )
    twin = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin
