"""The clock by which ops and blocks are timed: a few runs each, of which the shortest counts.

Whatever else the machine does only adds time, so the shortest run is nearest to the truth.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lowtide import device as devices

Clock = Callable[[torch.device], float]


@dataclass(frozen=True, slots=True)
class Repeats:
    """How often something is timed.

    Attributes:
        fewest: Runs at least.
        most: Runs at most.
        seconds: Between the two, runs go on until they have taken so long.
    """

    fewest: int
    most: int
    seconds: float

    def wants_more(self, runs: int, seconds: float) -> bool:
        """Return True if another run should follow `runs` that took `seconds` together."""
        return runs < self.fewest or (runs < self.most and seconds < self.seconds)


@dataclass(frozen=True, slots=True)
class OpTiming:
    """How the ops of a program are timed.

    Attributes:
        repeats: For one op. Tiny ops reach 50 in no time; an op that takes longer than the seconds runs once in a
            sweep, for training waits.
        program_seconds: All ops of a program together take about so long at most; with many ops each gets less.
        sweeps: Ops are timed so often, one after the other. What disturbs the machine for a second spoils all times
            of an op, rarely twice. After the first sweep those come first that take most of the step.
        again_seconds: The sweeps after the first one together take about so long at most. Set on bench-start.
        long_seconds: An op that takes longer runs once in the first sweep: recording its bytes does not show beside it.
        share: Ops that take less of a step than this are timed in the first sweep only.
        agreement: Two times agree if the longer one is at most so many times the shorter.
        patience: An op whose two shortest times do not agree is timed up to so many times as long; on a busy machine
            they may not agree soon.
    """

    repeats: Repeats = Repeats(fewest=1, most=50, seconds=0.01)
    program_seconds: float = 2.0
    sweeps: int = 2
    again_seconds: float = 2.0
    long_seconds: float = 0.01
    share: float = 1e-4
    agreement: float = 1.3
    patience: int = 5

    def agree(self, times: list[float]) -> bool:
        """Return True if the two shortest of at least three times are about the same."""
        shortest, second = sorted(times)[:2] if len(times) > 2 else (0.0, 1.0)
        return second <= self.agreement * shortest


OPS = OpTiming()
# A block is timed longer than an op: there are few distinct ones, and each is hundreds of ops.
BLOCKS = Repeats(fewest=3, most=12, seconds=0.06)


def wall_time(device: torch.device) -> float:
    """Return the time when all work queued on `device` is done. Ops may use several threads, so all of them count."""
    devices.synchronize(device)
    return time.perf_counter()


def thread_time(device: torch.device) -> float:
    """Return the time of this thread on the CPU, which does not count what others do meanwhile; else the wall time."""
    devices.synchronize(device)
    return time.thread_time() if device.type == "cpu" else time.perf_counter()


def seconds_of(run: Callable[[], object], device: torch.device, clock: Clock = wall_time) -> float:
    """Return the time of `run()` by `clock`."""
    start = clock(device)
    run()
    return clock(device) - start


def shortest(measure: Callable[[], float], repeats: Repeats) -> float:
    """Return the least of what `measure()` returns in as many runs as `repeats` says."""
    start, found = time.perf_counter(), [measure()]
    while repeats.wants_more(len(found), time.perf_counter() - start):
        found.append(measure())
    return min(found)
