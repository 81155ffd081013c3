"""Writes to the places that a mask selects, where they end the graph: `x[mask] = value`.

How many places there are depends on data. If `value` needs a gradient, backward gathers that many rows, so the graph
could not be planned in bytes. Writing by `torch.where` would have sizes that are numbers, but sums up the gradient of
`value` in another order than eager, which gives other bits. So the graph ends before such a write, eager does it, and
another graph goes on behind it.
"""

from __future__ import annotations

from typing import Any

import torch

from lowtide.pytorch.compiler.tracing import end_graphs_at_methods
from lowtide.pytorch.nested import tensors_in
from lowtide.runtime.entry_points import planned_call

_WRITES = ("__setitem__", "index_put_", "index_put")


def leave_masked_writes_to_eager() -> None:
    """End graphs of planned calls, from now on, before writes by a mask that cannot be planned."""
    end_graphs_at_methods(_WRITES, _reason, active=lambda: planned_call.depth.here > 0)


def _reason(arguments: Any) -> str | None:
    """Return why the graph must end before a write with these arguments, places first; None if it need not."""
    places, *written = arguments
    by_mask = any(place.dtype in (torch.bool, torch.uint8) for place in tensors_in(places))
    if not by_mask or not torch.is_grad_enabled() or not any(each.requires_grad for each in tensors_in(written)):
        return None
    return "A mask selects where a value is written that needs a gradient, whose backward has sizes that depend on data"
