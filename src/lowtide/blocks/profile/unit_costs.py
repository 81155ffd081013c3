"""What one unit of a chain costs: it is run by itself, and nothing outside of it changes.

Bytes come from the allocator: what is left when the unit has run is what autograd holds inside; the most during its
backward is more than what is there before and after. Which of its inputs and results autograd holds is seen by hooks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lowtide import device as devices
from lowtide.blocks.block.autograd_piece import hooks_off
from lowtide.blocks.block.position import Arguments, Position
from lowtide.blocks.block.side_effects import Owner, cloned
from lowtide.blocks.block.tensor_spec import State, aliases_of, specs_of, storage_bytes, storage_key
from lowtide.blocks.profile.clock import ENOUGH_SECONDS, FEW_RUNS, MANY_RUNS, least, seconds_of
from lowtide.blocks.profile.early_stop import measure_stop
from lowtide.blocks.profile.isolated_run import Left, Traces, check_results, explained, without_traces
from lowtide.errors import InvalidModelError
from lowtide.measure import run_phases

OUTSIDE = -2
NEW = -1


class InPlaceError(Exception):
    """The unit writes over the state it was given."""


@dataclass(frozen=True)
class Figures:
    """What a unit is and costs.

    Attributes:
        gives: Which of its results need a gradient.
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
        left: What a run leaves in Python and in generators.
        changing: Which of its buffers it changes, apart from statistics of normalisations, by number.
        after: What the tensors of the state after it are.
        foreign: Parameters that it uses and that cannot be found in it.
    """

    gives: tuple[int, ...]
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
    left: Left = field(default_factory=Left)
    changing: tuple[int, ...] = ()
    after: tuple[Any, ...] = ()
    foreign: tuple[Tensor, ...] = ()


def profile_unit(position: Position, state: State, arguments: Arguments, before: str) -> tuple[Figures, State]:
    """Return the figures of `position`, whose results are not known yet, and its state after such a run.

    Raises `InPlaceError` if it writes over the state. `before` names what comes before it, for messages.
    """
    with without_traces(position, state, arguments) as traces:
        figures, known = _probe(traces, state, arguments, before)
        with hooks_off(figures.foreign):
            if figures.gives:
                figures = _measure_training(known, figures, state, arguments)
                figures = _with_stop(known, figures, state, arguments)
            figures, after = _measure_run(known, figures, state, arguments)
    return replace(figures, after=specs_of(after)), after


def state_after(position: Position, state: State, arguments: Arguments) -> State:
    """Return the state after running `position`, which leaves no traces."""
    with without_traces(position, state, arguments):
        results = position.run(state, arguments)
    return results[: len(results) - position.unit.emits * len(position.unit.blocks)]


def _probe(traces: Traces, state: State, arguments: Arguments, before: str) -> tuple[Figures, Position]:
    """Return all figures but bytes of memory and seconds, and the position with what is now known of it."""
    position, owners = traces.position, traces.owners
    kept = traces.kept()
    old = cloned([module._buffers[name] for module, name in owners])
    # Copies: the unit may write over its input, which belongs to the caller.
    trial = tuple(cloned(state))
    versions = [tensor._version for tensor in trial]
    others = [tensor for tensor in _tensors_in(position, arguments) if not tensor.is_inference()]
    other_versions = [tensor._version for tensor in others]
    saved: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        saved.setdefault(storage_key(tensor), tensor)
        return tensor

    with torch.enable_grad(), saved_tensors_hooks(note, lambda tensor: tensor):
        marker = (torch.zeros(1, requires_grad=True) * 1).grad_fn
        entered, _, aliases = position.enter(trial, arguments)
        results = explained(lambda: position.call(entered, arguments, aliases), position, state, before)
    check_results(position, results)
    if [tensor._version for tensor in trial] != versions:
        raise InPlaceError
    if [tensor._version for tensor in others] != other_versions:
        raise InvalidModelError(
            f"{position.unit.labels[-1]} changes one of its extra arguments in place; it could not be run again. "
            "Let it work on a copy."
        )
    gives = tuple(index for index, tensor in enumerate(results) if tensor.requires_grad)
    used = _parameters_behind([results[index] for index in gives], marker, position)
    changed = _changed_buffers(position, owners, old)
    sources, sizes = _origins(position, trial, arguments, results)
    left = traces.left(kept, trial, results)
    known = {id(parameter) for parameter in position.parameters}
    foreign = tuple(parameter for parameter in used if id(parameter) not in known)
    figures = Figures(
        gives=gives,
        results=len(results),
        sources=sources,
        aliases=aliases_of(results),
        result_bytes=sizes,
        saved_state=tuple(index for index, tensor in enumerate(trial) if storage_key(tensor) in saved),
        saved_results=tuple(
            index for index, tensor in enumerate(results) if storage_key(tensor) in saved and sources[index] == NEW
        ),
        left=left,
        changing=changed,
        foreign=foreign,
    )
    complete = replace(
        position,
        gives=gives,
        results=len(results),
        parameters=position.parameters + foreign,
        changing=tuple(owners[index] for index in changed),
        rewinds=left.remembers,
    )
    return figures, complete


def _tensors_in(position: Position, arguments: Arguments) -> list[Tensor]:
    first = position.unit.first
    rows = arguments.extras[first : first + len(position.unit.blocks)]
    return [value for row in rows for value in row if isinstance(value, Tensor)]


def _parameters_behind(results: Sequence[Tensor], marker: Any, position: Position) -> list[Tensor]:
    """Return the leaf tensors that gradients of `results` reach; raise if they reach what was computed outside."""
    start, found = marker._sequence_nr(), {}
    seen: set[Any] = set()
    stack = [tensor.grad_fn for tensor in results]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found[id(leaf)] = leaf
            continue
        if node._sequence_nr() <= start:
            raise InvalidModelError(
                f"{position.unit.labels[-1]} uses a tensor that was computed outside of it and needs a gradient "
                f"({node.name()}). Pass it as an extra argument of the block or as a keyword of the chain."
            )
        if not node.name().startswith("_BeginBackward"):
            stack += [following for following, _ in node.next_functions]
    return list(found.values())


def _changed_buffers(position: Position, owners: Sequence[Owner], old: Sequence[Tensor]) -> tuple[int, ...]:
    """Return which buffers were changed, apart from the statistics of normalisations."""
    norms = {id(module) for module in position.norms}
    return tuple(
        index
        for index, ((module, name), was) in enumerate(zip(owners, old, strict=True))
        if id(module) not in norms and _is_changed(module._buffers.get(name), was)
    )


def _is_changed(now: Tensor | None, was: Tensor) -> bool:
    return now is None or not torch.equal(now, was)


def _origins(
    position: Position, state: State, arguments: Arguments, results: State
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return where the storage of every result comes from, and the bytes of those that are new."""
    outside = {storage_key(tensor) for tensor in (*_tensors_in(position, arguments), *arguments.leaves)}
    outside.update(map(storage_key, position.unit.contents.parameters()))
    given = {storage_key(tensor): index for index, tensor in reversed(list(enumerate(state)))}
    sources, sizes = [], []
    seen: set[int] = set()
    for tensor in results:
        key = storage_key(tensor)
        sources.append(given.get(key, OUTSIDE if key in outside else NEW))
        fresh = sources[-1] == NEW and key not in seen
        sizes.append(devices.round_bytes(storage_bytes(tensor), tensor.device) if fresh else 0)
        seen.add(key)
    return tuple(sources), tuple(sizes)


