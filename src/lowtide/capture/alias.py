"""Which fx nodes share a storage.

A fake tensor's storage stands for the real one, so nodes whose fake tensors share a storage are views of one value.
"""

from __future__ import annotations

import torch
from torch import fx

from lowtide.pytorch.nested import tensors_in
from lowtide.pytorch.ops import UNSAFE_VIEW
from lowtide.pytorch.storages import storage_key

# Its schema promises a fresh tensor, but the kernel returns a view of its input.
_HIDDEN_VIEWS = {UNSAFE_VIEW}
# Their kernels always return a view.
_VIEWS = {
    getattr(torch.ops.aten, name).default
    for name in ("view", "t", "permute", "expand", "unsqueeze", "squeeze", "alias", "detach", "as_strided")
} | {torch.ops.aten.transpose.int, torch.ops.aten.slice.Tensor, torch.ops.aten.select.int}


def is_hidden_view(node: fx.Node) -> bool:
    """Return True if the result of `node` is a view of its input, though its fake tensor has a storage of its own.

    It has one if a call between the two was taken out of the traced graph.
    """
    if node.target in _HIDDEN_VIEWS:
        return True
    result, source = node.meta.get("val"), next(iter(node.all_input_nodes), None)
    if source is None or not isinstance(result, torch.Tensor) or not isinstance(source.meta.get("val"), torch.Tensor):
        return False
    return node.target in _VIEWS and storage_key(result) != storage_key(source.meta["val"])


def view_base(node: fx.Node) -> fx.Node | None:
    """Return the input node of which all results of `node` are views, or None if it makes something new."""
    results = tensors_in(node.meta.get("val"))
    if not results:
        return None
    inputs = {
        storage_key(source.meta["val"]): source
        for source in node.all_input_nodes
        if isinstance(source.meta.get("val"), torch.Tensor)
    }
    if is_hidden_view(node):
        return node.all_input_nodes[0]
    bases = {inputs.get(storage_key(result)) for result in results}
    return bases.pop() if len(bases) == 1 else None
