"""The autograd graph of one run of a block, which ends at the block's inputs and is differentiated by itself.

`begin` makes tensors at which such a graph begins. They share the data of the inputs and hold nothing else, so an input
that autograd does not save is freed as in plain training. `end` returns the graph behind a block's results without
keeping the results. `differentiate` runs backward through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, saved_tensors_hooks

from lowtide.blocks.block.deferred_saves import DeferredSaves
from lowtide.pytorch.autograd_graph import gradients_from
from lowtide.pytorch.storages import storage_key

Gradients = list[Tensor | None]
# What makes results of `_Begin` need a gradient; never differentiated.
_ANCHOR = torch.empty(0, requires_grad=True)


class _Begin(torch.autograd.Function):
    """The node at which the graph of a block begins; it returns its inputs."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return `tensors` as results of this node."""
        del ctx, anchor
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Never run: the engine returns the gradients that arrive here."""
        raise AssertionError("gradients are profile before this node")


class _End(torch.autograd.Function):
    """The node at which backward of a block begins; the engine alone owns the gradients it hands on, and frees them."""

    @staticmethod
    def forward(ctx: Any, box: list[Gradients], *ends: Tensor) -> Tensor:
        """Return a tensor without elements, to start backward from."""
        ctx.box = box
        return ends[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return what is in the box."""
        del gradient
        return (None, *ctx.box.pop())


# `Function.apply` first checks for transforms of torch.func, which a chain refuses anyway. The check takes longer than
# the rest of the call, so the method of the class behind it is called.
_begin: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, _Begin).apply
_end: Callable[..., Tensor] = super(torch.autograd.Function, _End).apply


@dataclass(slots=True)
class BlockGraph:
    """The autograd graph of one run of a block, from its results back to its inputs.

    Attributes:
        start: A tensor without elements that stands for all results; None if no result needs a gradient.
        box: Takes the gradients of the results when backward begins.
        edges: Where the gradients of the inputs arrive.
        state: Takes the tensors that the block was run on, if they were not saved.
        deferred: Where a later run puts what autograd saves, if the first one did not keep it.
    """

    start: Tensor | None
    box: list[Gradients]
    edges: list[GradientEdge]
    state: list[Tensor]
    deferred: DeferredSaves | None = None


def begin(tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], list[GradientEdge]]:
    """Return tensors with the data of `tensors` at which a graph begins, and where their gradients will arrive."""
    if not tensors:
        return (), []
    started = _begin(_ANCHOR, *tensors)
    node = started[0].grad_fn
    assert node is not None, "the anchor needs a gradient"
    return started, [GradientEdge(node, index) for index in range(len(started))]


def end(
    results: Sequence[Tensor], shared: Sequence[Tensor], edges: list[GradientEdge], state: list[Tensor]
) -> BlockGraph:
    """Return the graph behind `results`; `state` is the list that `state_not_saved` was given.

    Sums of gradients that other blocks have begun enter at `shared`, before this block adds to them: the additions
    happen in the order of plain training, one by one.
    """
    if not results:
        return BlockGraph(None, [], edges, state)
    box: list[Gradients] = []
    return BlockGraph(_end(box, *results, *shared), box, edges, state)


@contextmanager
def state_not_saved(state: Sequence[Tensor], supply: list[Tensor]) -> Iterator[None]:
    """Make autograd save places instead of the tensors in `state`; in backward `supply` must hold equal tensors."""
    places = {storage_key(tensor): index for index, tensor in enumerate(state)}
    offsets = [tensor.storage_offset() for tensor in state]

    def pack(tensor: Tensor) -> Any:
        index = places.get(storage_key(tensor))
        if index is None:
            # Without its node, which would hold itself where an op saves its own result.
            return tensor.detach()
        return index, tensor.size(), tensor.stride(), tensor.storage_offset() - offsets[index]

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        index, size, stride, offset = packed
        base = supply[index]
        view: Tensor = base.as_strided(size, stride, base.storage_offset() + offset)
        return view

    # The block may go back through a part of its own graph while it runs.
    supply[:] = state
    try:
        with saved_tensors_hooks(pack, unpack):
            yield
    finally:
        supply.clear()


def differentiate(
    graph: BlockGraph, gradients: Gradients, parameters: Sequence[Tensor], *, retain: bool = False
) -> Sequence[Tensor | None]:
    """Return the gradients of the inputs of `graph`, then those of `parameters`.

    `gradients` are those of the results, then the sums so far of what is shared; the list is emptied, so that nothing
    holds them longer than needed.
    """
    if graph.start is None:
        return [None] * (len(graph.edges) + len(parameters))
    graph.box.append(gradients.copy())
    gradients.clear()
    return gradients_from(graph.start, graph.start.detach(), (*graph.edges, *parameters), retain=retain)
