"""The error that a call raises without any plan: the user's own, whatever a planned call has made of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import nn

from lowtide.blocks.step.ledger import Ledger
from lowtide.pytorch.collective_stop import CollectiveStop, CollectiveStopError
from lowtide.pytorch.contents import contents_of
from lowtide.pytorch.fake_tensors import new_fake_mode
from lowtide.pytorch.modules import plain_call
from lowtide.pytorch.nested import map_tensors, tensor_leaves
from lowtide.pytorch.op_watch import OpWatch
from lowtide.pytorch.process_groups import is_distributed_tensor, num_ranks
from lowtide.pytorch.storages import storage_bytes
from lowtide.runtime.entry_points import planned_call
from lowtide.runtime.fake_copies import fake_copies
from lowtide.runtime.model_state import ModelState
from lowtide.runtime.verify import fresh

# Fewer bytes than predicted peaks may be off by count as none: budgets of tiny models would hide their errors.
_FEW_BYTES = 64 * 1024


def eager_error(
    plain: Callable[..., Any], model: nn.Module, args: Any, kwargs: Any, *, alone: bool = True
) -> Exception | None:
    """Return the error that the call raises without any plan, or None if it raises none or that cannot be found out.

    What it would save for backward is dropped, so that it needs little memory, and it leaves no trace.

    Args:
        plain: What is called without a plan.
        model: The model.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        alone: Whether other ranks may not make the call, too, so that it must end before it communicates.
    """
    state = ModelState(model, plain)
    if _goes_on(state) or (alone and _is_spread(model)):
        return None
    try:
        return _error_of(plain, args, kwargs, _stop() if alone else nullcontext())
    finally:
        state.restore()


def eager_error_within(
    budget_bytes: int, plain: Callable[..., Any], model: nn.Module | None, args: Any, kwargs: Any
) -> Exception | None:
    """Return the error that the call raises without any plan before it needs more than a budget, or None.

    A call on fake tensors, which take no memory, shows how many ops fit; then the call is made for so many of them.
    An error that comes later is not found: it comes once the budget is large enough for the call.

    Args:
        budget_bytes: The budget, without what ops may need inside.
        plain: What is called without a plan.
        model: The model, or None if `plain` is a function.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
    """
    state = ModelState(nn.Module() if model is None else model, plain)
    if _goes_on(state) or _is_spread(state.model):
        return None
    left_bytes = max(budget_bytes, _FEW_BYTES) - sum(map(storage_bytes, state.buffers.values()))
    try:
        fitting = _ops_within(left_bytes, plain if model is None else model, args, kwargs)
        if fitting is None:
            return None
        stop = _Stop(fitting)
        error = _error_of(plain, args, kwargs, OpWatch(stop.count, before=stop.check), _stop())
    finally:
        state.restore()
    return None if isinstance(error, _StoppedError | MemoryError | torch.OutOfMemoryError) else error


def _goes_on(state: ModelState) -> bool:
    """Return True if a call would go on with an iterator, which later calls would then find further on."""
    return state.loose is not None and state.loose.iterator is not None


def _is_spread(model: nn.Module) -> bool:
    """Return True if ranks have parts of the parameters: what runs around the ops of such a model communicates, too."""
    return num_ranks() > 1 and any(is_distributed_tensor(type(each)) for each in model.parameters())


def _stop() -> AbstractContextManager[Any]:
    """Return a context that a call leaves before it communicates: the other ranks do not make it."""
    return CollectiveStop() if num_ranks() > 1 else nullcontext()  # type: ignore[no-untyped-call]


def _error_of(
    plain: Callable[..., Any], args: Any, kwargs: Any, *watches: AbstractContextManager[Any]
) -> Exception | None:
    """Return what a call raises whose inputs are copied first; `watches` see the ops of both."""
    try:
        # Not without gradients: a model may look whether its tensors need them.
        with ExitStack() as stack:
            for each in (planned_call, *watches, torch.autograd.graph.saved_tensors_hooks(_drop, _ask_for)):
                stack.enter_context(each)
            args, kwargs = map_tensors(fresh, (args, kwargs))
            plain(*args, **kwargs)
    except (_DroppedError, CollectiveStopError):
        return None
    except Exception as error:
        return error
    return None


def _ops_within(most_bytes: int, called: Callable[..., Any], args: Any, kwargs: Any) -> int | None:
    """Return how many ops of a call come before what they make exceeds `most_bytes`; None if that cannot be seen.

    Where the call on fake tensors fails, the op that fails is one of them.
    """
    mode = new_fake_mode()
    try:
        twin, fake_args, fake_kwargs = fake_copies(called, args, kwargs, mode, closures=True)
    except Exception:  # Not every object can be copied. Then the user's error is not known, and the refusal stands.
        return None
    if not isinstance(twin, nn.Module) and _shares(called, twin):
        return None
    plain = plain_call(twin) if isinstance(twin, nn.Module) else twin
    course = _Course(most_bytes, [*tensor_leaves((fake_args, fake_kwargs)), *_tensors_of(twin)])
    with mode:
        fails = _error_of(plain, fake_args, fake_kwargs, OpWatch(course)) is not None
    return course.fitting + (fails and course.fits)


def _shares(function: Callable[..., Any], twin: Callable[..., Any]) -> bool:
    """Return True if a copied function still refers to modules of the original, which fakes could be left in."""
    ours = {id(module) for module in contents_of(function).modules}
    return any(id(module) in ours for module in contents_of(twin).modules)


def _tensors_of(called: Callable[..., Any]) -> Iterable[torch.Tensor]:
    if isinstance(called, nn.Module):
        return [*called.parameters(), *called.buffers()]
    return contents_of(called).parameters()


class _Course:
    """How many ops a call runs before the tensors that they make exceed some bytes.

    Args:
        most_bytes: The bytes.
        outside: Tensors that are there before and do not count.
    """

    def __init__(self, most_bytes: int, outside: Iterable[torch.Tensor]) -> None:
        self.fitting = 0
        self.fits = True
        self._left = most_bytes
        self._ledger = Ledger(outside)

    def __call__(self, made: list[torch.Tensor]) -> None:
        """Note what an op has made."""
        self._left -= self._ledger.add(made)
        self.fits = self.fits and self._left >= 0
        self._left += self._ledger.remove_dead()
        # Fake tensors answer some questions by ops that make none.
        self.fitting += self.fits and bool(made)


class _Stop:
    """Ends a call before more of its ops make tensors than may."""

    def __init__(self, most_ops: int) -> None:
        self._left = most_ops

    def check(self) -> None:
        """Raise if no op is left."""
        if self._left <= 0:
            raise _StoppedError

    def count(self, made: list[torch.Tensor]) -> None:
        """Count an op that has made tensors."""
        self._left -= bool(made)


class _StoppedError(Exception):
    """Raised where a call would run more ops than it may."""


class _DroppedError(Exception):
    """Raised where the call reads what was dropped: it is differentiated inside."""


def _drop(tensor: torch.Tensor) -> None:
    """Keep nothing for backward."""


def _ask_for(nothing: None) -> torch.Tensor:
    """Say that nothing was kept."""
    raise _DroppedError
