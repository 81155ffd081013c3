"""A module as a block of a step that runs in eager mode: the step's session says whether it keeps or runs again.

What holds: the bits, random numbers, buffers and Python state of plain training, as for chains, of which this is one
of a single position. What does not: sizes inside the module that depend on data are known only from calls seen, see
`watched_plans`. And where a parameter is used more than once inside of the module, and again elsewhere in the step, its
gradient would add up in another order than in plain training; two runs of such a module in one step are refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from lowtide.blocks.block.block_graph import BlockGraph
from lowtide.blocks.block.call_checks import WatchedModules, check_call, check_modules
from lowtide.blocks.block.position import Differentiated
from lowtide.blocks.block.side_effects import Autocast, autocast_now
from lowtide.blocks.block.tensor_spec import State, aliases_of, is_dense_tensor, kind_of, label_of
from lowtide.blocks.execute.call_state import CallState, RunObserver
from lowtide.blocks.execute.chain_program import ChainProgram
from lowtide.blocks.opaque.call_form import FlatCall, FlatLayer
from lowtide.blocks.opaque.watched_plans import WatchedPlans
from lowtide.blocks.profile.chain_profile import Blocks, ChainProfile, profile_chain
from lowtide.blocks.step.session import StepSession
from lowtide.capture.arrived_gradients import AS_TRACED
from lowtide.errors import InvalidInputError, InvalidModelError, LowtideError
from lowtide.lower.variants import Turn
from lowtide.progress import ProgressLine


class CannotBeOpaque(Exception):  # noqa: N818
    """A module cannot be run again, so it cannot be a block.

    Attributes:
        name: Its name in the model.
        reason: Why, in whole sentences.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name, self.reason = name, reason


class _Depth(threading.local):
    """How many opaque blocks this thread is inside of."""

    here = 0


_depth = _Depth()


@dataclass(frozen=True, eq=False)
class _Planned:
    """The block for calls of one kind.

    Attributes:
        number: Its number in the session.
        programs: What runs its plans.
        plans: Its plans.
    """

    number: int
    programs: tuple[ChainProgram, ...]
    plans: WatchedPlans


@dataclass(eq=False)
class _Run(RunObserver):
    """One run of a block, as the step's session and the block's plans are told of it.

    Attributes:
        session: The step's session.
        planned: The block.
        turn: Which of its plans it runs, and when.
        num_inputs: How many of the gradients that it returns are of its inputs; the others are of parameters.
        held: Results that the plan which keeps everything holds. All plans hold them until backward begins, so that
            what is alive outside of the block does not depend on the plan.
    """

    session: StepSession
    planned: _Planned
    turn: Turn
    num_inputs: int
    held: Sequence[Tensor] = ()
    call: CallState | None = None

    def begin_call(self, call: CallState) -> None:
        """Remember what holds the values between forward and backward."""
        self.call = call

    def let_go(self) -> None:
        """Let go of what is kept for a backward that will not come."""
        self.held = ()
        if self.call is not None:
            self.call.clear()

    def begin_backward(self, tangents: Sequence[Tensor | None]) -> None:
        """Note that backward begins."""
        arrived = [each for each in tangents if each is not None]
        self.planned.plans.note_arrival(arrived)
        self.session.begin_backward(self.turn, AS_TRACED)
        self.held = ()

    def end_backward(self, gradients: Sequence[Tensor | None]) -> None:
        """Note that backward has ended, and what the session has to know from now on."""
        own = gradients[: self.num_inputs]
        self.session.end_backward(self.turn, own, gradients[self.num_inputs :])
        self.planned.plans.forget_results()
        if self.planned.plans.take_changes():
            self.session.update(self.planned.number, self.planned.plans.menu())

    def recorded_run(self, run: Callable[[], tuple[State, BlockGraph]]) -> tuple[State, BlockGraph]:
        """Return `run()`, measured."""
        return self.planned.plans.run(run)

    def deferred_run(self, run: Callable[[], tuple[State, BlockGraph]]) -> tuple[State, BlockGraph]:
        """Return `run()`, measured."""
        return self.planned.plans.run_deferred(run)

    def filling_run(self, run: Callable[[], None]) -> None:
        """Call `run()`, measured."""
        self.planned.plans.fill(run)

    def differentiation(self, run: Callable[[], Differentiated]) -> Differentiated:
        """Return `run()`, measured."""
        return self.planned.plans.differentiate(run)


