"""PyTorch's profilers: recording what is allocated, and labels to find it by."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch._C._autograd import (
    _disable_profiler_legacy,
    _enable_profiler_legacy,
    _profiler_enabled,
)
from torch._C._profiler import (
    ProfilerConfig,
    ProfilerState,
    _ExperimentalConfig,
    _ExtraFields_Allocation,
    _ProfilerEvent,
    _RecordFunctionFast,
)

__all__ = [
    "ProfilerConfig",
    "ProfilerState",
    "_ExperimentalConfig",
    "_ExtraFields_Allocation",
    "_ProfilerEvent",
    "_disable_profiler_legacy",
    "_enable_profiler_legacy",
    "_profiler_enabled",
    "recorded_as",
]


def recorded_as(label: str) -> AbstractContextManager[None]:
    """Record what is done inside under `label`, where something records; costs about a microsecond."""
    return _RecordFunctionFast(label)
