"""A schedule of a chain as steps that run in eager mode, inside one node of the autograd graph.

Between forward and backward the states that the schedule keeps are alive, and the autograd graphs of positions that
keep all. Backward repeats forward steps as the schedule says, and differentiates positions one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.blocks import refusals as refused
from lowtide.blocks.block.block_graph import BlockGraph
from lowtide.blocks.block.position import Arguments, Differentiated, Position
from lowtide.blocks.block.side_effects import Autocast, autocast_as
from lowtide.blocks.block.tensor_spec import State
from lowtide.blocks.execute.call_state import CallState, RunObserver
from lowtide.blocks.execute.steps import Step, steps_of
from lowtide.blocks.profile.chain_graph import ChainOp
from lowtide.blocks.python_state.derived_weights import derived_names, refresh
from lowtide.blocks.python_state.random_streams import mark_streams
from lowtide.errors import InvalidModelError, UnsupportedBackwardError, VerificationError
from lowtide.lower.read_checksums import checksum
from lowtide.pytorch.autograd_graph import graph_is_retained, tensor_hooks_off
from lowtide.pytorch.modules import forward_pre_hooks, parameters
from lowtide.pytorch.tensor_versions import version_of
from lowtide.schedule.steps import Schedule

_CHANGED = (
    "{} was changed in place between forward and backward, which would recompute with the new contents. Change it "
    "after backward."
)


@dataclass(frozen=True, eq=False)
class ChainProgram:
    """A chain with its schedule, ready to run.

    Attributes:
        positions: The positions.
        forward: Steps of the forward pass.
        backward: Steps of the backward pass.
        parameters: All parameters that get gradients, each once.
        numbers: For every position, the numbers of its parameters among all.
        emitted: For every position, the place of its first emitted tensor among all, and how many it has.
        draws: Whether one of them draws random numbers of Python or numpy.
        derived: Modules with weights that hooks compute before every run.
    """

    positions: tuple[Position, ...]
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    parameters: tuple[Tensor, ...]
    numbers: tuple[tuple[int, ...], ...]
    emitted: tuple[tuple[int, int], ...]
    draws: bool = False
    derived: tuple[nn.Module, ...] = ()

    @staticmethod
    def make(positions: Sequence[Position], meanings: Sequence[ChainOp], schedule: Schedule) -> ChainProgram:
        """Return the program of `schedule`, whose ops do what `meanings` say."""
        trained = {id(each): each for position in positions for each in position.parameters}
        number = {key: index for index, key in enumerate(trained)}
        steps = steps_of([meanings[op] for op in schedule.steps], positions)
        boundary = len(schedule.forward)
        emits = [position.unit.num_emitted for position in positions]
        places = [0, *accumulate(emits)]
        return ChainProgram(
            positions=tuple(positions),
            forward=tuple(step for step in steps[:boundary] if step is not None),
            backward=tuple(step for step in steps[boundary:] if step is not None),
            parameters=tuple(trained.values()),
            numbers=tuple(tuple(number[id(each)] for each in position.parameters) for position in positions),
            emitted=tuple(zip(places, emits, strict=False)),
            draws=any(position.draws for position in positions),
            derived=tuple(
                module
                for position in positions
                for module in position.unit.contents.modules
                if forward_pre_hooks(module) and derived_names(module)
            ),
        )

    def run(
        self,
        state: State,
        arguments: Arguments,
        autocast: Autocast,
        *,
        verify: bool = False,
        observer: RunObserver | None = None,
    ) -> tuple[Tensor, ...]:
        """Return the state after the chain and what its blocks emit, as one node of the autograd graph."""
        call = CallState(self.positions, arguments, autocast, self.draws, verify, observer=observer)
        if observer is not None:
            observer.begin_call(call)
        outputs: tuple[Tensor, ...] = _run_node(
            self,
            call,
            len(state),
            *state,
            *arguments.leaves,
            *self.parameters,
        )
        refresh(self.derived)
        return outputs


class _ChainNode(torch.autograd.Function):
    """The whole chain as one node: inputs, leaves and parameters go in, the last state and what is emitted come out."""

    @staticmethod
    def forward(
        ctx: Any, program: ChainProgram, call: CallState, state_size: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Run the forward steps."""
        ctx.set_materialize_grads(False)
        ctx.program, ctx.call, ctx.state_size = program, call, state_size
        call.versions = [_mark(tensor) for tensor in tensors]
        call.others = [_mark(tensor) for tensor in call.arguments.others]
        call.sums = [checksum(tensor) for tensor in tensors] if call.verify else []
        ctx.tensors = tensors
        call.states[0] = tuple(tensor.detach() for tensor in tensors[:state_size])
        emitted: list[Tensor] = []
        after: State = ()
        mark = () if program.draws else mark_streams()
        with autocast_as(call.autocast):
            for step in program.forward:
                results = call.run(step)
                own = program.emitted[step.position][1]
                after = results[: len(results) - own]
                if own:
                    emitted += results[len(results) - own :]
                del results
                if step.store:
                    call.states[step.position + 1] = after
        if mark and mark != mark_streams():
            raise refused.drawn()
        if [_mark(tensor) for tensor in tensors] != call.versions:
            raise _changed_itself(call, ctx.state_size, tensors)
        # Aliases: what is returned becomes part of the caller's graph, which the states must not.
        outputs = tuple(tensor.detach() for tensor in (*after, *emitted))
        ctx.results = len(after)
        ctx.mark_non_differentiable(*_without_gradient(program, outputs, len(after)))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """Run the backward steps."""
        if torch.is_grad_enabled():
            raise UnsupportedBackwardError(
                "Second derivatives of a chain are not supported: backward was called with create_graph=True. Call the "
                "blocks one after the other instead, or leave create_graph out."
            )
        call: CallState | None = ctx.call
        if call is None:
            raise UnsupportedBackwardError(
                "Backward was called a second time on the same call of a chain. Pass retain_graph=True the first time."
            )
        retain = graph_is_retained()
        for number, (tensor, version) in enumerate(zip(ctx.tensors, call.versions, strict=True)):
            if _mark(tensor) != version:
                raise UnsupportedBackwardError(_changed(call, ctx.state_size, number, tensor))
        if [_mark(tensor) for tensor in call.arguments.others] != call.others:
            raise UnsupportedBackwardError(_CHANGED.format("An extra argument"))
        for number, (tensor, wanted) in enumerate(zip(ctx.tensors, call.sums, strict=bool(call.sums))):
            if checksum(tensor) != wanted:
                raise VerificationError(_changed(call, ctx.state_size, number, tensor))
        observer = call.observer
        if observer is not None:
            observer.begin_backward(gradients)
        if retain:
            call = call.copy()
        else:
            # What went in is needed no more, and lives as long as the loss otherwise.
            ctx.call, ctx.tensors = None, ()
        found = _run_backward(ctx.program, call, ctx.results, list(gradients), retain=retain)
        if observer is not None:
            observer.end_backward(found[3:])
        return found


