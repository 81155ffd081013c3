"""Several calls that run as one op: a first one, and others that write over what it made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lowtide.pytorch.ops import (
    LOG_SOFTMAX_BACKWARD,
    LOG_SOFTMAX_BACKWARD_OUT,
    SOFTMAX_BACKWARD,
    SOFTMAX_BACKWARD_OUT,
)

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]

aten = torch.ops.aten


def _like(packets: str, overload: str, writing: str, argument: str) -> dict[Any, tuple[Any, str]]:
    found = [getattr(aten, name) for name in packets.split()]
    return {getattr(packet, overload): (getattr(packet, writing), argument) for packet in found}


# For ops that read what they write over no later than they write, the kernel that writes into a given tensor and the
# name of that argument; "" if it is the first one. Most compute each element from the elements in its place.
KERNELS: Mapping[Any, tuple[Any, str]] = {
    **_like("add sub mul div", "Tensor", "out", "out"),
    **_like("sigmoid tanh silu gelu leaky_relu elu exp neg sqrt rsqrt reciprocal", "default", "out", "out"),
    **_like("threshold_backward gelu_backward sigmoid_backward tanh_backward", "default", "grad_input", "grad_input"),
    **_like("silu_backward leaky_relu_backward elu_backward", "default", "grad_input", "grad_input"),
    **_like("hardtanh_backward", "default", "grad_input", "grad_input"),
    aten.pow.Tensor_Scalar: (aten.pow.Tensor_Scalar_out, "out"),
    aten.hardswish.default: (aten.hardswish.out, "out"),
    aten.hardtanh.default: (aten.hardtanh.out, "out"),
    **{getattr(aten, name).Scalar: (getattr(aten, f"{name}_").Scalar, "") for name in ("add", "sub", "div")},
    # Its own kernel in place rounds the scalar to 16 bits first if the tensor has them.
    aten.mul.Scalar: (aten.mul.out, "out"),
    # Its kernel for a given tensor makes a new one and copies it.
    aten.relu.default: (aten.relu_.default, ""),
    # These sum up a row before they write into it, on devices of which that is known.
    LOG_SOFTMAX_BACKWARD: (LOG_SOFTMAX_BACKWARD_OUT, "out"),
    SOFTMAX_BACKWARD: (SOFTMAX_BACKWARD_OUT, "grad_input"),
}
# Those of them that compute an element from more than the elements in its place.
BY_ROWS = frozenset({LOG_SOFTMAX_BACKWARD, SOFTMAX_BACKWARD})


@dataclass(frozen=True, slots=True)
class Made:
    """Stands among the arguments of a call for what the first call of a sequence made.

    Attributes:
        index: Which of its results, or None if it has one that is no tuple.
        fake: A fake tensor of the shape in which it is read.
    """

    index: int | None
    fake: torch.Tensor

    def of(self, result: Any) -> torch.Tensor:
        """Return what this stands for, given the result of the first call."""
        tensor = result if self.index is None else result[self.index]
        return tensor.as_strided(self.fake.shape, self.fake.stride())  # type: ignore[no-any-return]


def written_over(call: Call, over: Any) -> Call:
    """Return the call that does what `call` does but writes the result into its argument `over`."""
    target, args, kwargs = call
    kernel, argument = KERNELS[target]
    return kernel, args, {**kwargs, argument: over} if argument else kwargs


def in_sequence(first: Call, *others: Call) -> Any:
    """Return the result of the call `first` after the `others` have written over what they read of it."""
    target, args, kwargs = first
    result = target(*args, **kwargs)
    for call in others:
        target, args, kwargs = call
        over = next(item for item in args if isinstance(item, Made)).of(result)
        given = tuple(over if isinstance(item, Made) else item for item in args)
        target, args, kwargs = written_over((target, given, kwargs), over)
        target(*args, **kwargs)
    return result


def one_by_one(call: Call) -> list[Call]:
    """Return the calls of a sequence, each with tensors alone and none written over, or `call` itself."""
    target, args, _ = call
    if target is not in_sequence:
        return [call]
    first, *others = args
    return [first, *((one, tuple(i.fake if isinstance(i, Made) else i for i in rest), k) for one, rest, k in others)]
