"""Copies of a model and its inputs that are made of fake tensors: calls of them need no memory and change nothing."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from lowtide.pytorch.fake_tensors import FakeTensorMode, fake_deep_copies
from lowtide.pytorch.nested import tensor_leaves


def fake_copies(
    model: Callable[..., Any], args: Any, kwargs: Any, mode: FakeTensorMode, *, closures: bool = False
) -> tuple[Any, Any, Any]:
    """Return copies of `model` and its arguments whose tensors are fakes of `mode`.

    A function is returned as it is, for what it reaches becomes fake when it is traced; unless its closure has tensors
    on the meta device, or `closures` is set: then it is a new function over copies of what the closure holds.
    """
    with fake_deep_copies(mode):
        memo: dict[int, Any] = {}
        if isinstance(model, types.FunctionType) and (closures or _closes_over_meta(model)):
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
    defaults, of_keywords = copy.deepcopy((function.__defaults__, function.__kwdefaults__), memo)
    twin = types.FunctionType(function.__code__, function.__globals__, function.__name__, defaults, cells)
    twin.__kwdefaults__ = of_keywords
    return twin
