"""Splits the backward of a convolution into the gradient of the input and that of the weights.

The traced op makes both at once, so a plan could only have both or neither, and the gradient of the weights, which
stays to the end of the step, could not be made later. The kernels behind the op compute one after the other anyway, so
the two parts take as long and give the same bits. The smaller one is made first, for it is there while the other one
is made.
"""

from __future__ import annotations

import copy

import torch
from torch import fx

from lowtide.capture.program import is_getitem
from lowtide.pytorch.storages import storage_bytes

_BACKWARD = torch.ops.aten.convolution_backward.default
# The position of the argument that says which of the three results are wanted: of the input, the weights, the bias.
_WANTED = 10


def split_convolutions(module: fx.GraphModule) -> None:
    """Put two ops in the place of every backward of a convolution of which both gradients are read, in place."""
    for node in module.graph.find_nodes(op="call_function", target=_BACKWARD):
        of_input, *of_weights = node.args[_WANTED]
        read = {result.args[1] for result in node.users if is_getitem(result)}
        if of_input and any(of_weights) and len(read) == len(node.users) and 0 in read and read != {0}:
            _split(node, [True, False, False], [False, *of_weights])
            module.graph.erase_node(node)


def _split(node: fx.Node, of_input: list[bool], of_weights: list[bool]) -> None:
    """Insert the two parts before `node`, and let its results be taken from them."""
    parts = {"input": of_input, "weight": of_weights}
    sizes = {name: _bytes(node, wanted) for name, wanted in parts.items()}
    made = {name: _part(node, parts[name], name) for name in sorted(parts, key=lambda name: sizes[name])}
    for result in list(node.users):
        result.replace_input_with(node, made["input" if result.args[1] == 0 else "weight"])


def _part(node: fx.Node, wanted: list[bool], name: str) -> fx.Node:
    args = (*node.args[:_WANTED], wanted, *node.args[_WANTED + 1 :])
    with node.graph.inserting_before(node):
        part = node.graph.create_node("call_function", _BACKWARD, args, dict(node.kwargs), name=f"{node.name}_{name}")
    part.meta = copy.copy(node.meta)
    part.meta["val"] = tuple(result if want else None for result, want in zip(node.meta["val"], wanted, strict=True))
    return part


def _bytes(node: fx.Node, wanted: list[bool]) -> int:
    results = zip(node.meta["val"], wanted, strict=True)
    return sum(storage_bytes(result) for result, want in results if want and result is not None)
