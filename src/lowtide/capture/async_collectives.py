"""Collectives that run while other ops do: what they hold from their start until somebody waits for them.

A functional collective returns at once a tensor that is filled later, and `wait_tensor` returns the same tensor when
it is. In between the collective holds what it reads and may have buffers of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx

from lowtide import device as devices
from lowtide.pytorch.nested import tensors_in
from lowtide.pytorch.ops import is_collective, op_name

# They copy what they are given to the result and work there.
_ON_A_COPY = ("all_reduce", "broadcast", "reduce")
# Of the library for the CPU (gloo): the bytes of its own buffers, from those of the arguments and of the results.
_BUFFERS: dict[str, Callable[[int, int], int]] = {
    "all_gather_into_tensor": lambda arguments, results: results,
    "all_gather_into_tensor_out": lambda arguments, results: results,
    "all_gather_into_tensor_coalesced": lambda arguments, results: arguments + results,
    "all_reduce_coalesced": lambda arguments, results: results,
    "reduce_scatter_tensor": lambda arguments, results: arguments,
    "reduce_scatter_tensor_coalesced": lambda arguments, results: arguments,
}


def waited_for(node: fx.Node) -> fx.Node | None:
    """Return what `node` waits for, if that is all it does."""
    source = node.args[0] if is_collective(node.target) and op_name(node.target) == "wait_tensor" else None
    return source if isinstance(source, fx.Node) else None


def held_until(node: fx.Node) -> list[fx.Node]:
    """Return what the collective that `node` waits for holds until then, its results left out."""
    source = waited_for(node)
    if source is not None and not is_collective(source.target) and source.all_input_nodes:
        # One of several results.
        source = source.all_input_nodes[0]
    return source.all_input_nodes if source is not None and holds_inputs(source) else []


def holds_inputs(node: fx.Node) -> bool:
    """Return True if `node` is a collective that holds what it reads until it is waited for."""
    name = op_name(node.target)
    return is_collective(node.target) and name not in (
        each + suffix for each in _ON_A_COPY for suffix in ("", "_coalesced")
    )


def buffer_bytes(node: fx.Node, device: torch.device) -> int:
    """Return the bytes of the buffers that the collective `node` has on `device` beside its arguments and results."""
    rule = _BUFFERS.get(op_name(node.target))
    if rule is None or device.type != "cpu":
        return 0
    arguments = tensors_in([source.meta.get("val") for source in node.all_input_nodes])
    return rule(_bytes(arguments, device), _bytes(tensors_in(node.meta.get("val")), device))


def _bytes(tensors: Sequence[torch.Tensor], device: torch.device) -> int:
    return sum(devices.round_bytes(tensor.numel() * tensor.element_size(), device) for tensor in tensors)
