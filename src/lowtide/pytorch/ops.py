"""Ops as the dispatcher knows them, and ops whose own name is private."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeGuard

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

aten = torch.ops.aten

UNSAFE_VIEW = aten._unsafe_view.default
SOFTMAX = aten._softmax.default
SOFTMAX_BACKWARD = aten._softmax_backward_data.default
SOFTMAX_BACKWARD_OUT = aten._softmax_backward_data.out
LOG_SOFTMAX_BACKWARD = aten._log_softmax_backward_data.default
LOG_SOFTMAX_BACKWARD_OUT = aten._log_softmax_backward_data.out
# Batch normalisation as it is traced, and without running statistics.
BATCH_NORM = aten._native_batch_norm_legit_functional.default
BATCH_NORM_NO_STATISTICS = aten._native_batch_norm_legit.no_stats
UPSAMPLE_NEAREST_EXACT = (
    aten._upsample_nearest_exact1d,
    aten._upsample_nearest_exact2d,
    aten._upsample_nearest_exact3d,
)

_COLLECTIVES = {"_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "_dtensor", "c10d"}

# Calls the kernel of `SOFTMAX` without the dispatcher's detour through Python.
softmax = torch._softmax


def is_op(target: Any) -> TypeGuard[OpOverload[..., Any]]:
    """Return True if an fx node with this target calls one op, and not a Python function or a graph."""
    return isinstance(target, OpOverload)


def is_collective(target: Any) -> bool:
    """Return True if `target` is an op that communicates with other processes, or waits for them."""
    return is_op(target) and target.namespace in _COLLECTIVES


def takes_graphs(target: Any) -> bool:
    """Return True if `target` is an op that runs graphs it is given, such as `cond`."""
    return isinstance(target, HigherOrderOperator)


def any_overload(target: Any) -> Any:
    """Return one of the overloads of an op that is called without saying which; anything else as it is."""
    return getattr(target, target.overloads()[0]) if isinstance(target, OpOverloadPacket) else target  # type: ignore[no-untyped-call]


def op_name(target: Any) -> str:
    """Return the name of an op without namespace and overload, or "" if `target` is something else."""
    return str(getattr(target, "_opname", ""))


def changes_its_input(target: Any) -> bool:
    """Return True if the schema of `target` says that it writes into an argument; what has no schema says nothing."""
    return bool(getattr(getattr(target, "_schema", None), "is_mutable", False))


@contextmanager
def without_python_kernels(packets: Sequence[Any]) -> Iterator[None]:
    """Let these ops be traced as one call each: without the Python kernels that take them apart."""
    overloads = [getattr(packet, name) for packet in packets for name in packet.overloads()]
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


# Ops that PyTorch's flop counter lacks, and the one whose arguments and arithmetic are the same.
SAME_FLOPS: dict[Any, Any] = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}


def without_autocast() -> AbstractContextManager[Any]:
    """Return a context in which ops work in the types they are given; the public switch is one for each device."""
    return torch._C._DisableAutocast()
