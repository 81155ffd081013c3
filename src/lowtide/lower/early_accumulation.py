"""Gradients that already exist: add to them as soon as the new ones are there.

Autograd receives the gradients of a whole-graph backward only when it ends, so with existing `.grad` there would be a
second full copy of the gradients. Plain training has one parameter's gradient too many at a time. Adding inside the
graph restores that, wherever the result is the one autograd would have given, bit for bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node

from lowtide.pytorch.running_autograd import has_tensor_hooks, is_executed, roots_of_running_backward

# In a larger graph of autograd nodes the search would take longer than it is worth; autograd then adds by itself.
_MOST_NODES = 20_000


class RunningBackward:
    """What the running backward pass does with gradients; looks it up when first asked."""

    def __init__(self) -> None:
        self._accumulators: dict[int, tuple[Node, int]] | None = None

    def accumulates_alone(self, parameter: torch.Tensor) -> bool:
        """Return True if this pass accumulates into the parameter, and only from one node.

        With a second path to the parameter autograd adds the gradients of both first, which rounds differently. A call
        of `torch.autograd.grad` accumulates nothing.
        """
        if self._accumulators is None:
            self._accumulators = _accumulators(roots_of_running_backward())
        accumulator, edges = self._accumulators.get(id(parameter), (None, 0))
        if accumulator is None or edges != 1 or _has_hooks(accumulator):
            return False
        return is_executed(accumulator)


def accumulate_early(gradient: torch.Tensor, parameter: torch.Tensor, running: RunningBackward) -> torch.Tensor | None:
    """Add `gradient` to the parameter's and return None, or return `gradient` for autograd to handle."""
    if not parameter.is_leaf or parameter.grad is None:
        return gradient
    if not _plainly_added(gradient, parameter) or not running.accumulates_alone(parameter):
        return gradient
    parameter.grad.add_(gradient)
    return None


def _plainly_added(gradient: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return True if autograd, given `gradient`, would run no hook and add it in place."""
    existing: Any = parameter.grad
    return (
        not has_tensor_hooks(parameter)
        and not torch.is_grad_enabled()
        and existing.layout is torch.strided is gradient.layout
        and existing.dtype == gradient.dtype
        and existing.device == gradient.device
        and existing.shape == gradient.shape
    )


def _has_hooks(node: Node) -> bool:
    """Return True if Python hooks wait for the gradient at `node`, before it is accumulated or after.

    PyTorch does not list them, but all hooks of one kind are in one dictionary, which registering another one shows.
    """
    for register in (node.register_prehook, node.register_hook):
        handle = register(_ignore)
        hooks = handle.hooks_dict_ref()
        handle.remove()
        if hooks:
            return True
    return False


def _ignore(*gradients: Any) -> None:
    """Do nothing, as a hook."""


def _accumulators(roots: Sequence[Any]) -> dict[int, tuple[Node, int]]:
    """Return, by identity of the parameter, the node that accumulates into it and how many edges lead there.

    Nothing is returned if the graph is very large.
    """
    edges: Counter[Node] = Counter()
    stack = [root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots]
    seen = set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if len(seen) > _MOST_NODES:
            return {}
        following = [nxt for nxt, _ in node.next_functions if nxt is not None]
        edges.update(following)
        stack += following
    return {id(node.variable): (node, count) for node, count in edges.items() if hasattr(node, "variable")}