class OpaqueBlock:
    """Runs one module as a block of a step.

    Args:
        name: Its name in the model.
        layer: The module.
        plain: Its own `forward`.
        session: The step's session.
        verify: Compare parameters and inputs between forward and backward.
    """

    def __init__(
        self, name: str, layer: nn.Module, plain: Callable[..., Any], session: StepSession, *, verify: bool = False
    ) -> None:
        self.name, self.layer = name, layer
        self._plain, self._session, self._verify = plain, session, verify
        self._flat = FlatLayer(layer, self._inside, name)
        self._watched = WatchedModules([layer])
        self._planned: dict[Any, _Planned | None] = {}
        # Made before the block was first run.
        self._profiles: dict[Any, ChainProfile] = {}
        self._runs: WeakSet[_Run] = WeakSet()
        session.when_discarded(self._discard)

    def _discard(self, turns: Collection[int]) -> None:
        """Let go of what the runs with these turns keep: their call has ended with an error."""
        for run in list(self._runs):
            if run.turn.place in turns:
                run.let_go()
        for planned in self._planned.values():
            if planned is not None:
                planned.plans.forget_results()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns; raise `CannotBeOpaque` if it cannot be run again."""
        if _depth.here or not torch.is_grad_enabled():
            return self._plain(*args, **kwargs)
        call = FlatCall.of(args, kwargs)
        marks, parameters = self._watched.look()
        given = [each for each in (*call.state, *call.others) if isinstance(each, Tensor)]
        if not any(tensor.requires_grad for tensor in (*given, *parameters)):
            return self._plain(*args, **kwargs)
        autocast = autocast_now(tensor.device for tensor in (*call.state, *parameters[:1]))
        planned = self._find(call, autocast, marks, args, kwargs)
        if planned is None:
            return self._plain(*args, **kwargs)
        return self._run(planned, call, autocast)

    def refusal(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CannotBeOpaque | None:
        """Return why such a call cannot be one of a block, or None if it can; the module is profiled in it."""
        call = FlatCall.of(args, kwargs)
        marks, parameters = self._watched.look()
        autocast = autocast_now(tensor.device for tensor in (*call.state, *parameters[:1]))
        try:
            self._profiles[_key(call, autocast, marks)] = self._profile(call, autocast, args, kwargs)
        except CannotBeOpaque as error:
            return error
        return None

    def _inside(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; opaque modules in it run as they are."""
        _depth.here += 1
        try:
            return self._plain(*args, **kwargs)
        finally:
            _depth.here -= 1

    def _run(self, planned: _Planned, call: FlatCall, autocast: Autocast) -> Any:
        self._check_order(planned)
        turn = self._session.begin_forward(planned.number, call.state, ())
        run = _Run(self._session, planned, turn, len(call.state))
        self._runs.add(run)
        program = planned.programs[turn.variant]
        outputs = program.run(call.state, call.arguments, autocast, verify=self._verify, observer=run)
        self._session.end_forward(turn, outputs)
        if self._session.keeps_values:
            run.held = [outputs[index].detach() for index in planned.plans.profile.costs[0].saved_results]
        assert call.form.result is not None, "the layer has run"
        return call.form.result.result(outputs)

    def _check_order(self, planned: _Planned) -> None:
        """Raise if gradients of parameters would add up in another order than in plain training."""
        own = {each.number for each in self._planned.values() if each is not None}
        if planned.plans.profile.costs[0].reused and self._session.num_runs(own):
            raise CannotBeOpaque(
                self.name,
                f"{label_of(self.name, self.layer)} uses a parameter several times inside, and runs more than once in "
                "a step: gradients of that parameter would add up in another order than in plain training.",
            )

    def _find(
        self, call: FlatCall, autocast: Autocast, marks: tuple[object, ...], args: Any, kwargs: Any
    ) -> _Planned | None:
        """Return the block for such a call, or None if nothing in it needs a gradient."""
        key = _key(call, autocast, marks)
        if key not in self._planned:
            profile = self._profiles.pop(key, None) or self._profile(call, autocast, args, kwargs)
            self._planned[key] = self._plan(profile, call)
        return self._planned[key]

    def _profile(self, call: FlatCall, autocast: Autocast, args: Any, kwargs: Any) -> ChainProfile:
        self._check(call)
        failed: Exception
        try:
            check_modules(self._watched.modules, ())
            blocks = Blocks.of([self.name], [self._flat], 0)
            with ProgressLine() as progress:
                return profile_chain(blocks, call.state, call.arguments, autocast, progress)
        except (InvalidModelError, InvalidInputError) as error:
            raise CannotBeOpaque(self.name, str(error)) from error
        except (LowtideError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            failed = error
        # Profiling has left nothing behind; what fails in plain training fails there.
        self._plain(*args, **kwargs)
        raise CannotBeOpaque(self.name, f"By itself it fails with {type(failed).__name__}: {failed}") from failed

    def _check(self, call: FlatCall) -> None:
        """Raise if a call cannot be a node of the autograd graph."""
        label = label_of(self.name, self.layer)
        if not call.state:
            raise CannotBeOpaque(self.name, f"{label} was called without a tensor.")
        unusual = next((each for each in call.others if isinstance(each, Tensor) and each.requires_grad), None)
        if unusual is not None:
            assert not is_dense_tensor(unusual)
            raise CannotBeOpaque(self.name, f"{label} was given {kind_of(unusual)} that needs a gradient.")
        cache = next((each for each in call.others if hasattr(each, "get_seq_length")), None)
        if cache is not None:
            raise CannotBeOpaque(
                self.name,
                f"{label} was given a {type(cache).__name__} of past keys and values, which it would extend again when "
                "it is run again. Call the model with use_cache=False.",
            )
        check_call(call.state, (), self._watched.modules)

    def _plan(self, profile: ChainProfile, call: FlatCall) -> _Planned | None:
        if not profile.costs[0].grad_results:
            return None
        plans = WatchedPlans(profile, call.state[0].device)
        number = self._session.add(plans.menu(), call.state[0].device, name=self.name)
        return _Planned(number, plans.programs(), plans)


def _key(call: FlatCall, autocast: Autocast, marks: tuple[object, ...]) -> tuple[Any, ...]:
    """Return what calls share that are planned together."""
    return call.key, aliases_of(call.state), autocast, marks
