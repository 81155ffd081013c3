"""Gradients in the layout of their parameter.

Autograd copies a gradient whose layout is not that of its parameter, as it happens in channels-last convolutions. It
does so when all gradients of a planned graph are there. As an op of the graph the copy is made right behind the
gradient, which is then freed, and its bytes are planned.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, fx

from lowtide.capture.program import is_tangent, output_node
from lowtide.pytorch.custom_ops import define_op
from lowtide.pytorch.fake_tensors import fake_mode_of
from lowtide.pytorch.storages import gradient_strides


def _lay_out(gradient: Tensor, strides: Sequence[int]) -> Tensor:
    return _fake_lay_out(gradient, strides).copy_(gradient)


def _fake_lay_out(gradient: Tensor, strides: Sequence[int]) -> Tensor:
    return torch.empty_strided(gradient.shape, strides, dtype=gradient.dtype, device=gradient.device)


lay_out = define_op("lay_out(Tensor gradient, int[] strides) -> Tensor", _lay_out, _fake_lay_out)


def lay_out_gradients(module: fx.GraphModule, num_forward_outputs: int, parameters: Collection[int]) -> None:
    """Let the joint graph return gradients of parameters in the layout that autograd keeps, in place."""
    output = output_node(module)
    results = list(output.args[0])  # type: ignore[arg-type]
    primals = [node for node in module.graph.find_nodes(op="placeholder") if not is_tangent(node)]
    for position in sorted(parameters):
        index = num_forward_outputs + position
        gradient = results[index] if index < len(results) else None
        if not isinstance(gradient, fx.Node):
            continue
        parameter, fake = primals[position].meta["val"], gradient.meta["val"]
        strides = gradient_strides(parameter)
        if parameter.shape == fake.shape and not _agree(fake, strides):
            with module.graph.inserting_after(gradient):
                results[index] = module.graph.call_function(lay_out, (gradient, list(strides)))
            with fake_mode_of(fake):
                results[index].meta = {**gradient.meta, "val": _fake_lay_out(fake, strides)}
    output.args = (tuple(results),)


def _agree(gradient: Tensor, strides: Sequence[int]) -> bool:
    sizes = zip(gradient.shape, gradient.stride(), strides, strict=True)
    return all(size == 1 or one == other for size, one, other in sizes)
