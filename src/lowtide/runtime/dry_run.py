"""Planning without running: the model is called on fake tensors, which have shapes and no memory."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from lowtide.errors import InvalidInputError, InvalidModelError
from lowtide.plan.core.result import Plan
from lowtide.runtime.backend import check_devices, make_backend
from lowtide.runtime.compiled_call import Entry
from lowtide.runtime.compiler_errors import lowtide_cause
from lowtide.runtime.failure_causes import failed_here
from lowtide.runtime.session import Session
from lowtide.runtime.wrap import wrapped_of
from lowtide.settings import Settings

_STAND_IN = torch.device("cpu")


def fake_copies(model: Callable[..., Any], args: Any, kwargs: Any, mode: FakeTensorMode) -> tuple[Any, Any, Any]:
    """Return copies of `model` and its arguments whose tensors are fakes of `mode`.

    A function is returned as it is, for what it reaches becomes fake when it is traced; unless its closure has tensors
    on the meta device: then it is a new function over copies of what the closure holds.
    """
    with FakeCopyMode(mode), _CopiesOfMeta(mode):
        memo: dict[int, Any] = {}
        if isinstance(model, types.FunctionType) and _closes_over_meta(model):
            twin = _copy_function(model, memo)
        else:
            twin = copy.deepcopy(model, memo)
        return twin, *copy.deepcopy((tuple(args), dict(kwargs or {})), memo)


class _CopiesOfMeta(TorchFunctionMode):
    """Makes deep copies of tensors on the meta device; all others are left to the mode below."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self.mode = mode

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return the fake copy that `func` asks for, or what `func` returns."""
        # The deep copy of a parameter clones its data; any other tensor copies itself.
        if func is torch.Tensor.__deepcopy__ and _is_meta(args[0]):
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = self._fake(tensor)
            return memo[id(tensor)]
        if func is torch._C.TensorBase.clone and _is_meta(args[0]):
            return self._fake(args[0])
        return func(*args, **(kwargs or {}))

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            # Not a fresh storage: views of one storage remain views of one storage.
            made = FakeTensor(self.mode, tensor.detach(), _STAND_IN)
            return made.requires_grad_(tensor.requires_grad)


def _is_meta(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "meta"


def _closes_over_meta(function: types.FunctionType) -> bool:
    return any(_is_meta(tensor) for tensor in _tensors_of(_contents(function)))


def _contents(function: types.FunctionType) -> list[Any]:
    return [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]


def _tensors_of(things: Iterable[Any]) -> Iterable[torch.Tensor]:
    for thing in things:
        if isinstance(thing, nn.Module):
            yield from thing.parameters()
            yield from thing.buffers()
        else:
            yield from (leaf for leaf in pytree.tree_leaves(thing) if isinstance(leaf, torch.Tensor))


def _copy_function(function: types.FunctionType, memo: dict[int, Any]) -> Callable[..., Any]:
    cells = tuple(
        types.CellType(copy.deepcopy(cell.cell_contents, memo)) if cell != types.CellType() else cell
        for cell in function.__closure__ or ()
    )
    twin = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


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
