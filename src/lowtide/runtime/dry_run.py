"""Planning without running: the model is called on fake tensors, which have shapes and no memory."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import nn

from lowtide.blocks.step.find_layers import Cuts, Layers, refuse_names_in_function
from lowtide.blocks.step.module_places import ModulePlaces
from lowtide.blocks.step.rehearsal import Rehearsal
from lowtide.capture.source_lines import user_line
from lowtide.distributed.replicas import replica_of, trained_module
from lowtide.distributed.sharded_model import refuse_sharded
from lowtide.errors import CaptureError, InfeasibleBudgetError, InvalidInputError, InvalidModelError
from lowtide.plan.core.result import Plan
from lowtide.pytorch.compiler.tracing import num_graph_breaks
from lowtide.pytorch.contents import contents_of
from lowtide.pytorch.fake_tensors import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    fake_mode_of,
    new_fake_mode,
)
from lowtide.pytorch.modules import plain_call
from lowtide.pytorch.nested import tensor_leaves
from lowtide.runtime.backend import capturing_backend
from lowtide.runtime.compiled_entry import Entry
from lowtide.runtime.failure_causes import failed_here, lowtide_cause
from lowtide.runtime.fake_copies import fake_copies
from lowtide.runtime.input_branches import Originals
from lowtide.runtime.input_checks import check_devices
from lowtide.runtime.layer_blocks import LayerBlocks, MakeRun
from lowtide.runtime.model_plans import Session
from lowtide.runtime.model_state import buffer_copy_bytes
from lowtide.runtime.other_processes import expected_buckets, expected_shards, refuse_parallel
from lowtide.runtime.output_tensors import output_tensors
from lowtide.runtime.pipeline import plan_graph
from lowtide.runtime.step_planning import CallCapture, plan_step
from lowtide.runtime.verify import as_module
from lowtide.runtime.wrapped import wrapped_of
from lowtide.step.plan import StepPlan
from lowtide.step.surroundings import ModuleRun


def plan_call(model: Callable[..., Any], args: Any, kwargs: Any, session: Session) -> Plan | StepPlan:
    """Return the plan that `session` makes for a training call of `model`: of its graph, or of a step of blocks.

    The call is made on a copy of the model and its inputs that is made of fake tensors, so that nothing of the
    user's changes and no memory is needed. Model and inputs may also be without data, on the meta device.
    """
    replica = replica_of(model) if isinstance(model, nn.Module) else None
    refuse_parallel(model, session.settings)
    if isinstance(model, nn.Module):
        model = trained_module(model)
    if isinstance(model, nn.Module) and not model.training:
        raise InvalidModelError("The model is in eval mode, in which lowtide plans nothing. Call model.train() first.")
    refuse_sharded(
        [model] if isinstance(model, nn.Module) else contents_of(model).modules,
        "The model is sharded by fully_shard, and its parameters cannot be copied to be planned without running. Plan "
        "it before it is sharded, or wrap it: lowtide.wrap(model, budget=...) plans in the first training call.",
    )
    tensors = tensor_leaves((args, kwargs))
    check_devices(tensors + (list(model.parameters()) if isinstance(model, nn.Module) else []), data=False)
    begin = time.perf_counter()
    session.begin_call()
    with torch.random.fork_rng(), torch.enable_grad(), _our_errors():
        mode = _mode_of(args, kwargs) or new_fake_mode()
        plain = _without_wrapping(model)
        twin, fake_args, fake_kwargs = fake_copies(plain, args, kwargs, mode)
        originals = _originals((plain, args, kwargs), (twin, fake_args, fake_kwargs))
        cuts = session.cuts = _cuts_of(twin, session)
        session.replica = replica or expected_buckets(session.settings.parallel)

        def call_for(layers: Layers) -> _FakeCall:
            return _FakeCall(twin, fake_args, fake_kwargs, mode, session, originals, layers)

        return _first_that_fits(cuts, call_for, begin) if cuts else call_for(Layers({}, "")).plan(begin)


def _cuts_of(model: Callable[..., Any], session: Session) -> Cuts | None:
    """Return the ways to cut a model into blocks; a function has one."""
    if isinstance(model, nn.Module):
        sharded = expected_shards(model, session.settings)
        if sharded is None:
            return Cuts(model, session.settings.blocks)
        session.step.around.surroundings = sharded.surroundings
        return Cuts.fixed(model, sharded.layers)
    refuse_names_in_function(session.settings.blocks)
    return None


def _first_that_fits(cuts: Cuts, call_for: Callable[[Layers], _FakeCall], begin: float) -> Plan | StepPlan:
    """Return the plan of the finest cut that fits; if none does, raise, or return the one of the least peak."""
    over: list[Plan | StepPlan] = []
    while True:
        refused = None
        call = call_for(cuts.now)
        try:
            found = call.plan(begin)
        except InfeasibleBudgetError as error:
            refused = error
        else:
            if found.fits:
                return found
            over.append(found)
        if not cuts.coarser(refused, can_join=call.has_joined or cuts.now is cuts.first):
            break
    if refused is not None:
        raise cuts.begin_again().with_traceback(None) from None
    return min(over, key=lambda each: each.peak_bytes)


@contextmanager
def _our_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        own = lowtide_cause(error) or _without_data(error) or failed_here(error)
        raise own from own.__cause__


class _FakeCall:
    """A call of a model that is made of fake tensors; it may be made several times."""

    def __init__(
        self,
        twin: Any,
        args: Any,
        kwargs: Any,
        mode: FakeTensorMode,
        session: Session,
        originals: Originals | None,
        layers: Layers,
    ) -> None:
        self.capture = CallCapture()
        self._args, self._kwargs, self._mode = args, kwargs, mode
        self._model = twin if isinstance(twin, nn.Module) else None
        self._breaks = num_graph_breaks()
        self._session = session
        self._layer_names = tuple(layers.modules)
        backend = capturing_backend(session, self.capture)
        make_run: MakeRun = lambda forward, _, alike: Entry(forward, backend, instances=alike)  # noqa: E731
        self._layers = LayerBlocks(layers, session, make_run) if layers.modules else None
        plain = twin if self._model is None else plain_call(twin)
        self._entry = Entry(
            plain, backend, expect_branches=originals is not None, originals=originals, inside=self._layers
        )

    def plan(self, begin: float) -> Plan | StepPlan:
        """Return the plan of the call; `begin` is when planning began."""
        try:
            self.run()
            if not self.capture.graphs:
                raise InvalidInputError(
                    "The call has no training graph: nothing it computes needs a gradient. Check that parameters (or "
                    "inputs) require gradients and that the model does not switch them off."
                )
            if not self.is_in_parts:
                return plan_graph(self.capture.graphs[0], self._session).plan
            rehearsal = self.rehearse()
        finally:
            if self._layers is not None:
                self._layers.remove()
        copied = 0 if self._model is None else buffer_copy_bytes(self._model)
        return plan_step(self.capture, rehearsal, self.places, self._session, begin, copied_bytes=copied)

    @property
    def is_in_parts(self) -> bool:
        """True if the call is a step of blocks: of several graphs, or of one with code around it."""
        has_more = self.capture.num_runs > 1 or num_graph_breaks() > self._breaks
        return self._layers is not None or self._session.step.around.surroundings is not None or has_more

    @property
    def has_joined(self) -> bool:
        """True if the call has run layers that are joined."""
        return self._layers is not None and self._layers.has_joined

    @cached_property
    def places(self) -> ModulePlaces:
        """The modules of the model."""
        return ModulePlaces(() if self._model is None else self._model.named_modules(), self._layer_names)

    def run(self) -> Any:
        """Return what the call returns."""
        with self._mode:
            return self._entry(*self._args, **self._kwargs)

    def rehearse(self) -> Rehearsal:
        """Run the call and its backward again, and return what happens between its blocks."""
        model = as_module(self._entry, tensors=True) if self._model is None else self._model
        outside = [*model.parameters(), *model.buffers(), *tensor_leaves((self._args, self._kwargs))]
        rehearsal = self.capture.rehearsal = Rehearsal(outside, self._next_run)
        with self._mode, rehearsal.watching():
            result = self._entry(*self._args, **self._kwargs)
            rehearsal.end_forward(model.parameters())
            _differentiate(output_tensors(result))
            del result
            rehearsal.end_backward()
        return rehearsal

    def _next_run(self, parameters: Sequence[nn.Parameter]) -> ModuleRun:
        around = self._session.step.around
        return around.next_run(None if around.layer else self.places.owner(parameters))


def _differentiate(outputs: Sequence[torch.Tensor]) -> None:
    """Run backward from the scalars among the outputs, or from all of them if there is none."""
    trained = [each for each in outputs if each.requires_grad]
    roots = [each for each in trained if each.numel() == 1] or trained
    torch.autograd.backward(roots, [torch.empty_like(root) for root in roots])


def _without_data(error: Exception) -> CaptureError | None:
    """Return the error for a model that reads what its inputs contain, if that is what `error` says."""
    if not isinstance(error, DataDependentOutputException):
        return None
    place = user_line("", traceback.extract_tb(error.__traceback__))
    found = CaptureError(
        f"The model reads what a tensor contains{f', at {place}' if place else ''}, and a call that is only planned "
        "computes nothing. Branches on integer and boolean inputs are followed if model and inputs have data, on no "
        "device 'meta'; lowtide.wrap plans while the model trains."
    )
    found.__cause__ = error
    return found


def _originals(given: tuple[Any, ...], copies: tuple[Any, ...]) -> Originals | None:
    """Return the tensors that the copies stand for, which decide the branches; None if some have no data.

    Then the model is traced without knowing what its inputs contain, and does what it does while it is traced.
    """
    pairs = list(zip(_reachable(*given), _reachable(*copies), strict=True))
    if any(tensor.is_meta or isinstance(tensor, FakeTensor) for tensor, _ in pairs):
        return None
    return {id(fake): tensor for tensor, fake in pairs}


def _reachable(model: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    own = [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []
    return [*own, *tensor_leaves((tuple(args), dict(kwargs or {})))]


def _mode_of(args: Any, kwargs: Any) -> FakeTensorMode | None:
    """Return the mode of arguments that are fakes already: fakes of two modes cannot meet."""
    fakes = (leaf for leaf in tensor_leaves((args, kwargs)) if isinstance(leaf, FakeTensor))
    return next(map(fake_mode_of, fakes), None)


def _without_wrapping(model: Callable[..., Any]) -> Callable[..., Any]:
    wrapped = wrapped_of(model)
    return model if wrapped is None or isinstance(model, nn.Module) else wrapped.plain
