"""Gradients in the layout of their parameter.

Autograd copies a gradient that is laid out otherwise than its parameter, as the weights of channels-last convolutions
are. It does so when all gradients of a planned graph are there. As an op of the graph the copy is made where the
gradient is, which is then freed, and its bytes are planned.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, fx

from lowtide.capture.program import is_tangent, output_node

_LIBRARY = torch.library.Library("lowtide", "FRAGMENT")
_LIBRARY.define("lay_out(Tensor gradient, int[] strides) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def _lay_out(gradient: Tensor, strides: Sequence[int]) -> Tensor:
    return _fake_lay_out(gradient, strides).copy_(gradient)


def _fake_lay_out(gradient: Tensor, strides: Sequence[int]) -> Tensor:
    return torch.empty_strided(gradient.shape, strides, dtype=gradient.dtype, device=gradient.device)


_LIBRARY.impl("lay_out", _lay_out, "CompositeExplicitAutograd")
torch.library.register_fake("lowtide::lay_out", _fake_lay_out, lib=_LIBRARY)

lay_out = torch.ops.lowtide.lay_out.default


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
        strides = _kept_strides(parameter)
        if parameter.shape == fake.shape and not _agree(fake, strides):
            with module.graph.inserting_after(gradient):
                results[index] = module.graph.call_function(lay_out, (gradient, list(strides)))
            with fake.fake_mode:
                results[index].meta = {**gradient.meta, "val": _fake_lay_out(fake, strides)}
    output.args = (tuple(results),)


def _kept_strides(parameter: Tensor) -> tuple[int, ...]:
    """Return the strides in which autograd keeps the gradient: the parameter's if it is dense, else row by row."""
    if torch._prims_common.is_non_overlapping_and_dense_or_false(parameter):
        return tuple(parameter.stride())
    return tuple(torch._prims_common.make_contiguous_strides_for(parameter.shape))


def _agree(gradient: Tensor, strides: Sequence[int]) -> bool:
    sizes = zip(gradient.shape, gradient.stride(), strides, strict=True)
    return all(size == 1 or one == other for size, one, other in sizes)
