"""Inputs of which an op reads the shape alone, replaced so that the plan need not keep them.

The gradient of a convolution's input is computed from the gradient of its output and the weights, and that of a pooling
from the places it took its results from. Their kernels take the layer's input as well, but only to learn its shape and
layout; so it would have to be kept, or recomputed, though its contents are not read. Here a tensor takes its place that
has the shape and the layout and takes no memory (see `lowtide.device`): a *stand-in*.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from lowtide import device as devices
from lowtide.capture import memory_rewrites
from lowtide.pytorch.dispatch_modes import without_modes
from lowtide.pytorch.fake_tensors import fake_mode_of
from lowtide.pytorch.storages import storage_bytes

aten = torch.ops.aten

_CONVOLUTION = aten.convolution_backward.default
_PADDINGS = [f"{kind}_pad{dims}d_backward" for kind in ("reflection", "replication") for dims in (1, 2, 3)]
_POOLINGS = [
    *("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward", "avg_pool2d_backward"),
    *("avg_pool3d_backward", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward"),
    *("adaptive_max_pool2d_backward", "adaptive_max_pool3d_backward"),
]
# The position of the argument of which an op reads the shape alone. A convolution's backward does so if only the
# gradient of the input is wanted.
READS_SHAPE: Mapping[Any, int] = {
    _CONVOLUTION: 1,
    **{getattr(aten, name).default: 1 for name in (*_POOLINGS, *_PADDINGS)},
}
_OF_INPUT_ALONE = [True, False, False]


def replace_shape_only_inputs(module: fx.GraphModule) -> None:
    """Put stand-ins in the place of tensors that are read for their shape alone, in place."""
    made: dict[tuple[Any, ...], fx.Node] = {}
    for node in list(module.graph.nodes) if memory_rewrites.are_allowed() else ():
        source = _shape_only_input(node)
        if source is not None:
            position, tensor = READS_SHAPE[node.target], source.meta["val"]
            layout = (tensor.shape, tensor.stride(), tensor.dtype)
            stand_in = made[layout] if layout in made else _add_stand_in(module.graph, tensor)
            if stand_in is not None:
                made[layout] = stand_in
                node.args = (*node.args[:position], stand_in, *node.args[position + 1 :])


def is_stand_in(node: fx.Node) -> bool:
    """Return True if `node` makes a stand-in, which takes next to no time and no memory."""
    return node.op == "call_function" and node.target is devices.untouched_zeros


def _shape_only_input(node: fx.Node) -> fx.Node | None:
    """Return the argument of which `node` reads the shape alone and which can have a stand-in, or None."""
    position = READS_SHAPE.get(node.target) if node.op == "call_function" else None
    if position is None or (node.target is _CONVOLUTION and node.args[10] != _OF_INPUT_ALONE):
        return None
    source = node.args[position]
    if (
        not isinstance(source, fx.Node)
        or is_stand_in(source)
        or any(arg is source for i, arg in enumerate(node.args) if i != position)
    ):
        return None
    tensor = source.meta["val"]
    plain = tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg())
    whole = plain and 0 < tensor.numel() * tensor.element_size() == storage_bytes(tensor)
    # Strides along a size of 1 mean nothing, so those of the real tensor need not be the traced ones; but kernels are
    # chosen by them, and other kernels give other last bits.
    return source if whole and 1 not in tensor.shape and devices.has_untouched_zeros(tensor.device) else None


def _add_stand_in(graph: fx.Graph, like: torch.Tensor) -> fx.Node | None:
    """Add a stand-in at the beginning, or return None if there can be none.

    It is made there, not kept by the module: PyTorch copies the modules of graphs, and all that they keep.
    """
    args = (tuple(like.shape), like.stride(), like.dtype)
    with without_modes():
        if devices.untouched_zeros(*args) is None:
            return None
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        node = graph.call_function(devices.untouched_zeros, args)
    with fake_mode_of(like):
        node.meta["val"] = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    return node
