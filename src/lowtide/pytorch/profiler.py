"""PyTorch's profilers: recording what is allocated, and labels to find it by."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy, _profiler_enabled
from torch._C._profiler import (
    ProfilerConfig,
    ProfilerState,
    _ExperimentalConfig,
    _ExtraFields_Allocation,
    _ProfilerEvent,
    _RecordFunctionFast,
)
from torch.autograd.profiler import profile

# The first thing that a recording shows.
_BEGIN = "lowtide: begin of a recording"


def is_profiled() -> bool:
    """Return True if a profiler records the caller's thread, which nothing public tells."""
    return _profiler_enabled()


def start_recording() -> None:
    """Record allocations, and the begin and end of ops, in this thread.

    The older profiler is used: it is one per thread, where Kineto is one per process, starts a hundred times quicker,
    and its events are in order without a clock.
    """
    _enable_profiler_legacy(
        ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())  # profile_memory
    )
    with recorded_as(_BEGIN):
        pass


def stop_recording() -> list[Any]:
    """Return the events of this thread since `start_recording`, in order.

    Threads that work for it, as those of a communication library do, leave events as well, in lists of their own. What
    they allocate is seen more often than what they free, which may happen when they work for nobody.
    """
    for events in _disable_profiler_legacy():
        first = next((place for place, event in enumerate(events) if event.name() == _BEGIN), None)
        if first is not None:
            # The end of the mark follows.
            return list(events[first + 2 :])
    return []


def recorded_allocations(session: profile, device_type: str) -> Iterator[tuple[int, int, int]] | None:
    """Return (nanoseconds, address, bytes) of every allocation in a session that has ended; None if it has no results.

    The public tables of events leave out addresses, without which a free cannot be matched to its allocation.
    """
    if session.kineto_results is None:
        return None
    events = _all_events(session.kineto_results.experimental_event_tree())
    return (found for event in events if (found := _allocation(event, device_type)) is not None)


def _all_events(roots: list[_ProfilerEvent]) -> Iterator[_ProfilerEvent]:
    stack = list(reversed(roots))
    while stack:
        event = stack.pop()
        yield event
        stack.extend(reversed(event.children))


def _allocation(event: _ProfilerEvent, device_type: str) -> tuple[int, int, int] | None:
    fields = event.extra_fields
    if not isinstance(fields, _ExtraFields_Allocation) or fields.device.type != device_type:
        return None
    return event.start_time_ns, fields.ptr, fields.alloc_size


def recorded_as(label: str) -> AbstractContextManager[None]:
    """Record what is done inside under `label`, where something records; costs about a microsecond."""
    return _RecordFunctionFast(label)
