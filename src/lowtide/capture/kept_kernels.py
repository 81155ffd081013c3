"""Tracing that keeps the kernels eager runs.

PyTorch decomposes some ops while it traces, into arithmetic that rounds differently, takes more memory and is slower
than the kernel that eager uses. During capture they are not decomposed.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from lowtide.pytorch.ops import UPSAMPLE_NEAREST_EXACT, without_python_kernels

aten = torch.ops.aten

_KEPT = (
    aten.upsample_linear1d,
    aten.upsample_bilinear2d,
    aten.upsample_trilinear3d,
    aten.upsample_bicubic2d,
    aten.upsample_nearest1d,
    aten.upsample_nearest2d,
    aten.upsample_nearest3d,
    *UPSAMPLE_NEAREST_EXACT,
    aten.multi_margin_loss,
    aten.multilabel_margin_loss_forward,
)


def keeping_kernels() -> AbstractContextManager[None]:
    """Switch off the traced decompositions of ops that eager runs as one kernel."""
    return without_python_kernels(_KEPT)
