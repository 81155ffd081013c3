"""What makes a captured graph compute what plain eager training computes, bit for bit.

A traced graph does not always do so. PyTorch decomposes some ops while it traces, into arithmetic that rounds
differently, takes more memory and is slower than the kernel that eager uses: these are kept whole. Other differences
are corrected by rewrites of the joint graph.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, fx

from lowtide.capture.program import is_getitem
from lowtide.capture.unused_tangents import retrace
from lowtide.pytorch.custom_ops import define_op
from lowtide.pytorch.fake_tensors import fake_mode_of
from lowtide.pytorch.ops import (
    BATCH_NORM,
    BATCH_NORM_NO_STATISTICS,
    UPSAMPLE_NEAREST_EXACT,
    without_python_kernels,
)


def _mask(x: Tensor, keep: float) -> Tensor:
    return torch.empty_like(x, dtype=torch.uint8).bernoulli_(keep)


def _noise(mask: Tensor, keep: float, dtype: torch.dtype) -> Tensor:
    return mask.to(dtype).div_(keep)


def _fake_mask(x: Tensor, keep: float) -> Tensor:
    del keep
    return torch.empty_like(x, dtype=torch.uint8)


def _fake_noise(mask: Tensor, keep: float, dtype: torch.dtype) -> Tensor:
    del keep
    return torch.empty_like(mask, dtype=dtype)


dropout_mask = define_op("dropout_mask(Tensor x, float keep) -> Tensor", _mask, _fake_mask, is_random=True)
dropout_noise = define_op("dropout_noise(Tensor mask, float keep, ScalarType dtype) -> Tensor", _noise, _fake_noise)

aten = torch.ops.aten


_KEPT_WHOLE = (
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
    return without_python_kernels(_KEPT_WHOLE)


def normalise(module: fx.GraphModule) -> None:
    """Apply all rewrites to the joint graph, in place."""
    correct_layer_norms(module)
    correct_statistics(module)
    shrink_losses(module)
    forget_running_statistics(module)
    restore_eager_dropout(module)


# Positions of the weight among the arguments of norms that save two statistics as their second and third result.
_NORM_WEIGHTS = {
    aten.native_layer_norm.default: 2,
    aten.native_group_norm.default: 1,
    BATCH_NORM: 1,
    BATCH_NORM_NO_STATISTICS: 1,
    aten.native_batch_norm.default: 1,
}


def correct_layer_norms(module: fx.GraphModule) -> None:
    """Give the results of layer norms the layout they have on the CPU: row by row, where the input's was traced."""
    stale = []
    for node in module.graph.nodes:
        if node.target not in (aten.native_layer_norm.default, aten.native_layer_norm_backward.default):
            continue
        for user in node.users:
            fake = user.meta.get("val")
            if not is_getitem(user) or user.args[1] != 0 or fake.device.type != "cpu":
                continue
            with fake_mode_of(fake):
                by_rows = torch.empty_like(fake, memory_format=torch.contiguous_format)
            # Not `is_contiguous`: strides along a size of 1 mean nothing, but later ops choose their kernels by them.
            if fake.stride() != by_rows.stride():
                user.meta["val"] = by_rows
                stale += list(user.users)
    retrace(module.graph, [node for node in stale if node.op != "output"])


def correct_statistics(module: fx.GraphModule) -> None:
    """Give the saved statistics of norms the type they have on the CPU: the weight's, where that is the wider one.

    The traced type is the input's. No number changes, only the sizes that are planned with.
    """
    for node in module.graph.nodes:
        if node.target not in _NORM_WEIGHTS:
            continue
        weight = node.args[_NORM_WEIGHTS[node.target]]
        if not isinstance(weight, fx.Node) or weight.meta["val"].device.type != "cpu":
            continue
        wide = weight.meta["val"].dtype
        for user in node.users:
            statistic = user.meta.get("val")
            if is_getitem(user) and user.args[1] in (1, 2) and statistic.dtype.itemsize < wide.itemsize:
                with fake_mode_of(statistic):
                    user.meta["val"] = torch.empty_like(statistic, dtype=wide)


# Losses whose kernel writes all elements, reduces them, and returns the scalar in the storage of the elements; with
# the position of their `reduction`.
_LOSSES = {
    aten.mse_loss.default: 2,
    aten.smooth_l1_loss.default: 2,
    aten.soft_margin_loss.default: 2,
    aten.binary_cross_entropy.default: 3,
}


