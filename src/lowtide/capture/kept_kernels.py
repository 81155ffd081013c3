"""Tracing that keeps the ops eager runs.

Some ops are taken apart while PyTorch traces, into arithmetic that rounds differently, takes more memory and is slower
than the kernel that eager uses. During capture they are left whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

aten = torch.ops.aten

_WHOLE = (
    aten.upsample_linear1d,
    aten.upsample_bilinear2d,
    aten.upsample_trilinear3d,
    aten.upsample_bicubic2d,
    aten.upsample_nearest1d,
    aten.upsample_nearest2d,
    aten.upsample_nearest3d,
    aten._upsample_nearest_exact1d,
    aten._upsample_nearest_exact2d,
    aten._upsample_nearest_exact3d,
    aten.multi_margin_loss,
    aten.multilabel_margin_loss_forward,
)


@contextmanager
def faithful_tracing() -> Iterator[None]:
    """Switch off the traced decompositions of ops that eager runs as one kernel."""
    overloads = [getattr(packet, name) for packet in _WHOLE for name in packet.overloads()]
    saved = [(overload, dict(overload.py_kernels)) for overload in overloads]
    try:
        for overload in overloads:
            overload.py_kernels.clear()
            overload._dispatch_cache.clear()
        yield
    finally:
        for overload, kernels in saved:
            overload.py_kernels.update(kernels)
            overload._dispatch_cache.clear()
