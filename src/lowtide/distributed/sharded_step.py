"""What FSDP2 holds along a step: gathered and unsharded parameters, gradients on their way, sharded gradients.

FSDP works in hooks around its modules. The order of what they take and let go is that of PyTorch's own code, followed
here on numbers of bytes:

- forward of a module: gather (the buffer of the module before it is still there), unshard, run, reshard. The buffer is
  kept until the next module unshards, so that copying out of it overlaps with the next gathering;
- backward of a module: unshard, gather ahead for the module that ran before it, run, reshard, let go of the gradients
  that were being reduced for the module behind it, copy the own ones into a new buffer and reduce them;
- the end of backward: what has not run, the root above all, and then all buffers that are left.

All of this lies between the blocks of a step. Linear in the number of runs and modules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lowtide.pytorch.fully_sharded import GroupNow, ModelNow, ShardedGroup
from lowtide.step.problem import Gap
from lowtide.step.surroundings import Around, ModuleRun

Event = tuple[Literal["enter", "exit"], int]


@dataclass
class _Meter:
    """The level within one gap, relative to its beginning."""

    level: int = 0
    peak: int = 0

    def take(self, size: int) -> None:
        self.level += size
        self.peak = max(self.peak, self.level)

    def free(self, size: int) -> None:
        self.level -= size

    def end(self) -> Gap:
        """Return the gap that ends, and begin another one."""
        gap = Gap(max(self.peak, self.level), self.level)
        self.level = self.peak = 0
        return gap


@dataclass
class _Live:
    """What there is of one group.

    Attributes:
        figures: Its bytes.
        now: How it stood when the call began.
        places: Where it stands in the order in which modules ended their forward.
        is_unsharded: Whether its parameters are there.
        is_gathered: Whether they were gathered ahead.
        is_kept: Whether they are sharded among fewer ranks.
        is_reduced: Whether its gradients were reduced since it last began its backward.
        own: Unsharded gradients of this call.
        has_waiting: Whether there are others that they are added to.
        has_gradients: Whether there are sharded ones that reduced ones are added to.
        has_partial: Whether there are gradients that were reduced among shards alone.
        copied: What is held because it may still be on its way to copies of the model.
    """

    figures: ShardedGroup
    now: GroupNow
    is_unsharded: bool
    has_waiting: bool
    has_gradients: bool
    has_partial: bool
    places: list[int] = field(default_factory=list)
    is_gathered: bool = False
    is_kept: bool = False
    is_reduced: bool = False
    own: int = 0
    copied: int = 0


class ShardedStep:
    """One step of a sharded model.

    Args:
        paths: The number of the state of every sharded module, by path, the root first.
        groups: The groups of the states.
        now: How the model stands when the step begins.
    """

    def __init__(self, paths: dict[str, int], groups: Sequence[ShardedGroup | None], now: ModelNow) -> None:
        self._paths, self._now = paths, now
        self._live = [
            None if figures is None or state.group is None else _live(figures, state.group)
            for figures, state in zip(groups, now.states, strict=True)
        ]
        self._meter = _Meter()
        # The last buffer that was gathered into in forward, and those of gradients that are being reduced.
        self._kept_buffer = 0
        self._inputs: list[int] = []
        self._order: list[int] = []
        self._trained: dict[int, bool] = {}

    def around(self, runs: Sequence[ModuleRun], leaf_bytes: int) -> tuple[Sequence[Around], Sequence[Around]]:
        """Return what is taken and let go between `runs`; see `Surroundings`."""
        events = list(_events(self._paths, runs))
        places = [_places(runs, number, len(events[number])) for number in range(len(events))]
        forward = [self._forward(each, is_last=number == len(runs)) for number, each in enumerate(events)]
        leaves = [*(run.leaf_bytes for run in runs), leaf_bytes]
        owners = _owners(self._paths, runs)
        backward: list[Around] = []
        for number in reversed(range(len(events))):
            if number < len(runs):
                self._note_gradients(owners[number], runs[number].gradient_bytes)
            self._note_gradients(0, leaves[number])
            run = runs[number] if number < len(runs) else None
            parts = self._backward(events[number], self._ends_with_step(run, is_first=number == 0))
            if number == 0:
                self._end()
                parts.append(self._meter.end())
            first, last = places[number]
            backward.append(Around(tuple(parts), len(events[number]) - last, len(events[number]) - first))
        return [Around(tuple(parts), *place) for parts, place in zip(forward, places, strict=True)], backward

    def _forward(self, events: Sequence[Event], *, is_last: bool) -> list[Gap]:
        parts: list[Gap] = []
        for number, (kind, state) in enumerate(events, start=1):
            if kind == "enter":
                self._enter(state)
            else:
                self._exit(state)
            if is_last and number == len(events):
                self._meter.free(self._kept_buffer)
                self._kept_buffer = 0
            parts.append(self._meter.end())
        return parts

    def _enter(self, state: int) -> None:
        self._gather(state)
        self._unshard(state, forward=True)
        for other in self._now.states[state].ahead_forward:
            self._gather(other)

    def _exit(self, state: int) -> None:
        group = self._live[state]
        if group is None:
            return
        if group.now.reshards_forward:
            self._meter.take(group.figures.kept_shard)
            group.is_kept = bool(group.figures.kept_shard)
            self._reshard(group)
        group.places.append(len(self._order))
        self._order.append(state)

    def _gather(self, state: int) -> None:
        group = self._live[state]
        if group is None or group.is_gathered or group.is_unsharded:
            return
        self._meter.take(group.figures.cast)
        self._meter.take(group.figures.gathered)
        self._meter.free(group.figures.cast)
        group.is_gathered = True

    def _unshard(self, state: int, *, forward: bool) -> None:
        group = self._live[state]
        if group is None or not group.is_gathered:
            return
        figures = group.figures
        if forward:
            self._meter.free(self._kept_buffer)
            self._kept_buffer = 0
        self._meter.take(figures.unsharded + figures.swapped)
        self._meter.free(figures.swapped)
        if group.is_kept:
            self._meter.free(figures.kept_shard)
            group.is_kept = False
        if forward and not figures.is_asynchronous:
            self._kept_buffer = figures.gathered
        else:
            self._meter.free(figures.gathered)
        group.is_gathered, group.is_unsharded = False, True

    def _reshard(self, group: _Live) -> None:
        if group.is_unsharded:
            self._meter.free(group.figures.unsharded)
            group.is_unsharded = False

    def _note_gradients(self, state: int, size: int) -> None:
        """Take note of unsharded gradients that a block or the code between blocks has made, and counts."""
        group = self._live[state]
        if group is None or not size:
            return
        if group.has_waiting:
            # They are added to those that are there.
            self._meter.free(size)
        else:
            group.own += size

    def _ends_with_step(self, run: ModuleRun | None, *, is_first: bool) -> Callable[[int], bool]:
        """Return which of the modules that begin before `run` end their backward with the step.

        They are those whose inputs need no gradients. Of modules around the first run it is not known; to end late
        takes more.
        """
        own = self._paths.get(run.path) if run is not None and run.is_call and run.path is not None else None
        trains = run is not None and run.trains_inputs
        return lambda state: not trains if state == own else is_first

    def _backward(self, events: Sequence[Event], ends_with_step: Callable[[int], bool]) -> list[Gap]:
        parts: list[Gap] = []
        for kind, state in reversed(events):
            if kind == "exit":
                self._before_backward(state)
            elif not ends_with_step(state):
                self._after_backward(state)
            parts.append(self._meter.end())
        return parts

    def _before_backward(self, state: int) -> None:
        group = self._live[state]
        ahead = self._now.states[state].ahead_backward
        if group is not None:
            group.is_reduced = False
            if group.now.gathers_backward:
                self._gather(state)
            self._unshard(state, forward=False)
            place = group.places.pop() if group.places and not ahead else 0
            if place:
                self._gather(self._order[place - 1])
        for other in ahead:
            self._gather(other)

    def _after_backward(self, state: int) -> None:
        group = self._live[state]
        if group is None:
            return
        group.is_reduced = True
        if group.now.reshards_backward:
            self._reshard(group)
        if not group.now.reduces:
            self._accumulate(group)
            return
        while len(self._inputs) >= self._now.most_inputs:
            self._meter.free(self._inputs.pop(0))
        if group.own or group.has_waiting:
            self._reduce(group)

    def _accumulate(self, group: _Live) -> None:
        """Let unsharded gradients wait, in the type of the reduction."""
        if group.own and group.figures.accumulated:
            self._meter.take(group.figures.accumulated)
            self._meter.free(group.own)
        group.has_waiting = group.has_waiting or bool(group.own)
        group.own = 0

    def _reduce(self, group: _Live) -> None:
        figures = group.figures
        self._meter.free(group.copied)
        group.copied = 0
        self._meter.take(figures.swapped)
        self._meter.free(figures.swapped)
        self._meter.take(figures.scattered)
        self._inputs.append(figures.scattered)
        self._meter.free(group.own)
        group.own, group.has_waiting = 0, False
        self._meter.take(figures.reduced)
        if figures.is_replicated and not group.now.replicates:
            if group.has_partial:
                self._meter.free(figures.reduced)
            group.has_partial = True
            return
        group.has_partial = False
        kept = figures.reduced
        if figures.gradients:
            self._meter.take(figures.gradients)
            if figures.is_replicated:
                group.copied = figures.reduced
            else:
                self._meter.free(figures.reduced)
            kept = figures.gradients
        if group.has_gradients:
            self._meter.free(kept)
        group.has_gradients = True

    def _end(self) -> None:
        """End backward: reduce what was not, and let go of all buffers."""
        for state, group in enumerate(self._live):
            if group is not None and not group.is_reduced:
                self._after_backward(state)
        if not self._now.is_last_backward:
            return
        for group in filter(None, self._live):
            self._meter.free(group.copied)
            if group.is_gathered:
                self._meter.free(group.figures.gathered)
            group.copied, group.is_gathered = 0, False
        for size in self._inputs:
            self._meter.free(size)
        self._inputs.clear()


def _live(figures: ShardedGroup, now: GroupNow) -> _Live:
    return _Live(figures, now, now.is_unsharded, now.has_waiting, now.has_gradients, now.has_partial)


def _places(runs: Sequence[ModuleRun], number: int, count: int) -> tuple[int, int]:
    """Return before which of the `count` events of a gap of forward the code in it runs, at the earliest and latest.

    Hooks of a module that is a block are next to it, and those of the root are around everything.
    """
    before = number == 0 or (runs[number - 1].is_call and not (number < len(runs) and runs[number].continues))
    behind = number == len(runs) or (runs[number].is_call and not runs[number].continues)
    first = min(1, count) if before else 0
    return first, max(first, count - 1 if behind else count)


def _chain(paths: dict[str, int], path: str | None) -> list[str]:
    """Return the sharded modules that are being called when code of the module at `path` runs, outermost first."""
    root = next(iter(paths))
    if path is None:
        return [root]
    found = [each for each in paths if each == root or path == each or path.startswith(f"{each}.")]
    return sorted(found, key=len)


def _owners(paths: dict[str, int], runs: Sequence[ModuleRun]) -> list[int]:
    """Return for every run the state that has its parameters."""
    return [paths[_chain(paths, run.path)[-1]] for run in runs]


def _events(paths: dict[str, int], runs: Sequence[ModuleRun]) -> list[list[Event]]:
    """Return for every gap of forward which states begin and end in it."""
    open_modules: list[str] = []
    # Of a state of several modules, those that have not ended.
    left: dict[int, set[str]] = {}
    gaps: list[list[Event]] = []

    def close(module: str, gap: list[Event]) -> None:
        state = paths[module]
        left[state].discard(module)
        if not left[state]:
            gap.append(("exit", state))

    def begin(module: str, gap: list[Event]) -> None:
        state = paths[module]
        if not left.get(state):
            left[state] = {each for each, number in paths.items() if number == state}
            gap.append(("enter", state))
        open_modules.append(module)

    last: ModuleRun | None = None
    for run in runs:
        gap: list[Event] = []
        chain = _chain(paths, run.path)
        if not run.continues:
            if last is not None and last.is_call and open_modules and open_modules[-1] == last.path:
                close(open_modules.pop(), gap)
            while open_modules and open_modules != chain[: len(open_modules)]:
                close(open_modules.pop(), gap)
            for module in chain[len(open_modules) :]:
                begin(module, gap)
        gaps.append(gap)
        last = run
    end: list[Event] = []
    while open_modules:
        close(open_modules.pop(), end)
    return [*gaps, end]
