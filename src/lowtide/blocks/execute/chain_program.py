"""A schedule of a chain as steps that run in eager mode, inside one node of the autograd graph.

Between forward and backward the states that the schedule keeps are alive, and for positions that keep all, their own
pieces of autograd graph. Backward runs forward steps again as the schedule says, and takes positions back one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import _get_current_graph_task_keep_graph

from lowtide.blocks.block.autograd_piece import Kept, hooks_off
from lowtide.blocks.block.position import Arguments, Position
from lowtide.blocks.block.side_effects import Autocast, autocast_as
from lowtide.blocks.block.tensor_spec import State
from lowtide.blocks.execute.steps import Step, steps_of
from lowtide.blocks.execute.tape import Tape
from lowtide.blocks.python_state import refusals as refused
from lowtide.blocks.python_state.derived_weights import derived_names, refresh
from lowtide.blocks.python_state.random_streams import mark_streams
from lowtide.blocks.python_state.snapshot import version_of
from lowtide.errors import InvalidModelError, UnsupportedBackwardError, VerificationError
from lowtide.lower.read_checksums import checksum
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
    def make(positions: Sequence[Position], meanings: Sequence[tuple[str, int]], schedule: Schedule) -> ChainProgram:
        """Return the program of `schedule`, whose ops do what `meanings` say."""
        parameters = {id(each): each for position in positions for each in position.parameters}
        number = {key: index for index, key in enumerate(parameters)}
        steps = steps_of([meanings[op] for op in schedule.steps], positions)
        boundary = len(schedule.forward)
        emits = [position.unit.emits * len(position.unit.blocks) for position in positions]
        places = [0, *accumulate(emits)]
        return ChainProgram(
            positions=tuple(positions),
            forward=tuple(step for step in steps[:boundary] if step is not None),
            backward=tuple(step for step in steps[boundary:] if step is not None),
            parameters=tuple(parameters.values()),
            numbers=tuple(tuple(number[id(each)] for each in position.parameters) for position in positions),
            emitted=tuple(zip(places, emits, strict=False)),
            draws=any(position.draws for position in positions),
            derived=tuple(
                module
                for position in positions
                for module in position.unit.contents.modules
                if module._forward_pre_hooks and derived_names(module)
            ),
        )

    def run(
        self, state: State, arguments: Arguments, autocast: Autocast, *, verify: bool = False
    ) -> tuple[Tensor, ...]:
        """Return the state after the chain and what its blocks emit, as one node of the autograd graph."""
        outputs: tuple[Tensor, ...] = _Chain.apply(
            self,
            Tape(self.positions, arguments, autocast, self.draws, verify),
            len(state),
            *state,
            *arguments.leaves,
            *self.parameters,
        )
        refresh(self.derived)
        return outputs


class _Chain(torch.autograd.Function):
    """The whole chain as one node: inputs, leaves and parameters go in, the last state and what is emitted come out."""

    @staticmethod
    def forward(ctx: Any, program: ChainProgram, tape: Tape, state_size: int, *tensors: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Run the forward steps."""
        ctx.set_materialize_grads(False)
        ctx.program, ctx.tape, ctx.state_size = program, tape, state_size
        tape.versions = [_mark(tensor) for tensor in tensors]
        tape.others = [_mark(tensor) for tensor in tape.arguments.others]
        tape.sums = [checksum(tensor) for tensor in tensors] if tape.verify else []
        ctx.tensors = tensors
        tape.states[0] = tuple(tensor.detach() for tensor in tensors[:state_size])
        emitted: list[Tensor] = []
        after: State = ()
        mark = () if program.draws else mark_streams()
        with autocast_as(tape.autocast):
            for step in program.forward:
                results = tape.run(step)
                own = program.emitted[step.position][1]
                after = results[: len(results) - own]
                if own:
                    emitted += results[len(results) - own :]
                del results
                if step.store:
                    tape.states[step.position + 1] = after
        if mark and mark != mark_streams():
            raise refused.drawn()
        if [_mark(tensor) for tensor in tensors] != tape.versions:
            raise _changed_itself(tape, ctx.state_size, tensors)
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
        tape: Tape | None = ctx.tape
        if tape is None:
            raise UnsupportedBackwardError(
                "Backward was called a second time on the same call of a chain. Pass retain_graph=True the first time."
            )
        retain = _get_current_graph_task_keep_graph()
        for number, (tensor, version) in enumerate(zip(ctx.tensors, tape.versions, strict=True)):
            if _mark(tensor) != version:
                raise UnsupportedBackwardError(_changed(tape, ctx.state_size, number, tensor))
        if [_mark(tensor) for tensor in tape.arguments.others] != tape.others:
            raise UnsupportedBackwardError(_CHANGED.format("An extra argument"))
        for number, (tensor, wanted) in enumerate(zip(ctx.tensors, tape.sums, strict=bool(tape.sums))):
            if checksum(tensor) != wanted:
                raise VerificationError(_changed(tape, ctx.state_size, number, tensor))
        if retain:
            tape = tape.copy()
        else:
            ctx.tape = None
        return _go_back(ctx.program, tape, ctx.results, list(gradients), retain=retain)


