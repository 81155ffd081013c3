"""Tensors that an op takes for their shape alone, put out of the way of the plan.

The gradient of a convolution's input is computed from the gradient of its output and the weights, and that of a pooling
from the places it took its results from. Their kernels take the layer's input as well, but only to learn its shape and
layout; so it would have to be kept, or made again, for nobody to read it. Here a hollow tensor takes its place, which
has the shape and the layout and takes no memory (see `lowtide.device`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from lowtide import device as devices
from lowtide.capture import liberties
from lowtide.capture.alias import storage_bytes

aten = torch.ops.aten

_CONVOLUTION = aten.convolution_backward.default
_PADDINGS = [f"{kind}_pad{dims}d_backward" for kind in ("reflection", "replication") for dims in (1, 2, 3)]
_POOLINGS = [
    *("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward", "avg_pool2d_backward"),
    *("avg_pool3d_backward", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward"),
    *("adaptive_max_pool2d_backward", "adaptive_max_pool3d_backward"),
]
# Where among the arguments of an op the tensor is of which it reads the shape alone. A convolution's backward does so
# if only the gradient of the input is wanted.
READS_SHAPE: Mapping[Any, int] = {
    _CONVOLUTION: 1,
    **{getattr(aten, name).default: 1 for name in (*_POOLINGS, *_PADDINGS)},
}
_OF_INPUT_ALONE = [True, False, False]
_HOLLOW = "lowtide_hollow"


def hollow_out(module: fx.GraphModule) -> None:
    """Put hollow tensors in the place of those that are read for their shape alone, in place."""
    made: dict[str, fx.Node] = {}
    for node in list(module.graph.nodes) if liberties.are_allowed() else ():
        source = _read_for_its_shape(node)
        if source is not None:
            position, tensor = READS_SHAPE[node.target], source.meta["val"]
            name = _name(tensor)
            hollow = made[name] if name in made else _add_hollow(module, tensor, name)
            if hollow is not None:
                made[name] = hollow
                node.args = (*node.args[:position], hollow, *node.args[position + 1 :])


def is_hollow(node: fx.Node) -> bool:
    """Whether `node` stands for a hollow tensor, which is always there and takes no memory."""
    return node.op == "get_attr" and str(node.target).startswith(_HOLLOW)


def _read_for_its_shape(node: fx.Node) -> fx.Node | None:
    """Return the argument of which `node` reads the shape alone and which a hollow tensor can stand for, or None."""
    position = READS_SHAPE.get(node.target) if node.op == "call_function" else None
    if position is None or (node.target is _CONVOLUTION and node.args[10] != _OF_INPUT_ALONE):
        return None
    source = node.args[position]
    if (
        not isinstance(source, fx.Node)
        or is_hollow(source)
        or any(arg is source for i, arg in enumerate(node.args) if i != position)
    ):
        return None
    tensor = source.meta["val"]
    plain = tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg())
    whole = plain and 0 < tensor.numel() * tensor.element_size() == storage_bytes(tensor)
    return source if whole and devices.can_be_hollow(tensor.device) else None


def _name(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return "_".join([_HOLLOW, dtype, *map(str, tensor.shape), "by", *map(str, tensor.stride())])


def _add_hollow(module: fx.GraphModule, like: torch.Tensor, name: str) -> fx.Node | None:
    with _disable_current_modes():
        hollow = devices.hollow(like.shape, like.stride(), like.dtype)
    if hollow is None:
        return None
    module.register_buffer(name, hollow, persistent=False)
    first = next(node for node in module.graph.nodes if node.op != "placeholder")
    with module.graph.inserting_before(first):
        node = module.graph.get_attr(name)
    with like.fake_mode:  # type: ignore[attr-defined]
        node.meta["val"] = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    return node