# PyTorch does not annotate `Function.apply`.
_run_node: Callable[..., tuple[Tensor, ...]] = _ChainNode.apply


def _without_gradient(program: ChainProgram, outputs: Sequence[Tensor], size: int) -> list[Tensor]:
    """Return the outputs that need no gradient."""
    last = program.positions[-1]
    found = [outputs[index] for index in range(size) if index not in last.grad_results]
    for position, (place, own) in zip(program.positions, program.emitted, strict=True):
        first = position.results - own
        found += [outputs[size + place + k] for k in range(own) if first + k not in position.grad_results]
    return found


def _mark(tensor: Tensor) -> tuple[int, int]:
    """Return what shows whether a tensor was changed in place or given other contents."""
    return version_of(tensor), tensor.data_ptr()


def _kind(call: CallState, state_size: int, number: int, tensor: Tensor) -> str:
    if number < state_size:
        return f"Input {number} of the chain"
    if number < state_size + len(call.arguments.leaves):
        return "An extra argument"
    for position in call.positions:
        for module in position.unit.contents.modules:
            for name, each in parameters(module).items():
                if each is tensor:
                    return f"Parameter {name!r} of a {type(module).__name__} in {position.unit.labels[0]}"
    return "A parameter of the chain"


def _changed(call: CallState, state_size: int, number: int, tensor: Tensor) -> str:
    return _CHANGED.format(_kind(call, state_size, number, tensor))