def shrink_losses(module: fx.GraphModule) -> None:
    """Copy scalar losses out of the storage they would keep, which is as large as the model's output, in place."""
    for node in [n for n in module.graph.nodes if n.target in _LOSSES]:
        x, target = node.args[0], node.args[1]
        reduction = node.args[_LOSSES[node.target]] if len(node.args) > _LOSSES[node.target] else 1
        if reduction == 0 or x.meta["val"].device.type != "cpu":
            continue
        scalar = node.meta["val"]
        size = torch.broadcast_shapes(x.meta["val"].shape, target.meta["val"].shape).numel()  # type: ignore[no-untyped-call]
        with fake_mode_of(scalar):
            node.meta["val"] = torch.empty(max(size, 1), dtype=scalar.dtype, device=scalar.device).as_strided((), ())
        with module.graph.inserting_after(node):
            small = _call(module.graph, node, aten.clone.default, (node,), f"{node.name}_small")
        small.meta["val"] = scalar
        node.replace_all_uses_with(small, delete_user_cb=lambda user, small=small: user is not small)


def forget_running_statistics(module: fx.GraphModule) -> None:
    """Drop the running statistics from the arguments of training-mode batch normalisation's backward, in place.

    The kernel ignores them in training mode; as arguments they would only keep the changed buffers for backward.
    """
    for node in module.graph.find_nodes(op="call_function", target=aten.native_batch_norm_backward.default):
        if node.args[7] is True:
            node.args = (*node.args[:3], None, None, *node.args[5:])


def restore_eager_dropout(module: fx.GraphModule) -> None:
    """Put eager's dropout, which draws a mask of bytes and multiplies, in the place of the traced one on the CPU."""
    for node in module.graph.find_nodes(op="call_function", target=aten.native_dropout.default):
        x, p, train = node.args
        masks = [user for user in node.users if is_getitem(user) and user.args[1] == 1]
        readers = [reader for mask in masks for reader in mask.users]
        if any(reader.target is not aten.native_dropout_backward.default for reader in readers):
            continue
        if not train or x.meta["val"].device.type != "cpu":
            continue
        if 0 < p < 1:
            _replace_dropout(module.graph, node, x, 1 - p)
        elif p == 1:
            _replace_total_dropout(module.graph, node, x)


def _replace_dropout(graph: fx.Graph, node: fx.Node, x: fx.Node, keep: float) -> None:
    """Rewrite one dropout and its backward.

    out, mask = native_dropout(x, p)                     noise = dropout_noise(dropout_mask(x, 1 - p), 1 - p)
    dx = native_dropout_backward(dout, mask, s)   ->     out, dx = x * noise, dout * noise
    """
    with graph.inserting_before(node):
        mask = _call(graph, node, dropout_mask, (x, keep), f"{node.name}_mask")
        noise = _call(graph, node, dropout_noise, (mask, keep, x.meta["val"].dtype), f"{node.name}_noise")
    _multiply_by(graph, node, x, noise)


def _replace_total_dropout(graph: fx.Graph, node: fx.Node, x: fx.Node) -> None:
    """Rewrite one dropout of everything: eager draws no numbers for it and multiplies by a scalar zero."""
    with graph.inserting_before(node), fake_mode_of(x.meta["val"]):
        noise = graph.create_node("call_function", aten.zeros.default, ([],), {"dtype": x.meta["val"].dtype})
        noise.meta = {**node.meta, "val": torch.zeros([], dtype=x.meta["val"].dtype)}
    _multiply_by(graph, node, x, noise)


def _multiply_by(graph: fx.Graph, node: fx.Node, x: fx.Node, noise: fx.Node) -> None:
    """Let a dropout and its backward be products with `noise`."""
    results = {user.args[1]: user for user in node.users if is_getitem(user)}
    backwards = list(results[1].users) if 1 in results else []
    with graph.inserting_before(node):
        out = _call(graph, node, aten.mul.Tensor, (x, noise), f"{node.name}_out")
    # Views downstream share the storage of the fake tensors they were traced with.
    if 0 in results:
        out.meta["val"] = results[0].meta["val"]
        results[0].replace_all_uses_with(out)
    for user in backwards:
        with graph.inserting_before(user):
            gradient = _call(graph, user, aten.mul.Tensor, (user.args[0], noise), f"{user.name}_mul")
        gradient.meta["val"] = user.meta["val"]
        user.replace_all_uses_with(gradient)
        graph.erase_node(user)
    for result in results.values():
        graph.erase_node(result)
    graph.erase_node(node)


def _call(graph: fx.Graph, like: fx.Node, target: Any, args: tuple[Any, ...], name: str, **kwargs: Any) -> fx.Node:
    """Insert a call with the place in the program of `like` and a fake result of its own."""
    made = graph.create_node("call_function", target, args, kwargs, name=name)
    made.meta = copy.copy(like.meta)
    fakes = fx.node.map_arg(args, lambda node: node.meta["val"])
    mode = next(fake_mode_of(fake) for fake in fakes if isinstance(fake, torch.Tensor))
    with mode:
        made.meta["val"] = target(*fakes, **kwargs)
    return made
