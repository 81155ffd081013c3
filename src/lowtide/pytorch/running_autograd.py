"""Autograd while it runs: the node of the forward that is running, and the backward pass that is running.

PyTorch tells neither. Both are found on the Python stack, in a local variable of a function of PyTorch's that is being
called. There is no other way in the versions that are supported:

- AOTAutograd calls the forward graph from inside an autograd function and keeps that function's context to itself. To
  look for the node behind the results instead would be ambiguous: results may be views, or come from an earlier graph.
- The engine knows the roots of the pass, but passes on only the number of it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, _engine_run_backward

# Between the forward graph and the autograd function there are a few frames of AOTAutograd's; more would be in vain.
_MOST_FRAMES = 12
# The one Python function through which the engine is entered.
_ENGINE = _engine_run_backward.__code__


def node_of_running_graph() -> Any:
    """Return the node of the autograd function whose forward or backward is running, or None if there is none."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return None
        context = frame.f_locals.get("ctx")
        if isinstance(context, BackwardCFunction):
            return context
        frame = frame.f_back
    return None


def roots_of_running_backward() -> Sequence[Any]:
    """Return the tensors or edges whose backward pass is running on this thread, or nothing if it cannot be seen."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not _ENGINE:
        frame = frame.f_back
    return () if frame is None else tuple(frame.f_locals["t_outputs"])


def is_executed(node: Node) -> bool:
    """Return True if the backward pass that is running executes `node`."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # how the engine says that it captures this gradient instead (`torch.autograd.grad`)
        return False


def has_tensor_hooks(tensor: torch.Tensor) -> bool:
    """Return True if the user has put hooks on the gradient of `tensor`, before it is accumulated or after."""
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))
