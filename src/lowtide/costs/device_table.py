"""Figures of named devices, for costs on hardware that is not here.

FLOP/s are the makers' dense peaks, without sparsity; for 16-bit types those of the matrix units with 32-bit
accumulation, for float32 those of ordinary float32 (PyTorch's default, not TF32).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from lowtide.errors import InvalidOptionError

_GIB = 2**30
# About what PyTorch needs to dispatch an op, and on a GPU to launch its kernel as well.
_CPU_OP_SECONDS, _GPU_OP_SECONDS = 2e-6, 5e-6


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """What a device can do at best.

    Attributes:
        name: Its name in the table.
        flops: Floating-point operations per second by dtype name; a dtype not listed runs as float32.
        bandwidth: Bytes per second between memory and processor.
        memory_bytes: Size of its memory.
        overhead_seconds: Time to start one op, however small.
        words: Words by which the driver's name of the device is recognised.
    """

    name: str
    flops: Mapping[str, float]
    bandwidth: float
    memory_bytes: int
    overhead_seconds: float
    words: frozenset[str]

    def flops_of(self, dtype: torch.dtype) -> float:
        """Return the operations per second in `dtype`."""
        return self.flops.get(str(dtype).removeprefix("torch."), self.flops["float32"])


def _figures(
    name: str, words: str, *, tera: tuple[float, float, float, float], gigabytes: float, gib: int
) -> DeviceFigures:
    float64, float32, float16, bfloat16 = (1e12 * figure for figure in tera)
    flops = {"float64": float64, "float32": float32, "float16": float16, "bfloat16": bfloat16}
    overhead = _CPU_OP_SECONDS if name == "cpu" else _GPU_OP_SECONDS
    return DeviceFigures(name, flops, 1e9 * gigabytes, gib * _GIB, overhead, frozenset(words.split()))


_TABLE = (
    # One AVX2 core at 3 GHz: 2 FMA units x 8 float32 lanes x 2 (Intel 64 optimization manual); one DDR4-3200 channel
    # (JEDEC JESD79-4). 16-bit floats are computed as float32.
    _figures("cpu", "cpu", tera=(0.048, 0.096, 0.096, 0.096), gigabytes=25.6, gib=16),
    # NVIDIA A100 Tensor Core GPU data sheet (SXM).
    _figures("a100-40gb", "a100 40gb", tera=(9.7, 19.5, 312, 312), gigabytes=1555, gib=40),
    _figures("a100-80gb", "a100 80gb", tera=(9.7, 19.5, 312, 312), gigabytes=2039, gib=80),
    # NVIDIA H100 Tensor Core GPU data sheet (SXM); 16-bit figures there are with sparsity, halved here.
    _figures("h100-80gb", "h100 80gb", tera=(34, 67, 989.5, 989.5), gigabytes=3350, gib=80),
    # NVIDIA V100 data sheet (SXM2); it has no bfloat16 units.
    _figures("v100-16gb", "v100 16gb", tera=(7.8, 15.7, 125, 15.7), gigabytes=900, gib=16),
    # NVIDIA Ampere GA102 architecture white paper.
    _figures("rtx3090", "rtx 3090", tera=(0.556, 35.6, 71, 71), gigabytes=936, gib=24),
    # NVIDIA Ada GPU architecture white paper.
    _figures("rtx4090", "rtx 4090", tera=(1.29, 82.6, 165.2, 165.2), gigabytes=1008, gib=24),
    # NVIDIA L4 data sheet; 16-bit figures there are with sparsity, halved here; float64 at 1/64 of float32.
    _figures("l4", "l4", tera=(0.473, 30.3, 121, 121), gigabytes=300, gib=24),
    # NVIDIA T4 data sheet; float64 at 1/32 of float32 (Turing white paper); it has no bfloat16 units.
    _figures("t4", "t4", tera=(0.253, 8.1, 65, 8.1), gigabytes=320, gib=16),
    # NVIDIA Turing architecture white paper (reference clocks); float64 at 1/32 of float32; no bfloat16 units.
    _figures("rtx2080ti", "rtx 2080 ti", tera=(0.42, 13.45, 53.8, 13.45), gigabytes=616, gib=11),
    # GeForce GTX TITAN X (Maxwell), 3072 lanes x 2 at 1 GHz; float64 at 1/32 of float32, 16-bit floats as float32.
    _figures("titanx", "gtx titan x", tera=(0.192, 6.144, 6.144, 6.144), gigabytes=336.5, gib=12),
    # NVIDIA Tesla K40 board specification, without boost; 16-bit floats as float32.
    _figures("k40c", "k40c", tera=(1.43, 4.29, 4.29, 4.29), gigabytes=288, gib=12),
    # AMD Instinct MI300X data sheet.
    _figures("mi300x", "mi300x", tera=(81.7, 163.4, 1307.4, 1307.4), gigabytes=5300, gib=192),
)
DEVICES: Mapping[str, DeviceFigures] = {figures.name: figures for figures in _TABLE}


def device_figures(name: str) -> DeviceFigures:
    """Return the figures of the device called `name`, in any case."""
    try:
        return DEVICES[name.strip().lower()]
    except KeyError:
        raise InvalidOptionError(f"There is no device {name!r}; there are {', '.join(DEVICES)}.") from None


def recognise(device: torch.device) -> DeviceFigures | None:
    """Return the figures of the device that is here, or None if it is not in the table."""
    if device.type == "cpu":
        return DEVICES["cpu"]
    words = set(re.split(r"[^a-z0-9]+", torch.cuda.get_device_name(device).lower()))
    return next((figures for figures in _TABLE if figures.words <= words), None)


def nearest(device: torch.device) -> DeviceFigures:
    """Return the figures of the device that is here, or those of a middling one of its kind."""
    return recognise(device) or DEVICES["a100-40gb"]
