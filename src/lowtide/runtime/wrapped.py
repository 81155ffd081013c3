"""One wrapped model or function: runs its training calls planned, again where their beginning did not fit."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from lowtide.blocks.step.find_layers import Refusal
from lowtide.blocks.step.module_places import ModulePlaces
from lowtide.capture.source_lines import without_our_frames
from lowtide.distributed.replicas import running, trained_module
from lowtide.errors import InfeasibleBudgetError, InvalidModelError, LowtideError
from lowtide.pytorch.compiler.tracing import is_untraceable, refusing_breaks
from lowtide.pytorch.modules import call_in_slot, hooks_of_all_modules
from lowtide.pytorch.nested import tensor_leaves
from lowtide.pytorch.storages import storage_bytes
from lowtide.runtime.backend import training_backend
from lowtide.runtime.compiled_entry import Entry, warn_of_recompilations
from lowtide.runtime.eager_errors import eager_error, eager_error_within
from lowtide.runtime.entry_points import ForwardOverride, between_graphs, in_planned_call, planned_call
from lowtide.runtime.failure_causes import (
    cannot_begin_again,
    failed_here,
    in_unusual_context,
    is_users_own,
    lowtide_cause,
    nothing_captured,
    refusal_behind,
    refuse_context,
)
from lowtide.runtime.layer_blocks import LayerBlocks
from lowtide.runtime.log_noise import without_compiler_warnings
from lowtide.runtime.model_plans import LayersAreWholeError, LayersUndecidedError, Session
from lowtide.runtime.model_state import ModelState, has_lazy_tensors, make_lazy_tensors
from lowtide.runtime.opaque_modules import LayerDecisions, has_recurrent_parts
from lowtide.runtime.output_tensors import output_tensors
from lowtide.runtime.sharded_calls import ShardedCalls, sharded_calls
from lowtide.runtime.verify import as_module, verify_call

# A copy of this many bytes does not show beside a step; it is what predicted peaks may be off by.
_SMALL_BUFFERS_BYTES = 64 * 1024


class Wrapped:
    """Runs calls of one model: planned if they train it, plainly if not.

    Args:
        plain: What the model did before it was wrapped.
        model: The model, or None if `plain` is a function.
        session: Plans its graphs.
        verify: Compare the first training call with plain training.
        layers: Layers of the model that are blocks of the step, if there are any.
    """

    def __init__(
        self,
        plain: Callable[..., Any],
        model: nn.Module | None,
        session: Session,
        *,
        verify: bool,
        layers: LayerBlocks | None = None,
    ) -> None:
        self.plain = plain
        self.model = model
        self.session = session
        self.overrides: list[ForwardOverride] = []
        self.layers = layers
        self._forward: Wrapped | None = None
        # Which of a module's layers turn out to be blocks.
        self.decisions: LayerDecisions | None = None
        self._verify = verify
        self._compiled_for = self._circumstances()
        self._entry = self._new_entry()
        self._compiling_calls = 0
        # Known from the first training call on: models are sharded after they are wrapped, or before.
        self._sharded: ShardedCalls | None = None
        self._has_looked_for_shards = False
        self._may_be_lazy = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns."""
        return self._train_by_itself(*args, **kwargs) if self.trains() else self.plain(*args, **kwargs)

    @between_graphs
    def _train_by_itself(self, *args: Any, **kwargs: Any) -> Any:
        if not self._has_looked_for_shards:
            self._look_for_shards()
        if self._may_be_lazy:
            self._make_lazy_tensors(args, kwargs)
        if self._verify and not has_lazy_tensors(model := self._as_module(tensors=True)):
            self._verify = False
            verify_call(self.unplanned, self.train, model, args, kwargs)
        return self.train(*args, **kwargs)

    def _make_lazy_tensors(self, args: Any, kwargs: Any) -> None:
        """Let the model make the tensors that it does not have yet."""
        model = self._as_module(tensors=True)
        self._may_be_lazy = has_lazy_tensors(model)
        if self._may_be_lazy:
            make_lazy_tensors(model, lambda: self.unplanned(*args, **kwargs))

    def _look_for_shards(self) -> None:
        """Let sharded modules be the blocks, if there are any."""
        found = sharded_calls(self.model, self.plain, self.session, self.layers, verify=self._verify)
        self._has_looked_for_shards = True
        if found is not None:
            refuse_wrapped({} if self.session.cuts is None else self.session.cuts.now.modules)
            self._sharded, self.layers = found, found.layers
            self._entry = self._new_entry()

    @between_graphs
    def call_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model's `forward` returns, called by itself: without the model's hooks."""
        if self._forward is None:
            self._forward = Wrapped(self.overrides[0].plain, self.model, self.session, verify=False, layers=self.layers)
            self._forward.decisions = self.decisions
        return self._forward(*args, **kwargs)

    def unplanned(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a call without a plan, also if it trains."""
        with planned_call:
            return self.plain(*args, **kwargs)

    def trains(self) -> bool:
        """Return True if a call made now is to be planned: it trains, and is no part of a call that is planned."""
        return (self.model is None or self.model.training) and torch.is_grad_enabled() and not in_planned_call()

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a planned training call."""
        num_compiled = self.session.num_compiled
        try:
            return self._train(args, kwargs)
        except Exception:
            raise
        except BaseException as error:
            # An interrupt comes wherever it likes; what was being made is made again by the next call.
            self.session.step.abandon_call()
            self._entry.revive()
            self._undo(error, num_compiled, None)
            raise

    def _train(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a planned training call; after an error, later calls train all the same."""
        if in_unusual_context():
            refuse_context(self.model, args, kwargs)
        session, num_compiled = self.session, self.session.num_compiled
        session.drop_overdrawn()
        session.replica = running()
        now = self._circumstances()
        if now != self._compiled_for:
            session.known_breaks.clear()
            self._entry, self._compiled_for = self._new_entry(), now
        if self._sharded is not None and not self._sharded.is_explored:
            self._explore_on_all_ranks(self._sharded, args, kwargs)
        before = self._snapshot(args, kwargs) if self._sharded is None else None
        session.can_restart = before is not None
        session.begin_call(lambda: self._outside(args, kwargs), 0 if before is None else before.copied_bytes)
        try:
            result = self._run(args, kwargs)
            session.step.end_call(output_tensors(result))
        except Exception as error:
            # It holds all that forward has kept, while the call may be made again.
            result = None
            session.step.abandon_call()
            self._entry.revive()
            refused = refusal_behind(error)
            if refused is None:
                own = self._explain(error, args, kwargs)
                self._undo(own, num_compiled, before)
                if own is error:
                    raise
                raise own from own.__cause__
        else:
            refused = None
        if refused is not None:
            # Not before the error and its frames are gone: they hold what the call has computed.
            return self._train_or_refuse(refused, num_compiled, before, args, kwargs)
        session.is_deciding, session.has_trained = False, True
        if session.num_compiled > num_compiled:
            session.end_call()
            self._compiling_calls += 1
            warn_of_recompilations(self._compiling_calls)
        return result

    def _explore_on_all_ranks(self, sharded: ShardedCalls, args: Any, kwargs: Any) -> None:
        try:
            sharded.explore(lambda: self._explored(args, kwargs))
        except Exception as error:
            self._entry.revive()
            own = self._explain(error, args, kwargs)
            if own is error:
                raise
            raise own from own.__cause__

    def _undo(self, error: BaseException, num_compiled: int, before: ModelState | None) -> str | None:
        """Forget what was compiled in a call that has ended with `error`, and go back to where it began.

        Returns:
            What has changed that cannot be put back, or None.
        """
        if self.session.num_compiled > num_compiled and (not self.session.step.blocks or self._forget_blocks(error)):
            # What was compiled ends where the error is, and later calls without the error would find it.
            self._entry = self._new_entry()
        if not isinstance(error, LowtideError):
            # The graph may have been cut only where the error is.
            self.session.known_breaks.clear()
        return before.restore() if before is not None and isinstance(error, LowtideError) else None

    def _forget_blocks(self, error: BaseException) -> bool:
        """Forget the blocks of a model's first calls that the user's own `error` ended; False if they are needed."""
        if isinstance(error, LowtideError) or self.session.by_layers or not self.session.step.forget_blocks():
            return False
        self.session.is_undecided = self.decisions is not None and self.decisions.are_open
        return True

    def _snapshot(self, args: Any, kwargs: Any) -> ModelState | None:
        """Return the state before a call that may have to be undone; None if it cannot be undone.

        It cannot if a copy would count as memory, or if Python goes on with an iterator.
        """
        session, model = self.session, self._as_module()
        if not session.is_deciding:
            if session.plans:
                return None
            if session.step.blocks and sum(map(storage_bytes, model.buffers())) > _SMALL_BUFFERS_BYTES:
                return None
        before = ModelState(model, self.plain, tensor_leaves((args, kwargs)))
        if before.loose is not None and (
            before.loose.iterator is not None
            or (session.step.has_run and before.loose.held_bytes > _SMALL_BUFFERS_BYTES)
        ):
            return None
        return before

    def _run(self, args: Any, kwargs: Any) -> Any:
        """Return the result of the compiled call; raise if no part of it was planned though it needs gradients."""
        session = self.session
        quiet = nullcontext() if session.plans or session.step.blocks else without_compiler_warnings()
        # A break shows that layers are to be decided on; what the compiler makes of it would be thrown away.
        may_decide = session.is_undecided and session.can_restart and not session.by_layers
        with quiet, session.running(), refusing_breaks(refuse=may_decide):
            try:
                result = self._entry(*args, **kwargs)
            except Exception as error:
                if may_decide and is_untraceable(error) and lowtide_cause(error) is None:
                    raise LayersUndecidedError("The model is not captured as one graph.") from error
                raise
        if not self.session.ran and any(tensor.requires_grad for tensor in output_tensors(result)):
            if may_decide:
                del result
                raise LayersUndecidedError("Nothing of the model is captured: its layers may be blocks.")
            refuse_context(self.model, args, kwargs)
            raise nothing_captured(self.plain, args, kwargs, self.session.failure)
        return result

    def _train_or_refuse(
        self, refused: LowtideError, num_compiled: int, before: ModelState | None, args: Any, kwargs: Any
    ) -> Any:
        """Return the result of a call whose beginning seemed not to fit, or raise if all of it does not.

        What the first attempt held must be free by now. Its error is gone; frames that refer to each other are not.
        """
        gc.collect()
        # A call is only tried again from the state in which it began: else it would draw other random numbers.
        if before is not None and self._may_fit(refused):
            lost = self._undo(refused, num_compiled, before)
            found = self._still_refused(refused, args, kwargs) if lost is None else cannot_begin_again(lost)
            if found is None:
                gc.collect()
                return self.train(*args, **kwargs)
            refused = found
        users = self._users_error(refused, args, kwargs) if isinstance(refused, InfeasibleBudgetError) else None
        self._undo(users or refused, num_compiled, before)
        raise users or refused

    def _may_fit(self, refused: LowtideError) -> bool:
        """Return True if the call that was refused may fit, cut into other blocks, and this rank may make it again."""
        undecided = refused is self.session.step.uncertain or isinstance(refused, LayersUndecidedError)
        if self.session.communicates:
            return isinstance(refused, LayersUndecidedError)
        return undecided or self._has_other_cuts(refused)

    def _still_refused(self, refused: LowtideError, args: Any, kwargs: Any) -> LowtideError | None:
        """Return why a call does not fit, however it is cut into blocks; None if it is to be made again."""
        if not self._is_decided(refused, args, kwargs):
            return None
        found = self._explore(refused, args, kwargs) if refused is self.session.step.uncertain else refused
        return self._cut_coarser(found) if isinstance(found, Refusal) and self._has_other_cuts(found) else found

    def _is_decided(self, refused: LowtideError, args: Any, kwargs: Any) -> bool:
        """Return True if what was refused is a budget; else decide which layers are blocks."""
        if not isinstance(refused, LayersUndecidedError):
            return True
        if isinstance(refused, LayersAreWholeError):
            self._take_layers_as_whole(str(refused))
        else:
            self._decide_layers(args, kwargs)
        self._entry = self._new_entry()
        return False

    def _has_other_cuts(self, refused: LowtideError) -> bool:
        """Return True if a call that does not fit may fit where the model is cut into fewer blocks."""
        cuts = None if self.layers is None or not isinstance(refused, Refusal) else self.session.cuts
        return cuts is not None and cuts.has_others and not self.session.has_trained

    def _take_layers_as_whole(self, reason: str) -> None:
        """Let layers, which were blocks because there are many, be parts of the model's graph."""
        assert self.session.cuts is not None
        self.session.cuts.as_whole(reason)
        self._cut_anew()

    def _cut_coarser(self, refused: Refusal) -> Refusal | None:
        """Cut the model in the next coarser way; if there is none, return what names the least budget of all ways."""
        cuts, layers = self.session.cuts, self.layers
        assert cuts is not None
        assert layers is not None
        can_join = layers.has_joined or cuts.now is cuts.first
        error = None if cuts.coarser(refused, can_join=can_join) else cuts.begin_again()
        self._cut_anew()
        return error

    def _cut_anew(self) -> None:
        """Forget what was captured, and let the present cut be made."""
        session, model, decisions = self.session, self.model, self.decisions
        assert session.cuts is not None
        assert model is not None
        assert decisions is not None
        now = session.cuts.now
        session.is_undecided = now is session.cuts.first and decisions.are_open
        session.generation += 1
        session.step.begin_again()
        session.step.modules = ModulePlaces(model.named_modules(), now.modules)
        if self.layers is not None:
            self.layers.install(now)

    def _decide_layers(self, args: Any, kwargs: Any) -> None:
        """Find out in a call that keeps nothing which layers are blocks, or parts of layers that cannot be any."""
        decisions, model = self.decisions, self.model
        assert decisions is not None
        assert model is not None
        self.session.is_undecided, self.session.is_deciding = False, True
        try:
            # If the call fails in eager mode, it is the planned one that tells.
            decisions.make(lambda: eager_error(self.plain, model, args, kwargs, alone=False))
        finally:
            # They are again if this is interrupted.
            self.session.is_undecided = decisions.are_open
        # Traces of layers hold what they were called with.
        gc.collect()

    def _explore(self, refused: LowtideError, args: Any, kwargs: Any) -> LowtideError | None:
        """Return `refused` with the least budget of the whole call, of which a part has not fitted; None if it fits."""
        while True:
            try:
                return self._explored(args, kwargs)
            except Exception as error:
                if not isinstance(lowtide_cause(error), LayersUndecidedError):
                    return refused
            self._decide_layers(args, kwargs)
            self._entry = self._new_entry()
            gc.collect()

    def _explored(self, args: Any, kwargs: Any) -> LowtideError | None:
        """Return why a call does not fit, or None if it does.

        The call is run for the sequence of its blocks alone, keeps nothing, and is undone.
        """
        before = ModelState(self._as_module(), self.plain, tensor_leaves((args, kwargs)))
        step, lost = self.session.step, None
        try:
            with step.exploring(), without_compiler_warnings(), self.session.running():
                step.begin_call(lambda: self._outside(args, kwargs), before.copied_bytes)
                result = self._entry(*args, **kwargs)
                step.end_call(output_tensors(result))
                del result
            found: LowtideError | None = step.refusal() if step.has_run else None
        finally:
            step.abandon_call()
            lost = before.restore()
        return found if lost is None else cannot_begin_again(lost)

    def _outside(self, args: Any, kwargs: Any) -> list[torch.Tensor]:
        """Return the tensors that are there before a call."""
        model = self._as_module(tensors=True)
        sharded = () if self._sharded is None else self._sharded.model.unsharded_parameters()
        return [*model.parameters(), *model.buffers(), *tensor_leaves((args, kwargs)), *sharded]

    def _circumstances(self) -> tuple[Any, ...]:
        """Return what the compiler does not guard: dropped plans, the engine, and hooks of all modules by number."""
        return self.session.generation, self.session.replica, *map(tuple, hooks_of_all_modules())

    def _new_entry(self) -> Entry:
        recurrent = self.model is not None and has_recurrent_parts(self.model)
        return Entry(
            self.plain,
            training_backend(self.session),
            expect_branches=True,
            inside=self.layers,
            recurrent=recurrent,
            breaks=self.session.known_breaks,
        )

    def _as_module(self, *, tensors: bool = False) -> nn.Module:
        """Return the model; of a function, what it refers to."""
        return as_module(self.plain, tensors=tensors) if self.model is None else self.model

    def _explain(self, error: Exception, args: Any, kwargs: Any) -> Exception:
        """Return what to raise in the place of `error`: the user's own error as it is, or one of ours."""
        own = lowtide_cause(error)
        if own is None and (is_users_own(error) or isinstance(error, MemoryError | torch.OutOfMemoryError)):
            return error
        if own is not None:
            return own
        try:
            refuse_context(self.model, args, kwargs)
        except LowtideError as refused:
            return refused
        # Other ranks would not call a sharded model with this one.
        eager = None if self._sharded is not None else eager_error(self.plain, self._as_module(), args, kwargs)
        return failed_here(error, compared=not self.session.communicates) if eager is None else _of_the_user(eager)

    def _users_error(self, refused: InfeasibleBudgetError, args: Any, kwargs: Any) -> Exception | None:
        """Return the error that a call raises without a plan, or because of where it is made; None if there is none."""
        try:
            refuse_context(self.model, args, kwargs)
        except LowtideError as error:
            return error
        if self._sharded is not None:
            return None
        most_bytes = refused.budget_bytes - self.session.largest_workspace(refused)
        eager = eager_error_within(most_bytes, self.plain, self.model, args, kwargs)
        return None if eager is None else _of_the_user(eager)


def _of_the_user(error: Exception) -> Exception:
    return error.with_traceback(without_our_frames(error.__traceback__))


def refuse_wrapped(layers: Mapping[str, nn.Module]) -> None:
    """Raise if a module that is to be a block, or a part of one, is wrapped by itself."""
    for name, layer in layers.items():
        if any(wrapped_of(part) is not None for part in layer.modules()):
            raise InvalidModelError(
                f"{name!r}, which is to be a block, is wrapped itself or has a part that is: a step has one budget. "
                'Call lowtide.unwrap on it, or wrap the model with blocks="whole".'
            )


def wrapped_of(model: Any) -> Wrapped | None:
    """Return what `wrap` put on a model or function, or None."""
    if isinstance(model, nn.Module):
        found: Any = call_in_slot(trained_module(model))
    else:
        found = getattr(model, "__lowtide_wrapped__", None)
    return found if isinstance(found, Wrapped) else None
