"""Real arguments for a call that is known only by fake tensors.

The data must be valid for any op: floats lie strictly between 0 and 1, so they are probabilities and have logarithms
and roots; integers are zero, so they are indices into anything; booleans are mixed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from lowtide.capture.fused_op import in_sequence
from lowtide.costs.op import Call
from lowtide.errors import MeasureError

_BLOCK = 1 << 16

# Positions of the weight and of the first of two saved statistics. With inputs of lower precision than the weight, as
# under autocast, the CPU saves them in the weight's dtype; the fake kernels say the input's, which backward refuses.
_STATISTICS: dict[Callable[..., Any], tuple[int, int]] = {
    torch.ops.aten.native_batch_norm_backward.default: (2, 5),
    torch.ops.aten.native_layer_norm_backward.default: (5, 3),
    torch.ops.aten.native_group_norm_backward.default: (4, 2),
}


def materialize(call: Call, truth: bool | None = None) -> Call:
    """Return `call` with real tensors of the same shapes, strides, dtypes and devices.

    An argument given twice is made once. Views of one storage become tensors of their own, no larger than the view.

    Args:
        call: The call.
        truth: What single booleans are, which choose between graphs; None if nothing depends on it.
    """
    made: dict[int, torch.Tensor] = {}
    if truth is not None:
        flags = [leaf for leaf in pytree.tree_leaves(call[1:]) if isinstance(leaf, torch.Tensor) and _is_flag(leaf)]
        made = {id(flag): torch.full(flag.shape, truth, dtype=torch.bool, device=flag.device) for flag in flags}
    if call[0] is not in_sequence:
        return _real_call(call, made)
    return in_sequence, tuple(_real_call(one, made) for one in call[1]), {}


def _is_flag(fake: torch.Tensor) -> bool:
    return fake.dtype == torch.bool and fake.numel() == 1


def _real_call(call: Call, made: dict[int, torch.Tensor]) -> Call:
    target, args, kwargs = call
    return target, _with_true_dtypes(target, _real(tuple(args), made)), _real(dict(kwargs), made)


def _with_true_dtypes(target: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return `args` with the dtypes that a real step has where PyTorch's fake kernels are known to differ."""
    weight, first = _STATISTICS.get(target, (0, 0))
    if not first or args[weight] is None or args[weight].device.type != "cpu":
        return args
    saved = (None if one is None else one.to(args[weight].dtype) for one in args[first : first + 2])
    return (*args[:first], *saved, *args[first + 2 :])


def _real(arg: Any, made: dict[int, torch.Tensor]) -> Any:
    if isinstance(arg, torch.Tensor):
        if id(arg) not in made:
            made[id(arg)] = _tensor(arg)
        return made[id(arg)]
    if isinstance(arg, tuple):
        return tuple(_real(item, made) for item in arg)
    if isinstance(arg, list):
        return [_real(item, made) for item in arg]
    if isinstance(arg, dict):
        return {key: _real(value, made) for key, value in arg.items()}
    if isinstance(arg, torch.SymInt | torch.SymFloat | torch.SymBool):
        raise MeasureError(f"argument {arg!r:.40} is not a plain value")
    return arg


def _tensor(fake: torch.Tensor) -> torch.Tensor:
    if fake.layout != torch.strided:
        raise MeasureError(f"layout {fake.layout} is not strided")
    sizes, strides = tuple(fake.shape), fake.stride()
    span = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) if fake.numel() else 0
    real = _filled(span, fake.dtype, fake.device).as_strided(sizes, strides)
    return real.conj() if fake.is_conj() else real


def _filled(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return `count` valid numbers; a random block is repeated, because drawing them all takes longer than most ops."""
    if not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool):
        return torch.zeros(count, dtype=dtype, device=device)
    block = torch.rand(min(count, _BLOCK), generator=torch.Generator().manual_seed(0), device="cpu")
    # The comparison keeps booleans mixed; the range keeps 16- and 8-bit floats away from 0 and 1.
    block = block > 0.5 if dtype == torch.bool else (block * 0.8 + 0.1).to(dtype)
    block = block.to(device)
    if count <= _BLOCK:
        return block
    filled = torch.empty(count, dtype=dtype, device=device)
    whole = count // _BLOCK * _BLOCK
    filled[:whole].view(-1, _BLOCK).copy_(block)
    filled[whole:].copy_(block[: count - whole])
    return filled
