"""A step recorded from its first allocation to its last, with the borders of its blocks marked.

It shows what the code between the blocks takes, to the byte, and whether the blocks need more than was predicted. It
uses the quick profiler of one thread, so it works on the CPU only, and not while the user profiles.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from lowtide.measure import can_record
from lowtide.pytorch.profiler import recorded_as, start_recording, stop_recording

_CPU = torch.device("cpu")
_BORDER = "lowtide: border of a block"
_PAUSE = "lowtide: pause"
_RESUME = "lowtide: resume"
# Parts in which FSDP gathers parameters and lets go of them: that is known beforehand, and buffers that a thread of the
# communication library frees are not seen to be freed.
_SHARDING = ("FSDP::pre_forward", "FSDP::post_forward", "FSDP::forward_prefetch")


@dataclass(frozen=True, slots=True)
class Stretch:
    """What happened between two borders, relative to the beginning of the recording: highest level, and the last."""

    peak: int
    end: int


@dataclass
class Recorder:
    """Records one pass of a step, forward or backward, in the thread that starts it."""

    thread: int = 0
    borders: int = 0
    stretches: list[Stretch] = field(default_factory=list)

    @property
    def is_running(self) -> bool:
        """True between `start` and `stop`, in the thread that called `start`."""
        return self.thread == threading.get_ident()

    def start(self) -> None:
        """Begin, if nobody else profiles."""
        if can_record(_CPU):
            self.thread = threading.get_ident()
            self.borders = 0
            start_recording()

    def border(self) -> None:
        """Mark the beginning or the end of a block."""
        if self.is_running:
            self.borders += 1
            _mark(_BORDER)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what is allocated inside, such as by compiling a block."""
        if self.is_running:
            _mark(_PAUSE)
        try:
            yield
        finally:
            if self.is_running:
                _mark(_RESUME)

    def stop(self) -> None:
        """End, and read what was recorded."""
        if not self.is_running:
            return
        self.thread = 0
        self.stretches = _stretches(stop_recording())

    def discard(self) -> None:
        """End without a result."""
        if self.is_running:
            self.thread = 0
            stop_recording()
        self.stretches = []


def _mark(name: str) -> None:
    with recorded_as(name):
        pass


def _stretches(events: Sequence[Any]) -> list[Stretch]:
    """Return one stretch more than there are borders."""
    found: list[Stretch] = []
    level = peak = 0
    paused = 0
    # The part of sharding that is open. Other threads mix in ends without beginnings, so that parts are not counted.
    sharding: int | None = None
    for event in events:
        kind = event.kind()
        if sharding is not None:
            if kind == "pop" and event.handle() == sharding:
                sharding = None
        elif kind == "push" and event.name().startswith(_SHARDING):
            sharding = event.handle()
        elif kind == "memory_alloc":
            if not paused:
                level += event.cpu_memory_usage()
                peak = max(peak, level)
        elif kind == "push":
            name = event.name()
            if name == _BORDER:
                found.append(Stretch(peak, level))
                peak = level
            elif name == _PAUSE:
                paused += 1
            elif name == _RESUME:
                paused -= 1
    return [*found, Stretch(peak, level)]
