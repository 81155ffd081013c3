"""The door to PyTorch's profilers."""

# ruff: noqa: E402 - the check comes before what it checks
from __future__ import annotations

from lowtide.pytorch.required import check_pytorch

check_pytorch()

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
]
