"""The same computation in fewer and cheaper calls, just before code is generated.

A step of a small network makes a thousand calls, most of them views, and an op costs microseconds to reach from Python.
Views that undo each other or change nothing are left out, and common ops are called through PyTorch's own Python
functions, which parse their arguments about twice as fast. Storages, numbers and order stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten

_RESHAPES = {aten.reshape.default, aten.view.default, aten._unsafe_view.default}
_SAME_SHAPE = {*_RESHAPES, aten.expand.default}
# A detach is traced as itself or, from PyTorch 2.15 on, as an alias.
_SAME_TENSOR = {aten.detach.default, aten.alias.default}
_VIEWS = {*_SAME_SHAPE, *_SAME_TENSOR, aten.t.default}
_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    aten._softmax.default: torch._softmax,
    aten._unsafe_view.default: torch.reshape,
    aten.add.Tensor: torch.add,
    aten.addmm.default: torch.addmm,
    aten.bmm.default: torch.bmm,
    aten.cat.default: torch.cat,
    aten.div.Tensor: torch.div,
    aten.exp.default: torch.exp,
    aten.expand.default: Tensor.expand,
    aten.mm.default: torch.mm,
    aten.mul.Tensor: torch.mul,
    aten.native_layer_norm.default: torch.native_layer_norm,
    aten.permute.default: torch.permute,
    aten.relu.default: torch.relu,
    aten.reshape.default: torch.reshape,
    aten.sigmoid.default: torch.sigmoid,
    aten.sub.Tensor: torch.sub,
    aten.sum.dim_IntList: torch.sum,
    aten.t.default: torch.t,
    aten.tanh.default: torch.tanh,
    aten.transpose.int: torch.transpose,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.view.default: Tensor.view,
}


def quicken(module: fx.GraphModule) -> fx.GraphModule:
    """Return a module that computes the same as `module` and is quicker to run; `module` is not changed."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in list(graph.nodes):
        if node.target in _VIEWS:
            _shorten(node)
    for node in reversed(list(graph.nodes)):
        if node.target in _VIEWS and not node.users:
            graph.erase_node(node)
        elif node.target in _FUNCTIONS and not node.kwargs:
            node.target = _FUNCTIONS[node.target]
    return fx.GraphModule(module, graph)


def _shorten(node: fx.Node) -> None:
    """Let the users of a view read what it is a view of, where that is the same tensor."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    if node.target in _RESHAPES and source.target in _RESHAPES:
        node.args = (source.args[0], *node.args[1:])
        source = node.args[0]
    same = _replacement(node, source)
    # What is returned must stay a tensor of its own: two results that are one object would share what happens to them.
    if same is not None and all(isinstance(user.target, torch._ops.OpOverload) for user in node.users):
        node.replace_all_uses_with(same)


def _replacement(node: fx.Node, source: fx.Node) -> fx.Node | None:
    if node.target in _SAME_TENSOR:
        return source
    if node.target is aten.t.default:
        return source.args[0] if source.target is aten.t.default else None  # type: ignore[return-value]
    shape, before = _shape(node), _shape(source)
    return source if shape is not None and shape == before else None


def _shape(node: fx.Node) -> tuple[int, ...] | None:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, Tensor) else None
