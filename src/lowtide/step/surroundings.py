"""What runs around the blocks of a step and is known beforehand: the hooks of an engine that shards parameters."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from lowtide.plan.core.account import MemoryAccount
from lowtide.step.problem import Gap


@dataclass(frozen=True, slots=True)
class ModuleRun:
    """One run of a block, as what surrounds it sees it.

    Attributes:
        path: The module that it is, or the one that has its parameters; None if it has none.
        is_call: Whether it is a call of that module, whose hooks run around it.
        continues: Whether it goes on with the call of the run before it, whose code was captured in several graphs.
        trains_inputs: Whether gradients go on to what the module takes.
        gradient_bytes: The gradients of parameters that its backward makes.
        leaf_bytes: The gradients of parameters that the backward of the code before it makes.
    """

    path: str | None
    is_call: bool = False
    continues: bool = False
    trains_inputs: bool = True
    gradient_bytes: int = 0
    leaf_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Gaps:
    """The gaps of a sequence in the order of the step; see `StepProblem`."""

    forward: tuple[Gap, ...]
    backward: tuple[Gap, ...]


@dataclass(frozen=True, slots=True)
class Around:
    """What stands around the code between two blocks.

    Attributes:
        parts: What happens, in order.
        first: Before which part the code runs at the earliest.
        last: Before which one at the latest; the number of parts if it may be behind all of them.
    """

    parts: tuple[Gap, ...]
    first: int
    last: int


class Surroundings(Protocol):
    """What stands around the blocks of one model."""

    def begin_call(self) -> Hashable:
        """Return the state in which a call begins."""

    def around(
        self, state: Hashable, runs: Sequence[ModuleRun], leaf_bytes: int
    ) -> tuple[Sequence[Around], Sequence[Around]]:
        """Return what stands between these runs in a call that begins in `state`, in forward and in backward.

        Args:
            state: What `begin_call` returned.
            runs: The runs.
            leaf_bytes: The gradients of parameters that the backward of the code behind them makes.
        """

    def account(self, step_bytes: int, sharding_bytes: int) -> MemoryAccount:
        """Return the account of a rank for a step of this peak, of which so much stands around the blocks."""


def with_surroundings(own: Gaps, forward: Sequence[Around], backward: Sequence[Around]) -> Gaps:
    """Return gaps of code together with what stands around it."""
    return Gaps(tuple(map(_together, own.forward, forward)), tuple(map(_together, own.backward, backward)))


def _together(own: Gap, around: Around) -> Gap:
    """Return the gap of both: the code runs where that takes most."""
    after = own.after + sum(part.after for part in around.parts)
    return Gap(max(_peak(own, around.parts, place) for place in range(around.first, around.last + 1)), after)


def _peak(own: Gap, parts: Sequence[Gap], place: int) -> int:
    level = peak = 0
    for gap in (*parts[:place], own, *parts[place:]):
        peak = max(peak, level + gap.peak)
        level += gap.after
    return max(peak, level)


class CallUnderWay(Protocol):
    """A call as far as it has come.

    Attributes:
        blocks: Its blocks.
        runs: Their runs.
        state: The state in which it began.
    """

    blocks: list[int]
    runs: list[ModuleRun]
    state: Hashable


Sequences = tuple[int, ...]
_UNKNOWN = ModuleRun(None)


class _Thread(threading.local):
    """The call of a module that a thread is in."""

    layer: ModuleRun | None = None


class AroundBlocks:
    """What stands around the blocks of one model's calls, and which modules the runs of known calls were.

    Attributes:
        surroundings: What it is; None if there is nothing but the model's own code.
    """

    def __init__(self) -> None:
        self.surroundings: Surroundings | None = None
        self._runs: dict[Sequences, tuple[tuple[ModuleRun, ...], int]] = {}
        self._last: dict[int, ModuleRun] = {}
        self._state: Hashable = None
        self._thread = _Thread()

    def left_to_watch(self, gradients: Sequence[Any]) -> Sequence[Any]:
        """Return the gradients of parameters that are not taken over as soon as a block has made them."""
        return gradients if self.surroundings is None else ()

    def begin_call(self) -> Hashable:
        """Return the state in which a call begins."""
        self._state = None if self.surroundings is None else self.surroundings.begin_call()
        return self._state

    @property
    def layer(self) -> ModuleRun | None:
        """The call of a module that this thread is in."""
        return self._thread.layer

    @contextmanager
    def in_layer(self, path: str, *, trains_inputs: bool) -> Iterator[None]:
        """Note that the blocks that run inside are parts of a call of the module at `path`."""
        before, self._thread.layer = self._thread.layer, ModuleRun(path, is_call=True, trains_inputs=trains_inputs)
        try:
            yield
        finally:
            self._thread.layer = before

    def next_run(self, owner: str | None) -> ModuleRun:
        """Return the run that comes next: a part of the call that is under way, or else of the module `owner`."""
        run = self._thread.layer
        if run is None:
            return ModuleRun(owner)
        self._thread.layer = replace(run, continues=True)
        return run

    def note(self, sequence: Sequences, runs: Sequence[ModuleRun], leaf_bytes: int) -> None:
        """Note what the runs of a call were, and the gradients of the code behind them."""
        self._runs[sequence] = tuple(runs), leaf_bytes
        self._last |= dict(zip(sequence, runs, strict=True))

    def key(self, sequence: Sequences, call: CallUnderWay | None) -> Hashable:
        """Return what the gaps of a sequence depend on."""
        return None if self.surroundings is None else (self._state_of(call), *self._runs_of(sequence, call))

    def add_to(self, own: Gaps, sequence: Sequences, call: CallUnderWay | None) -> Gaps:
        """Return the gaps of a sequence together with what stands around its blocks."""
        if self.surroundings is None:
            return own
        return with_surroundings(own, *self.surroundings.around(self._state_of(call), *self._runs_of(sequence, call)))

    def account(self, sequence: Sequences, step_bytes: int) -> MemoryAccount | None:
        """Return the account of a step of this peak; None if nothing stands around its blocks."""
        if self.surroundings is None:
            return None
        forward, backward = self.surroundings.around(self._state, *self._runs_of(sequence, None))
        parts = [part for each in (*forward, *backward) for part in each.parts]
        return self.surroundings.account(step_bytes, _peak(Gap(0, 0), parts, len(parts)))

    def _state_of(self, call: CallUnderWay | None) -> Hashable:
        return self._state if call is None else call.state

    def _runs_of(self, sequence: Sequences, call: CallUnderWay | None) -> tuple[tuple[ModuleRun, ...], int]:
        """Return the runs of a sequence that `call` may have begun, as far as they are known."""
        known, leaf_bytes = self._runs.get(sequence, ((), 0))
        own = [] if call is None or tuple(call.blocks) != sequence[: len(call.blocks)] else call.runs
        rest = known[len(own) :] or [self._last.get(block, _UNKNOWN) for block in sequence[len(own) :]]
        return (*own, *rest)[: len(sequence)], leaf_bytes