def _changed_itself(call: CallState, state_size: int, tensors: Sequence[Tensor]) -> InvalidModelError:
    changed = [number for number, each in enumerate(tensors) if _mark(each) != call.versions[number]]
    what = _kind(call, state_size, changed[0], tensors[changed[0]])
    return InvalidModelError(
        f"{what} was changed in place by a block of the chain, which did not when it was profiled. A repeated run "
        "would begin with the new contents; let the block work on a copy."
    )


def _run_backward(
    program: ChainProgram, call: CallState, size: int, gradients: list[Tensor | None], *, retain: bool
) -> Any:
    """Return the gradients of all tensors that went in."""
    from_forward = set(call.graphs)
    emitted, flow = gradients[size:], gradients[:size]
    gradients.clear()
    sums = _Sums(program, call)
    at = len(program.positions)
    # Hooks on parameters are for the whole gradient, not for what single blocks contribute.
    with autocast_as(call.autocast), tensor_hooks_off(program.parameters):
        for step in program.backward:
            if not step.back:
                results = call.run(step)
                if step.store:
                    call.states[step.position + 1] = results[: len(results) - program.emitted[step.position][1]]
                del results
                continue
            position = program.positions[step.position]
            place, own = program.emitted[step.position]
            if step.position + 1 != at:
                # The state between was computed without gradients.
                flow = [None] * (position.results - own)
            at = step.position
            flow += emitted[place : place + own]
            graph = call.graphs.pop(at)
            if step.supply_state:
                graph.state[:] = call.states[at]
                if step.drop:
                    del call.states[at]
            flow = sums.back(at, graph, flow, retain=retain and at in from_forward)
            graph.state.clear()
            if retain and graph.deferred is not None:
                graph.deferred.clear()
    return (
        None,
        None,
        None,
        *(flow if not at else [None] * program.positions[0].state_size),
        *sums.leaves,
        *sums.parameters,
    )


class _Sums:
    """Gradients of leaves and parameters so far."""

    def __init__(self, program: ChainProgram, call: CallState) -> None:
        self._program, self._observer = program, call.observer
        self.leaves: list[Tensor | None] = [None] * len(call.arguments.leaves)
        self.parameters: list[Tensor | None] = [None] * len(program.parameters)

    def back(self, place: int, graph: BlockGraph, flow: list[Tensor | None], *, retain: bool) -> list[Tensor | None]:
        """Differentiate one position and return the gradients of the state before it; `flow` is emptied."""
        position, numbers = self._program.positions[place], self._program.numbers[place]
        begun = self._take(position, numbers)

        def run() -> Differentiated:
            return position.differentiate(graph, flow, begun, retain=retain)

        of_state, of_leaves, of_parameters = run() if self._observer is None else self._observer.differentiation(run)
        for leaf, gradient in zip(position.leaves, of_leaves, strict=True):
            self.leaves[leaf] = gradient
        for number, gradient in zip(numbers, of_parameters, strict=True):
            self.parameters[number] = gradient
        before: list[Tensor | None] = [None] * position.state_size
        for index, gradient in zip(position.grad_state, of_state, strict=True):
            before[index] = gradient
        return before

    def _take(self, position: Position, numbers: Sequence[int]) -> list[Tensor | None]:
        """Return the sums that `position` adds to, which nothing else refers to from now on."""
        taken = []
        for index in position.shared_parameters:
            number = numbers[index]
            taken.append(self.parameters[number])
            self.parameters[number] = None
        for index in position.shared_leaves:
            leaf = position.leaves[index]
            taken.append(self.leaves[leaf])
            self.leaves[leaf] = None
        return taken
