"""One call of a planned chain: what it keeps between forward and backward, and how its forward steps run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from lowtide.blocks import refusals as refused
from lowtide.blocks.block.block_graph import BlockGraph
from lowtide.blocks.block.position import Arguments, Differentiated, Position
from lowtide.blocks.block.side_effects import Autocast, RandomStates, read_random_states, restore_random_states
from lowtide.blocks.block.tensor_spec import State
from lowtide.blocks.execute.steps import Step
from lowtide.blocks.python_state.random_streams import StreamStates, read_streams, restore_streams
from lowtide.blocks.python_state.reachable import named
from lowtide.blocks.python_state.snapshot import PythonState, Snapshot, why_not_repeatable
from lowtide.errors import InvalidModelError, UnsupportedBackwardError
from lowtide.pytorch.tensor_versions import versions_of


class RunObserver(Protocol):
    """Is told of a call and of its backward, and runs what it may want to measure."""

    def begin_call(self, call: CallState) -> None:
        """Note that the call begins."""

    def begin_backward(self, tangents: Sequence[Tensor | None]) -> None:
        """Note that backward begins with these gradients of the results."""

    def end_backward(self, gradients: Sequence[Tensor | None]) -> None:
        """Note that backward has ended with these gradients of what went in."""

    def recorded_run(self, run: Callable[[], tuple[State, BlockGraph]]) -> tuple[State, BlockGraph]:
        """Return `run()`, a run that makes what backward reads."""

    def deferred_run(self, run: Callable[[], tuple[State, BlockGraph]]) -> tuple[State, BlockGraph]:
        """Return `run()`, a run that leaves what backward reads to a later one."""

    def filling_run(self, run: Callable[[], None]) -> None:
        """Call `run()`, which makes what backward reads of a run before it."""

    def differentiation(self, run: Callable[[], Differentiated]) -> Differentiated:
        """Return `run()`, the backward of one position."""


@dataclass
class CallState:
    """What one call keeps between its forward and its backward.

    Attributes:
        positions: The positions.
        arguments: What the blocks take beside the state.
        autocast: How autocast was set.
        draws: Whether one of the positions draws random numbers of Python or numpy.
        verify: Whether contents of parameters and inputs are compared between forward and backward.
        states: States that are alive, by the position that reads them.
        graphs: Autograd graphs that are alive, by position.
        random: States of PyTorch's generators before the first run of positions that run again.
        streams: States of Python's and numpy's generators before the first run of positions that draw from them.
        remembered: What positions remembered before their first run.
        stashes: Buffers before the first run of positions that run again.
        versions: How often parameters and inputs had been changed, and where their contents are.
        others: The same for other arguments.
        sums: Checksums of parameters and inputs, if they are to be verified.
        constants: Buffers that positions do not change, at their first run.
        observer: Who is told of its runs, if anybody is.
    """

    positions: tuple[Position, ...]
    arguments: Arguments
    autocast: Autocast
    draws: bool = False
    verify: bool = False
    states: dict[int, State] = field(default_factory=dict)
    graphs: dict[int, BlockGraph] = field(default_factory=dict)
    random: dict[int, RandomStates] = field(default_factory=dict)
    stashes: dict[int, list[Tensor]] = field(default_factory=dict)
    versions: list[tuple[int, int]] = field(default_factory=list)
    others: list[tuple[int, int]] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)
    constants: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    streams: dict[int, StreamStates] = field(default_factory=dict)
    remembered: dict[int, tuple[PythonState, Snapshot]] = field(default_factory=dict)
    observer: RunObserver | None = None

    def run(self, step: Step) -> State:
        """Run one forward step and return all its results."""
        position = self.positions[step.position]
        state = self.states[step.position]
        if step.drop:
            del self.states[step.position]
        if step.again:
            return self._run_again(step, position, state)
        python_state = position.unit.python_state_for(self.arguments)
        before = python_state.snapshot()
        versions = versions_of(state)
        if not step.last:
            self.remembered[step.position] = python_state, before
        results = self._first_run(step, position, state)
        if versions_of(state) != versions:
            raise refused.state(position.unit.labels[-1])
        self._check(position, python_state, before, recorded=step.keep or step.defer)
        return results

    def _check(self, position: Position, python_state: PythonState, before: Snapshot, *, recorded: bool) -> None:
        """Raise if a first run that began with `before` could not be repeated."""
        after = python_state.snapshot()
        if after is before:
            return
        error = why_not_repeatable(position.unit.labels[-1], before, after, recorded=recorded, known=position.stores)
        if error is not None:
            raise error
        if after is not before and position.stores:
            # What is stored belongs to the block, which may drop it at any time.
            python_state.forget()

    def _first_run(self, step: Step, position: Position, state: State) -> State:
        """Run a step for the first time, and note what a repeated run will need."""
        if step.last:
            return self._plain_run(step, position, state)
        if self.draws:
            self.streams[step.position] = read_streams()
        if position.constant:
            self.constants[step.position] = position.versions()
        if position.changing:
            self.stashes[step.position] = position.stash()
        places = position.places
        if position.random:
            self.random[step.position] = read_random_states(places)
            return self._plain_run(step, position, state)
        # It drew no random numbers when it was profiled; if it does now, it can still be replayed.
        before = [state.numpy().tobytes() for state in read_random_states(places)]
        results = self._plain_run(step, position, state)
        if before != [state.numpy().tobytes() for state in read_random_states(places)]:
            self.random[step.position] = tuple(torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in before)
        return results

    def _plain_run(self, step: Step, position: Position, state: State) -> State:
        if step.fill:
            self._filling_run(step, position, state)
            return ()
        if step.keep:
            results, self.graphs[step.position] = self._recorded_run(step, position, state)
        elif step.defer:
            results, self.graphs[step.position] = self._deferred_run(position, state)
        else:
            results = position.run(state, self.arguments)
        return results

    def _recorded_run(self, step: Step, position: Position, state: State) -> tuple[State, BlockGraph]:
        def run() -> tuple[State, BlockGraph]:
            return position.run_recorded(state, self.arguments, supply_state=step.supply_state)

        return run() if self.observer is None else self.observer.recorded_run(run)

    def _deferred_run(self, position: Position, state: State) -> tuple[State, BlockGraph]:
        def run() -> tuple[State, BlockGraph]:
            return position.run_deferred(state, self.arguments)

        return run() if self.observer is None else self.observer.deferred_run(run)

    def _filling_run(self, step: Step, position: Position, state: State) -> None:
        def run() -> None:
            position.fill(self.graphs[step.position], state, self.arguments)

        if self.observer is None:
            run()
        else:
            self.observer.filling_run(run)

    def _run_again(self, step: Step, position: Position, state: State) -> State:
        """Repeat a step with the random numbers and buffers of its first run; it leaves everything as it was."""
        with self._as_then(step.position, position.unit.labels[-1]):
            results = self._replay(step, position, state)
        if step.last:
            for rows in (self.random, self.stashes, self.streams, self.remembered):
                rows.pop(step.position, None)
        return results

    @contextmanager
    def _as_then(self, place: int, label: str) -> Iterator[None]:
        """Give a position the Python state and the random numbers of Python and numpy that its first run had."""
        python_state, wanted = self.remembered[place]
        now = python_state.snapshot()
        if (path := wanted.overwritten()) is not None:
            raise refused.overwritten(label, named(path))
        streams = self.streams.get(place)
        present = read_streams() if streams is not None else ()
        try:
            if wanted is not now:
                python_state.restore(wanted)
            if streams is not None:
                restore_streams(streams)
            yield
        finally:
            python_state.restore(now)
            if self.positions[place].stores:
                python_state.forget()
            if streams is not None:
                restore_streams(present)

    def _replay(self, step: Step, position: Position, state: State) -> State:
        random = self.random.get(step.position)
        places = position.places
        present: RandomStates = ()
        if random is not None:
            present = read_random_states(places)
            restore_random_states(places, random)
        before = position.versions() if position.constant else []
        if before != self.constants.get(step.position, before):
            raise UnsupportedBackwardError(
                f"A buffer of {position.unit.labels[-1]} was changed between forward and backward, which would "
                "recompute with the new contents. Change it after backward."
            )
        try:
            with position.again(self.stashes.get(step.position, ())):
                results = self._plain_run(step, position, state)
        finally:
            if random is not None:
                restore_random_states(places, present)
        if before and position.versions() != before:
            raise InvalidModelError(
                f"{position.unit.labels[-1]} changed one of its buffers when it was run again, but not when it was "
                "profiled. Its results would depend on how often it runs; a block may change a buffer in every call "
                "or in none."
            )
        return results

    def clear(self) -> None:
        """Let go of everything: backward will not run.

        Python state may hold results of the call, whose graph holds the call: nobody else takes that apart.
        """
        for held in (self.states, self.graphs, self.random, self.stashes, self.streams, self.remembered):
            held.clear()

    def copy(self) -> CallState:
        """Return one with the same contents, to run backward on while this one stays as it is."""
        return CallState(
            self.positions,
            self.arguments,
            self.autocast,
            self.draws,
            self.verify,
            self.states.copy(),
            self.graphs.copy(),
            self.random.copy(),
            self.stashes.copy(),
            self.versions,
            self.others,
            self.sums,
            self.constants,
            self.streams.copy(),
            self.remembered.copy(),
            self.observer,
        )
