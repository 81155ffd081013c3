"""Costs by arithmetic, for a device that need not be here.

The roofline: an op takes as long as its arithmetic or its memory traffic, whichever is longer, plus the time to start
it. Operations come from PyTorch's flop counter where it knows the op, else one per element of the results; traffic is
all inputs and results once.

Workspace is zero except for these, which every implementation needs or nearly so: convolution (the result in the
library's own layout), its backward (both inputs in that layout), native_dropout (the noise), logsumexp (the
exponentials).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from lowtide.capture.fused_op import Call, one_by_one
from lowtide.costs.collectives import seconds_on_link
from lowtide.costs.device_table import DeviceFigures, device_figures
from lowtide.costs.op_signature import Calls, OpCost, signature
from lowtide.graph.costs import Costs
from lowtide.pytorch.fake_tensors import FakeTensor, FakeTensorMode
from lowtide.pytorch.nested import tensors_in
from lowtide.pytorch.ops import SAME_FLOPS, is_collective, without_autocast

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Attainable:
    """Shares of the makers' peaks that ops reach in practice. Plans depend on ratios of costs, so these are rough.

    Attributes:
        flops: Large products reach about 60 % of the arithmetic that a data sheet promises.
        bandwidth: Streaming through memory reaches about 80 %.
    """

    flops: float = 0.6
    bandwidth: float = 0.8


ATTAINABLE = Attainable()

# Workspace from the bytes of each input tensor and of each result.
_WORKSPACE: dict[Any, Callable[[list[int], list[int]], int]] = {
    aten.convolution: lambda inputs, results: sum(results),
    aten.convolution_backward: lambda inputs, results: sum(inputs[:2]),
    aten.native_dropout: lambda inputs, results: results[0],
    aten.logsumexp: lambda inputs, results: inputs[0],
}


def analytic_costs(program: Calls, device: str = "cpu") -> Costs:
    """Return estimated costs of every op of `program` on the device called `device`."""
    figures = device_figures(device)
    table: dict[str, OpCost] = {}
    costs: list[OpCost] = []
    for op in range(len(program.graph.ops)):
        call = program.call(op)
        if call is None:
            costs.append(OpCost(0.0, 0))
            continue
        key = signature(call)
        if key not in table:
            table[key] = estimate(call, figures)
        costs.append(table[key])
    return Costs(
        seconds=tuple(cost.seconds for cost in costs),
        workspace_bytes=tuple(cost.workspace_bytes for cost in costs),
        source=f"analytic {figures.name}",
    )


def estimate(call: Call, figures: DeviceFigures) -> OpCost:
    """Return the estimated cost of one call, or several that are one op, on a device with these figures."""
    costs = [_estimate_one(one, figures) for one in one_by_one(call)]
    return OpCost(sum(cost.seconds for cost in costs), max(cost.workspace_bytes for cost in costs))


def _estimate_one(call: Call, figures: DeviceFigures) -> OpCost:
    result = _fake_result(call)
    inputs, results = tensors_in(call[1:]), tensors_in(result)
    moved = sum(map(_nbytes, inputs)) + sum(map(_nbytes, results))
    if is_collective(call[0]):
        return OpCost(seconds_on_link(moved, call[0]), 0)
    flops = _flops(call, result)
    dtype = next((tensor.dtype for tensor in (*inputs, *results) if tensor.is_floating_point()), torch.float32)
    computing = flops / (ATTAINABLE.flops * figures.flops_of(dtype))
    moving = moved / (ATTAINABLE.bandwidth * figures.bandwidth)
    return OpCost(figures.overhead_seconds + max(computing, moving), _workspace_bytes(call, inputs, results))


def _fake_result(call: Call) -> Any:
    """Return the result as fake tensors, or None if the op has no fake implementation."""
    target, args, kwargs = call
    fakes = (tensor for tensor in tensors_in((args, kwargs)) if isinstance(tensor, FakeTensor))
    mode = next((fake.fake_mode for fake in fakes), None) or FakeTensorMode()
    try:
        with mode, torch.no_grad(), without_autocast():
            return target(*args, **kwargs)
    except Exception:  # What an op without a fake implementation raises is not specified.
        return None


def _flops(call: Call, result: Any) -> int:
    target, args, kwargs = call
    packet = getattr(target, "overloadpacket", target)
    formula = flop_registry.get(SAME_FLOPS.get(packet, packet))
    if formula is not None and result is not None:
        return int(formula(*args, **kwargs, out_val=result))
    return sum(tensor.numel() for tensor in tensors_in(result))


def _workspace_bytes(call: Call, inputs: list[torch.Tensor], results: list[torch.Tensor]) -> int:
    rule = _WORKSPACE.get(getattr(call[0], "overloadpacket", None))
    if rule is None or not results:
        return 0
    return rule([_nbytes(tensor) for tensor in inputs], [_nbytes(tensor) for tensor in results])


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
