"""In which order plain training gives parameters their gradients.

Engines that gather gradients in buckets fill them in that order, and where a gradient lies in a bucket decides in which
order it is added up over processes: the last bits depend on it. It cannot be read from a joint graph, in which the
gradients of one op's arguments come in the order in which they happened to be traced. So the traced forward is run once
on tensors without data, and its backward is watched: plain autograd, in its own order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from lowtide.pytorch.dispatch_modes import without_modes
from lowtide.pytorch.fake_tensors import new_fake_mode
from lowtide.pytorch.nested import tensor_leaves


def arrival_order(module: fx.GraphModule, inputs: Sequence[Any]) -> tuple[int, ...]:
    """Return the positions of the inputs that get a gradient, in the order in which eager gives it to them."""
    order: list[int] = []
    with without_modes(), new_fake_mode(), torch.enable_grad():
        leaves = [_leaf(each) if isinstance(each, Tensor) else each for each in inputs]
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_post_accumulate_grad_hook(lambda _, position=position: order.append(position))  # type: ignore[no-untyped-call]
        roots = [each for each in tensor_leaves(module(*leaves)) if each.requires_grad]
        # Where there is a loss, it is what training starts from.
        losses = [each for each in roots if each.numel() == 1] or roots
        torch.autograd.backward(losses, [torch.ones_like(each) for each in losses])
    return tuple(order)


def _leaf(tensor: Tensor) -> Tensor:
    """Return a tensor without data, like `tensor` and without its history."""
    made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return made.requires_grad_(tensor.requires_grad)