def _measure_run(position: Position, figures: Figures, state: State, arguments: Arguments) -> tuple[Figures, State]:
    """Return `figures` with what a run without gradients takes, and its state."""
    results: list[State] = []
    device = state[0].device
    phases = [lambda: results.append(position.run(state, arguments))]
    ((peak, _),) = run_phases(phases, device)
    workspace = peak - sum(figures.result_bytes) - figures.inside_bytes
    figures = replace(figures, workspace_bytes=max(figures.workspace_bytes, workspace, 0))
    if not figures.gives:
        figures = replace(figures, seconds=least(lambda: seconds_of(lambda: position.run(state, arguments), device)))
    emitted = position.unit.emits * len(position.unit.blocks)
    return figures, results[0][: len(results[0]) - emitted]


class _Trial:
    """One forward and backward of a position, in phases."""

    def __init__(self, position: Position, state: State, arguments: Arguments) -> None:
        self._position, self._state, self._arguments = position, state, arguments
        self._sums: list[Tensor | None] = [None] * position.shared
        self._results: State = ()
        self._gradients: list[Tensor | None] = []
        self._kept: Any = None
        emitted = position.unit.emits * len(position.unit.blocks)
        # What receives the last state sends its gradient and holds on to it.
        self._from_outside = range(0 if position.final else position.results - emitted, position.results)
        self.found: Any = None

    def adopt(self) -> None:
        """Go on with the gradients of what is shared, as if another position had begun them."""
        _, of_leaves, of_parameters = self.found
        self.found = None
        self._sums = [of_parameters[index] for index in self._position.shared_parameters]
        self._sums += [of_leaves[index] for index in self._position.shared_leaves]

    def forward(self) -> None:
        """Run it and keep the way back."""
        self._results, self._kept = self._position.run_kept(self._state, self._arguments)

    def turn(self) -> None:
        """Make the gradients of the results."""
        gives = set(self._position.gives)
        self._gradients = [
            torch.ones_like(tensor) if index in gives and index not in self._from_outside else None
            for index, tensor in enumerate(self._results)
        ]

    def forget(self) -> None:
        """Forget the results, apart from those that the caller has."""
        self._results = tuple(self._results[index] for index in self._from_outside)

    def outside(self) -> list[tuple[int, Tensor]]:
        """Return gradients of the results that leave the chain, which are there anyway."""
        return [
            (index, torch.ones_like(self._results[index]))
            for index in self._from_outside
            if index in self._position.gives
        ]

    def add(self, gradients: list[tuple[int, Tensor]]) -> None:
        """Take over gradients that are there anyway."""
        for index, gradient in gradients:
            self._gradients[index] = gradient

    def backward(self) -> None:
        """Go back."""
        self.found = self._position.differentiate(self._kept, self._gradients, self._sums)
        self._kept = None