def _without_gradient(program: ChainProgram, outputs: Sequence[Tensor], size: int) -> list[Tensor]:
    """Return the outputs that need no gradient."""
    last = program.positions[-1]
    found = [outputs[index] for index in range(size) if index not in last.gives]
    for position, (place, own) in zip(program.positions, program.emitted, strict=True):
        first = position.results - own
        found += [outputs[size + place + k] for k in range(own) if first + k not in position.gives]
    return found


def _mark(tensor: Tensor) -> tuple[int, int]:
    """Return what shows whether a tensor was changed in place or given other contents."""
    return version_of(tensor), tensor.data_ptr()


def _kind(tape: Tape, state_size: int, number: int, tensor: Tensor) -> str:
    if number < state_size:
        return f"Input {number} of the chain"
    if number < state_size + len(tape.arguments.leaves):
        return "An extra argument"
    for position in tape.positions:
        for module in position.unit.contents.modules:
            for name, each in module._parameters.items():
                if each is tensor:
                    return f"Parameter {name!r} of a {type(module).__name__} in {position.unit.labels[0]}"
    return "A parameter of the chain"


def _changed(tape: Tape, state_size: int, number: int, tensor: Tensor) -> str:
    return _CHANGED.format(_kind(tape, state_size, number, tensor))


def _changed_itself(tape: Tape, state_size: int, tensors: Sequence[Tensor]) -> InvalidModelError:
    changed = [number for number, each in enumerate(tensors) if _mark(each) != tape.versions[number]]
    what = _kind(tape, state_size, changed[0], tensors[changed[0]])
    return InvalidModelError(
        f"{what} was changed in place by a block of the chain, which did not when it was looked at. A repeated run "
        "would begin with the new contents; let the block work on a copy."
    )


def _go_back(program: ChainProgram, tape: Tape, size: int, gradients: list[Tensor | None], *, retain: bool) -> Any:
    """Return the gradients of all tensors that went in."""
    from_forward = set(tape.kept)
    emitted, flow = gradients[size:], gradients[:size]
    gradients.clear()
    sums = _Sums(program, len(tape.arguments.leaves))
    at = len(program.positions)
    with autocast_as(tape.autocast), hooks_off(program.parameters):
        for step in program.backward:
            if not step.back:
                results = tape.run(step)
                if step.store:
                    tape.states[step.position + 1] = results[: len(results) - program.emitted[step.position][1]]
                del results
                continue
            position = program.positions[step.position]
            place, own = program.emitted[step.position]
            if step.position + 1 != at:
                # The state between was computed without gradients.
                flow = [None] * (position.results - own)
            at = step.position
            flow += emitted[place : place + own]
            kept = tape.kept.pop(at)
            if step.apart:
                kept.state[:] = tape.states[at]
                if step.drop:
                    del tape.states[at]
            flow = sums.back(at, kept, flow, retain=retain and at in from_forward)
            kept.state.clear()
            if retain and kept.blanks is not None:
                kept.blanks.empty()
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

    def __init__(self, program: ChainProgram, leaves: int) -> None:
        self._program = program
        self.leaves: list[Tensor | None] = [None] * leaves
        self.parameters: list[Tensor | None] = [None] * len(program.parameters)

    def back(self, place: int, kept: Kept, flow: list[Tensor | None], *, retain: bool) -> list[Tensor | None]:
        """Take one position back and return the gradients of the state before it; `flow` is emptied."""
        position, numbers = self._program.positions[place], self._program.numbers[place]
        begun = self._take(position, numbers)
        of_state, of_leaves, of_parameters = position.differentiate(kept, flow, begun, retain=retain)
        for leaf, gradient in zip(position.leaves, of_leaves, strict=True):
            self.leaves[leaf] = gradient
        for number, gradient in zip(numbers, of_parameters, strict=True):
            self.parameters[number] = gradient
        before: list[Tensor | None] = [None] * position.state_size
        for index, gradient in zip(position.needs, of_state, strict=True):
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
