"""Timing of blocks: a few runs, of which the least counts."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from lowtide import device as devices

MANY_RUNS, FEW_RUNS, ENOUGH_SECONDS = 12, 3, 0.06


def now(device: torch.device) -> float:
    """Return the time; on the CPU that of this thread, which does not count what others do meanwhile."""
    devices.synchronize(device)
    return time.thread_time() if device.type == "cpu" else time.perf_counter()


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Return the time of `run()`."""
    start = now(device)
    run()
    return now(device) - start


def least(measure: Callable[[], float]) -> float:
    """Return the least of a few results of `measure()`."""
    start, found = time.perf_counter(), [measure()]
    while len(found) < FEW_RUNS or (len(found) < MANY_RUNS and time.perf_counter() - start < ENOUGH_SECONDS):
        found.append(measure())
    return min(found)