def _measure_training(position: Position, figures: Figures, state: State, arguments: Arguments) -> Figures:
    """Return `figures` with bytes and seconds of a forward and a backward."""
    device = state[0].device
    rehearsal = _Trial(position, state, arguments)
    rehearsal.forward()
    emitted = rehearsal.outside()
    del rehearsal
    trial = _Trial(position, state, arguments)
    once = [trial.forward, trial.turn, lambda: (trial.add(emitted), trial.forget()), trial.backward]
    forward, _, ready, backward = run_phases(once, device)
    of_state, of_leaves, of_parameters = trial.found
    results = sum(figures.result_bytes)
    figures = replace(
        figures,
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
        trial = _Trial(position, state, arguments)
        once = [trial.forward, trial.turn, lambda: (trial.add(emitted), trial.forget()), trial.backward]
        *_, ready, backward = run_phases([*once, trial.adopt, *once], device)
        figures = replace(figures, adding_workspace_bytes=max(backward[0] - ready[1], 0))
        del trial, once
    seconds, backward_seconds = _training_seconds(position, state, arguments, emitted)
    return replace(figures, seconds=seconds, backward_seconds=backward_seconds)


def _with_stop(position: Position, figures: Figures, state: State, arguments: Arguments) -> Figures:
    """Return `figures` with what a run takes that stops early, if there is one: backward must not read a result."""
    if figures.saved_results:
        return figures
    size, seconds = sum(figures.result_bytes), figures.seconds
    stop = measure_stop(position, state, arguments, result_bytes=size, seconds=seconds)
    if stop is None or stop.held_bytes > figures.inside_bytes:
        return figures
    return replace(
        figures,
        stop_seconds=max(seconds - stop.seconds_saved, 0.0),
        stop_workspace_bytes=max(stop.most_bytes - figures.inside_bytes, 0),
    )


def _gradient_bytes(gradient: Tensor | None) -> int:
    if gradient is None:
        return 0
    parts = (gradient._indices(), gradient._values()) if gradient.is_sparse else (gradient,)
    return sum(devices.round_bytes(storage_bytes(part), gradient.device) for part in parts)


def _training_seconds(
    position: Position, state: State, arguments: Arguments, emitted: list[tuple[int, Tensor]]
) -> tuple[float, float]:
    """Return the least times of a forward and of a backward."""
    device = state[0].device
    forward, backward = [], []
    trial = _Trial(position, state, arguments)
    while len(forward) < FEW_RUNS or (len(forward) < MANY_RUNS and sum(forward) + sum(backward) < ENOUGH_SECONDS):
        if forward:
            trial.adopt()
        forward.append(seconds_of(trial.forward, device))
        trial.turn()
        trial.add(emitted)
        trial.forget()
        backward.append(seconds_of(trial.backward, device))
    return min(forward), min(backward)
