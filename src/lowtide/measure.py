"""Peak memory and its course over time, as the allocator sees them.

On the CPU the figures come from the profiler's allocator events, which include temporaries inside ops. What they
cannot show: memory that a library gets around PyTorch's allocator, allocations of Python threads other than the
caller's (backward on the CPU runs in the caller's thread and is seen), and the size of blocks that were allocated
before the recording began. A block from before that is freed meanwhile therefore does not lower the level.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch.autograd.profiler import profile, record_function

from lowtide.device import Device, as_device, synchronize
from lowtide.environment import hide_profiler_messages
from lowtide.errors import MeasureError
from lowtide.pytorch.profiler import is_profiled, recorded_allocations, start_recording, stop_recording

Result = TypeVar("Result")
Levels = list[tuple[int, int]]
_PHASE = "lowtide: next phase"


@dataclass(frozen=True, slots=True)
class Allocation:
    """One call of the allocator: when, where, and how many bytes (below zero: freed)."""

    nanoseconds: int
    pointer: int
    bytes: int


def measure_peak(fn: Callable[[], object], device: Device | None = None) -> int:
    """Return the highest number of bytes above the level at entry while `fn()` runs.

    Args:
        fn: What to measure, for instance a whole training step. Its exceptions are passed on.
        device: Whose memory; by default the current CUDA device if CUDA has been used, else the CPU.

    Example:
        ```python
        measure_peak(lambda: torch.empty(1000))
        #> 4000
        ```
    """
    device = as_device(device)
    if device.type == "cpu":
        return max((level for _, level in levels(record(fn, device))), default=0)
    return _run_on_cuda(fn, device)[1]


def memory_timeline(fn: Callable[[], object], device: Device | None = None) -> list[tuple[float, int]]:
    """Return (seconds since the first allocation, bytes above the level at entry) at every change during `fn()`."""
    course = levels(record(fn, as_device(device)))
    return [((nanoseconds - course[0][0]) / 1e9, level) for nanoseconds, level in course]


def run_with_peak(fn: Callable[[], Result], device: torch.device) -> tuple[Result, int]:
    """Return the result of `fn()` and the highest bytes above the level at entry while it ran.

    For single ops: a hundred times quicker than `measure_peak`, but `fn` must free nothing that was there at entry.
    It works in a thread of its own while the caller's thread is being profiled.
    """
    if device.type == "cuda":
        return _run_on_cuda(fn, device)
    with _recorder() as events:
        result = fn()
    changes = (event.cpu_memory_usage() for event in events if event.kind() == "memory_alloc")
    return result, max(accumulate(changes), default=0)


@dataclass(frozen=True, slots=True)
class Recording:
    """What was allocated while something ran.

    Attributes:
        peak_bytes: The highest bytes above the level at entry.
        inside_bytes: For every label, the highest bytes allocated in a part of that name and freed before its end.
        left_bytes: The bytes at the end above the level at entry.
    """

    peak_bytes: int
    inside_bytes: dict[str, int]
    left_bytes: int = 0


def can_record(device: torch.device) -> bool:
    """Return True if `record_parts` can be used now: on the CPU, and while nobody else profiles."""
    return device.type == "cpu" and not is_profiled()


def record_parts(fn: Callable[[], Result], labels: Collection[str]) -> tuple[Result, Recording]:
    """Return the result of `fn()` and what it allocated, on the CPU; parts are named by `record_function`.

    Blocks from before that `fn` frees lower the level only if a recording was running when they were allocated.
    """
    with _recorder() as events:
        result = fn()
    peak = level = 0
    inside = dict.fromkeys(labels, 0)
    open_parts: list[tuple[str, int]] = []
    for event in events:
        if event.kind() == "push":
            open_parts.append((event.name(), level))
        elif event.kind() == "pop" and open_parts:
            name, highest = open_parts.pop()
            if name in inside:
                inside[name] = max(inside[name], highest - level)
            if open_parts:
                open_parts[-1] = (open_parts[-1][0], max(open_parts[-1][1], highest))
        elif event.kind() == "memory_alloc":
            level += event.cpu_memory_usage()
            peak = max(peak, level)
            if open_parts:
                open_parts[-1] = (open_parts[-1][0], max(open_parts[-1][1], level))
    return result, Recording(peak, inside, level)


@contextmanager
def _recorder() -> Iterator[list[Any]]:
    """Fill a list with the allocator's events, and the begin and end of ops, in this thread."""
    events: list[Any] = []
    start_recording()
    try:
        with _uncollected():
            yield events
    finally:
        events += stop_recording()


def run_phases(phases: Sequence[Callable[[], object]], device: torch.device) -> list[tuple[int, int]]:
    """Return, for each of `phases`, run one after the other, the highest bytes and the bytes at its end.

    Both are above the level before the first phase. As with `run_with_peak`, nothing that was there then may be freed.
    """
    if device.type == "cuda":
        return _phases_on_cuda(phases, device)
    with _recorder() as events:
        for phase in phases:
            with record_function(_PHASE):
                pass
            phase()
    found: list[tuple[int, int]] = []
    peak = level = 0
    for event in events:
        if event.kind() == "push" and event.name() == _PHASE:
            found.append((peak, level))
            peak = level
        elif event.kind() == "memory_alloc":
            level += event.cpu_memory_usage()
            peak = max(peak, level)
    return [*found[1:], (peak, level)]


@contextmanager
def _uncollected() -> Iterator[None]:
    """Keep Python from collecting garbage: tensors in it from before would seem to be freed by what is measured."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _phases_on_cuda(phases: Sequence[Callable[[], object]], device: torch.device) -> list[tuple[int, int]]:
    synchronize(device)
    before = torch.cuda.memory_allocated(device)
    found = []
    for phase in phases:
        torch.cuda.reset_peak_memory_stats(device)
        phase()
        synchronize(device)
        highest = torch.cuda.max_memory_allocated(device)
        found.append((highest - before, torch.cuda.memory_allocated(device) - before))
    return found


def _run_on_cuda(fn: Callable[[], Result], device: torch.device) -> tuple[Result, int]:
    synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = fn()
    synchronize(device)
    return result, torch.cuda.max_memory_allocated(device) - before


def record(fn: Callable[[], object], device: torch.device) -> tuple[Allocation, ...]:
    """Return the allocator calls on `device` while `fn()` runs in this thread, by time."""
    if is_profiled():
        raise MeasureError("Memory cannot be measured while a profiler is active: leave its `with` block first.")
    hide_profiler_messages()
    session = profile(use_device=device.type if device.type == "cuda" else None, profile_memory=True, use_kineto=True)
    with session:
        fn()
        synchronize(device)
    found = recorded_allocations(session, device.type)
    if found is None:
        raise MeasureError("The profiler returned nothing: was it stopped while memory was being measured?")
    return tuple(sorted((Allocation(*one) for one in found), key=lambda one: one.nanoseconds))


def levels(allocations: tuple[Allocation, ...]) -> Levels:
    """Return (nanoseconds, bytes alive) after each of `allocations`, counting only blocks that they allocate.

    A free is matched to its allocation by address, because for blocks older than the recording the profiler may report
    the size that an earlier block had at the same address.
    """
    alive: dict[int, int] = {}
    course: Levels = []
    level = 0
    for event in allocations:
        # An address handed out again was freed where the profiler does not look, by another thread.
        level -= alive.pop(event.pointer, 0)
        if event.bytes > 0:
            alive[event.pointer] = event.bytes
            level += event.bytes
        course.append((event.nanoseconds, level))
    return course
