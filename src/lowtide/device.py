"""Every assumption about devices in one place: waiting, rounding, free memory, generator state, names.

lowtide serves two kinds of device. On the CPU an allocation is exactly as large as asked for; on CUDA the caching
allocator hands out blocks of a multiple of 512 bytes and kernels run behind the caller's back.
"""

from __future__ import annotations

import mmap
import platform
from collections.abc import Sequence
from functools import cache
from math import prod
from pathlib import Path

import torch

from lowtide.errors import InvalidBudgetError, InvalidInputError

CUDA_BLOCK_BYTES = 512

Device = torch.device | str


def as_device(device: Device | None = None) -> torch.device:
    """Return `device` as a `torch.device` that lowtide serves.

    None means the current CUDA device if this process has used CUDA, else the CPU.
    """
    if device is None:
        used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # PyTorch does not annotate it
        device = "cuda" if used else "cpu"
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise InvalidInputError(f"Device {str(device)!r} is not served: lowtide plans for cpu and cuda devices.")
    return device


def synchronize(device: Device) -> None:
    """Return when all work queued on `device` is done."""
    device = as_device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def round_bytes(number: int, device: Device) -> int:
    """Return the bytes that an allocation of `number` bytes takes on `device`."""
    if as_device(device).type == "cpu":
        return number
    return -(-number // CUDA_BLOCK_BYTES) * CUDA_BLOCK_BYTES


def sums_rows_first(device: Device) -> bool:
    """Return True if the backward of softmax on `device` is known to read all of a row before it writes into it."""
    return as_device(device).type == "cpu"


def has_untouched_zeros(device: Device) -> bool:
    """Return True if `untouched_zeros` can make tensors for ops on `device`."""
    return as_device(device).type == "cpu" and hasattr(mmap, "MAP_PRIVATE")


def untouched_zeros(sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
    """Return a dense tensor of zeros on the CPU that takes no memory as long as nobody writes into it.

    Its pages are reserved and never touched: the system gives a page memory when it is first written to, and reads of
    one that was not return zeros. None if so many cannot be reserved, because the addresses of a process are limited.
    """
    number = prod(sizes)
    try:
        pages = _untouched_pages(number * dtype.itemsize)
    except OSError:
        return None
    return torch.frombuffer(pages, dtype=dtype, count=number).as_strided(sizes, strides)


_reserved: list[mmap.mmap] = []


def _untouched_pages(number: int) -> mmap.mmap:
    """Return at least `number` bytes of pages that nobody has written to, shared by all who ask."""
    if not _reserved or len(_reserved[-1]) < number:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        _reserved[:] = [mmap.mmap(-1, number, flags=flags)]
    return _reserved[-1]


def free_bytes(device: Device) -> int:
    """Return the bytes that can still be allocated on `device`, the allocator's own unused blocks included."""
    device = as_device(device)
    if device.type == "cpu":
        raise InvalidBudgetError(
            'The budget "auto" needs an accelerator: a CPU shares its memory with everything else that runs. '
            'Give a size such as "6GiB" or a share such as "50%".'
        )
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def get_rng_state(device: Device) -> torch.Tensor:
    """Return the state of the default generator of `device`, as a byte tensor on the host."""
    device = as_device(device)
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: Device) -> None:
    """Set the default generator of `device` to a `state` from `get_rng_state`."""
    device = as_device(device)
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def rng_state_bytes(device: Device) -> int:
    """Return the bytes of `device` memory that one saved generator state takes.

    A CUDA generator's state is kept on the host and therefore takes none.
    """
    return 0 if as_device(device).type == "cuda" else _cpu_state_bytes()


@cache
def _cpu_state_bytes() -> int:
    return torch.get_rng_state().numel()


def describe(device: Device) -> str:
    """Return one line naming all that op costs depend on besides the op: device, threads, versions, switches."""
    device = as_device(device)
    parts = [*(_describe_cuda(device) if device.type == "cuda" else _describe_cpu()), f"torch {torch.__version__}"]
    if torch.are_deterministic_algorithms_enabled():
        parts.append("deterministic")
    if (precision := torch.get_float32_matmul_precision()) != "highest":
        parts.append(f"matmul {precision}")
    return ", ".join(parts)


def _describe_cuda(device: torch.device) -> list[str]:
    cudnn = torch.backends.cudnn
    parts = [f"cuda {torch.cuda.get_device_name(device)}", f"runtime {torch.version.cuda or torch.version.hip}"]
    return parts + [word for word, on in (("no cudnn", not cudnn.enabled), ("benchmark", cudnn.benchmark)) if on]


def _describe_cpu() -> list[str]:
    parts = [f"cpu {_cpu_name()}", torch.backends.cpu.get_cpu_capability(), f"{torch.get_num_threads()} threads"]
    return parts if torch.backends.mkldnn.enabled else [*parts, "no mkldnn"]


@cache
def _cpu_name() -> str:
    # platform.processor() is empty or just the architecture on Linux.
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
