"""What the code between blocks leaves for backward: it runs in eager mode, so its autograd nodes hold what they save.

The nodes are found from the tensors that leave that code, back to nodes of blocks and to nodes that were seen before.
Their saved tensors are held until backward. What their backward takes beyond that is bounded from above by the sizes of
the gradients that pass through them and by the kinds of the nodes, until a step has been measured; see `EagerWatch`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from lowtide.blocks.step.eager_temporaries import POLICY, is_product, is_view, most_bytes
from lowtide.pytorch.autograd_graph import (
    gradient_bytes,
    has_gradient,
    is_leaf_node,
    next_nodes,
    saved_tensors,
    sequence_number,
)

# Nodes of blocks, by the names of their autograd functions: AOTAutograd's and the chain's.
_BLOCK_NODES = ("CompiledFunctionBackward", "_ChainNodeBackward")


@dataclass(frozen=True)
class EagerPart:
    """The eager code between two blocks, as backward will see it.

    Attributes:
        saved: What its nodes hold.
        backward_peak_bytes: Gradients and temporaries that are alive at the same time in its backward, at most.
        leaf_bytes: Gradients of leaves that its backward makes and that stay: those of its parameters, as a rule.
    """

    saved: list[torch.Tensor]
    backward_peak_bytes: int
    leaf_bytes: int = 0


@dataclass
class EagerNodes:
    """Finds the nodes of eager code, each once.

    Attributes:
        seen: Sequence numbers of nodes that were found before: holding nodes would hold what they save.
    """

    seen: set[int] = field(default_factory=set)

    def behind(self, tensors: Iterable[Any], found: Callable[[Any], None] | None = None) -> EagerPart:
        """Return the eager code that made `tensors`, as far as it was not seen before.

        Args:
            tensors: What leaves that code.
            found: Called with each of its nodes.
        """
        saved: list[torch.Tensor] = []
        nodes: list[_Node] = []
        leaves: dict[int, int] = {}
        stack = [each.grad_fn for each in tensors if isinstance(each, torch.Tensor) and each.grad_fn is not None]
        while stack:
            node = stack.pop()
            if is_leaf_node(node):
                # A gradient that is there already is added to.
                leaves[id(node)] = 0 if has_gradient(node) else gradient_bytes(node)
                continue
            if is_block_node(node) or sequence_number(node) in self.seen:
                continue
            self.seen.add(sequence_number(node))
            if found is not None:
                found(node)
            held = saved_tensors(node)
            saved += held
            nodes.append(_Node.of(node, held))
            stack += next_nodes(node)
        return EagerPart(saved, _highest(nodes), sum(leaves.values()))


def is_block_node(node: Any) -> bool:
    """Return True if `node` is the backward of a block."""
    return type(node).__name__ in _BLOCK_NODES


@dataclass(frozen=True)
class _Node:
    """A node of eager code: its number and name, what it takes in backward, and where the bytes go that it makes."""

    number: int
    name: str
    most_bytes: int
    leaving: list[tuple[int, int]]
    feeds_leaf: bool

    @classmethod
    def of(cls, node: Any, saved: Iterable[torch.Tensor]) -> _Node:
        name, following = type(node).__name__, next_nodes(node)
        leaving = [(sequence_number(each), gradient_bytes(each)) for each in following]
        held = [each.numel() * each.itemsize for each in saved]
        most = most_bytes(name, gradient_bytes(node), [size for _, size in leaving], held)
        return cls(sequence_number(node), name, most, leaving, any(map(is_leaf_node, following)))


def _highest(nodes: list[_Node]) -> int:
    """Return the highest level when nodes run from the newest to the oldest."""
    level = peak = 0
    waiting: Counter[int] = Counter()
    # Nodes whose gradients may be laid out in another way than what they are the gradients of.
    other_layout: set[int] = set()
    for node in sorted(nodes, key=lambda each: each.number, reverse=True):
        # A leaf copies what is not laid out as it is.
        is_free = is_view(node.name) and not (node.feeds_leaf and node.number in other_layout)
        peak = max(peak, level + (0 if is_free else node.most_bytes))
        # What a block has made for the node is counted by the block.
        arrived = waiting.pop(node.number, 0)
        level -= arrived
        for number, size in node.leaving:
            made = min(size, arrived) if is_view(node.name) else size
            waiting[number] += made
            level += made
            if not is_product(node.name):
                other_layout.add(number)
    return peak + POLICY.small_bytes if nodes else 0
