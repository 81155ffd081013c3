"""What one unit of a chain costs, and the trial runs that measure it.

Bytes come from the allocator: what is left when the unit has run is what autograd saves inside; what backward takes at
its peak, beyond what is there when it begins, is its workspace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lowtide import device as devices
from lowtide.blocks.block.block_graph import BlockGraph
from lowtide.blocks.block.position import Arguments, Position
from lowtide.blocks.block.tensor_spec import State
from lowtide.blocks.policy import EARLY_STOP
from lowtide.blocks.profile.isolated_run import RunEffects
from lowtide.costs.clock import BLOCKS, seconds_of, shortest, thread_time
from lowtide.errors import InvalidModelError
from lowtide.measure import run_phases
from lowtide.pytorch.storages import storage_bytes, storage_key
from lowtide.pytorch.tensor_versions import sparse_parts

# Where the storage of a result comes from, if not from the state.
OUTSIDE = -2
NEW = -1


@dataclass(frozen=True)
class UnitCosts:
    """What a unit is and costs.

    Attributes:
        grad_results: Which of its results need a gradient.
        results: How many results it has.
        sources: For every result, the tensor of the state whose storage it shares, or NEW, or OUTSIDE.
        aliases: For every result, the first one that has the same storage.
        result_bytes: For every result with a new storage its bytes; 0 for the second of two that share one.
        saved_state: Tensors of the state that autograd holds for its backward.
        saved_results: Results that autograd holds.
        inside_bytes: What else autograd holds.
        workspace_bytes: Most bytes while it runs, beyond its results and what is held inside.
        backward_workspace_bytes: Most bytes while its backward runs, beyond what is there when it begins.
        adding_workspace_bytes: The same if it adds to gradients that other units have begun.
        gradient_bytes: Gradients of the state.
        parameter_bytes: Gradient of every parameter; 0 where there is none.
        leaf_bytes: Gradient of every leaf; 0 where there is none.
        seconds: Time of a run.
        backward_seconds: Time of its backward.
        stop_seconds: Time of a run that stops when it has made what its backward reads; None if that is not worth it.
        stop_workspace_bytes: Most bytes during such a run, beyond what is held inside.
        effects: What a run changes in Python and in random generators.
        changing: Which of its buffers it changes, without statistics of normalisations, by number.
        after: What the tensors of the state after it are.
        foreign: Parameters that it uses and that cannot be found in it.
        reused: Whether it uses a parameter more than once.
    """

    grad_results: tuple[int, ...]
    results: int
    sources: tuple[int, ...]
    aliases: tuple[int, ...]
    result_bytes: tuple[int, ...]
    saved_state: tuple[int, ...] = ()
    saved_results: tuple[int, ...] = ()
    inside_bytes: int = 0
    workspace_bytes: int = 0
    backward_workspace_bytes: int = 0
    adding_workspace_bytes: int = 0
    gradient_bytes: int = 0
    parameter_bytes: tuple[int, ...] = ()
    leaf_bytes: tuple[int, ...] = ()
    seconds: float = 0.0
    backward_seconds: float = 0.0
    stop_seconds: float | None = None
    stop_workspace_bytes: int = 0
    effects: RunEffects = field(default_factory=RunEffects)
    changing: tuple[int, ...] = ()
    after: tuple[Any, ...] = ()
    foreign: tuple[Tensor, ...] = ()
    reused: bool = False


class _TrainingTrial:
    """One forward and backward of a position, in phases."""

    def __init__(self, position: Position, state: State, arguments: Arguments) -> None:
        self._position, self._state, self._arguments = position, state, arguments
        self._sums: list[Tensor | None] = [None] * position.shared
        self._results: State = ()
        self._gradients: list[Tensor | None] = []
        self._graph: BlockGraph | None = None
        emitted = position.unit.num_emitted
        # What receives the last state sends its gradient and holds on to it.
        self._from_outside = range(0 if position.final else position.results - emitted, position.results)
        self.found: tuple[Sequence[Tensor | None], ...] = ()

    def adopt(self) -> None:
        """Add to the gradients found so far of what is shared, as if another position had begun them."""
        _, of_leaves, of_parameters = self.found
        self.found = ()
        self._sums = [of_parameters[index] for index in self._position.shared_parameters]
        self._sums += [of_leaves[index] for index in self._position.shared_leaves]

    def forward(self) -> None:
        """Run it and keep its graph."""
        self._results, self._graph = self._position.run_recorded(self._state, self._arguments)

    def turn(self) -> None:
        """Make the gradients of the results."""
        grad_results = set(self._position.grad_results)
        self._gradients = [
            torch.ones_like(tensor) if index in grad_results and index not in self._from_outside else None
            for index, tensor in enumerate(self._results)
        ]

    def outside(self) -> list[tuple[int, Tensor]]:
        """Return gradients of the results that leave the chain, which are there anyway.

        They are laid out row by row, as most ops make them: where a result is not, its backward makes a copy.
        """
        return [
            (index, torch.ones_like(self._results[index], memory_format=torch.contiguous_format))
            for index in self._from_outside
            if index in self._position.grad_results
        ]

    def receive(self, gradients: list[tuple[int, Tensor]]) -> None:
        """Take over gradients that are there anyway, and drop the results that the caller does not have."""
        for index, gradient in gradients:
            self._gradients[index] = gradient
        self._results = tuple(self._results[index] for index in self._from_outside)

    def backward(self) -> None:
        """Differentiate it."""
        assert self._graph is not None, "forward comes first"
        self.found = self._position.differentiate(self._graph, self._gradients, self._sums)
        self._graph = None

    def phases(self, gradients: list[tuple[int, Tensor]]) -> list[Callable[[], None]]:
        """Return all phases in order; `gradients` are those that are there anyway."""
        return [self.forward, self.turn, lambda: self.receive(gradients), self.backward]


def with_training(position: Position, costs: UnitCosts, state: State, arguments: Arguments) -> UnitCosts:
    """Return `costs` with the bytes and seconds of a forward and a backward."""
    device = state[0].device
    first = _TrainingTrial(position, state, arguments)
    first.forward()
    emitted = first.outside()
    del first
    trial = _TrainingTrial(position, state, arguments)
    once = trial.phases(emitted)
    forward, _, ready, backward = run_phases(once, device)
    of_state, of_leaves, of_parameters = trial.found
    results = sum(costs.result_bytes)
    costs = replace(
        costs,
        inside_bytes=max(forward[1] - results, 0),
        workspace_bytes=max(forward[0] - max(forward[1], results), 0),
        backward_workspace_bytes=max(backward[0] - ready[1], 0),
        adding_workspace_bytes=max(backward[0] - ready[1], 0),
        gradient_bytes=sum(
            {storage_key(each): _gradient_bytes(each) for each in of_state if each is not None}.values()
        ),
        parameter_bytes=tuple(map(_gradient_bytes, of_parameters)),
        leaf_bytes=tuple(map(_gradient_bytes, of_leaves)),
    )
    del trial, once, of_state, of_leaves, of_parameters
    if position.shared:
        trial = _TrainingTrial(position, state, arguments)
        once = trial.phases(emitted)
        *_, ready, backward = run_phases([*once, trial.adopt, *once], device)
        costs = replace(costs, adding_workspace_bytes=max(backward[0] - ready[1], 0))
        del trial, once
    seconds, backward_seconds = _training_seconds(position, state, arguments, emitted)
    return replace(costs, seconds=seconds, backward_seconds=backward_seconds)


def _training_seconds(
    position: Position, state: State, arguments: Arguments, emitted: list[tuple[int, Tensor]]
) -> tuple[float, float]:
    """Return the least times of a forward and of a backward."""
    device = state[0].device
    forward: list[float] = []
    backward: list[float] = []
    trial = _TrainingTrial(position, state, arguments)
    while BLOCKS.wants_more(len(forward), sum(forward) + sum(backward)):
        if forward:
            trial.adopt()
        forward.append(seconds_of(trial.forward, device, thread_time))
        trial.turn()
        trial.receive(emitted)
        backward.append(seconds_of(trial.backward, device, thread_time))
    return min(forward), min(backward)


def _gradient_bytes(gradient: Tensor | None) -> int:
    if gradient is None:
        return 0
    parts = sparse_parts(gradient) if gradient.is_sparse else (gradient,)
    return sum(devices.round_bytes(storage_bytes(part), gradient.device) for part in parts)


def with_plain_run(position: Position, costs: UnitCosts, state: State, arguments: Arguments) -> tuple[UnitCosts, State]:
    """Return `costs` with what a run without gradients takes, and its state."""
    results: list[State] = []
    device = state[0].device
    phases = [lambda: results.append(position.run(state, arguments))]
    ((peak, _),) = run_phases(phases, device)
    workspace = peak - sum(costs.result_bytes) - costs.inside_bytes
    costs = replace(costs, workspace_bytes=max(costs.workspace_bytes, workspace, 0))
    if not costs.grad_results:
        seconds = shortest(lambda: seconds_of(lambda: position.run(state, arguments), device, thread_time), BLOCKS)
        costs = replace(costs, seconds=seconds)
    emitted = position.unit.num_emitted
    return costs, results[0][: len(results[0]) - emitted]


@dataclass(frozen=True)
class _EarlyStop:
    """What a run takes that ends when it has made what backward reads.

    Attributes:
        seconds_saved: How much less time it takes than a whole run.
        held_bytes: What it leaves behind for backward.
        most_bytes: The most bytes during it.
    """

    seconds_saved: float
    held_bytes: int
    most_bytes: int


def _measure_early_stop(
    position: Position, state: State, arguments: Arguments, *, result_bytes: int, seconds: float
) -> _EarlyStop | None:
    """Return what a run takes that ends early; None if there is nothing to gain.

    That is so if autograd holds more than can be deferred, as functions do that keep tensors in their own way; if the
    unit saves other tensors in its second run; or if what is not computed takes no longer than deferring.
    `result_bytes` and `seconds` are those of a whole run.
    """
    trial = _EarlyStopTrial(position, state, arguments)
    try:
        first, _, second = run_phases([trial.first, trial.forget, trial.second], state[0].device)
    except InvalidModelError:
        return None
    if first[1] > result_bytes + EARLY_STOP.unseen_bytes:
        return None
    saved = trial.seconds_saved()
    deferring = EARLY_STOP.run_seconds + trial.number * EARLY_STOP.save_seconds + EARLY_STOP.run_share * seconds
    if saved < deferring:
        return None
    return _EarlyStop(saved, second[1], second[0])


@dataclass
class _EarlyStopTrial:
    """A run that defers what it saves, and one that fills it in."""

    position: Position
    state: State
    arguments: Arguments
    results: State = ()
    graph: BlockGraph = field(init=False)

    def first(self) -> None:
        """Run it and defer what it saves."""
        self.results, self.graph = self.position.run_deferred(self.state, self.arguments)

    def forget(self) -> None:
        """Forget the results."""
        self.results = ()

    def second(self) -> None:
        """Fill in what is deferred."""
        with self.position.again(self.position.stash()):
            self.position.fill(self.graph, self.state, self.arguments)

    @property
    def number(self) -> int:
        """How many tensors are deferred."""
        return self.graph.deferred.number if self.graph.deferred is not None else 0

    def seconds_saved(self) -> float:
        """Return the least time from where a run would end to where it ends by itself."""
        device = self.state[0].device
        if not self.number:
            return shortest(lambda: seconds_of(self._whole_run, device, thread_time), BLOCKS)
        return shortest(lambda: self._rest(device), BLOCKS)

    def _whole_run(self) -> None:
        self.position.run_recorded(self.state, self.arguments)

    def _rest(self, device: torch.device) -> float:
        filled: list[float] = []
        with self.position.again(self.position.stash()):
            self.position.fill(self.graph, self.state, self.arguments, done=lambda: filled.append(thread_time(device)))
        return thread_time(device) - filled[0]


def with_early_stop(position: Position, costs: UnitCosts, state: State, arguments: Arguments) -> UnitCosts:
    """Return `costs` with those of a run that ends early, if that is possible and worth it.

    It is not possible if backward reads a result.
    """
    if costs.saved_results:
        return costs
    size, seconds = sum(costs.result_bytes), costs.seconds
    stop = _measure_early_stop(position, state, arguments, result_bytes=size, seconds=seconds)
    if stop is None or stop.held_bytes > costs.inside_bytes:
        return costs
    return replace(
        costs,
        stop_seconds=max(seconds - stop.seconds_saved, 0.0),
        stop_workspace_bytes=max(stop.most_bytes - costs.inside_bytes, 0),
    )
