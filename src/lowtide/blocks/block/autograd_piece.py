"""One block's own piece of the autograd graph: cut off at its inputs, entered again later by its gradients.

`begin` makes tensors that record gradients but hold no data of their own beyond the input they stand for, so that an
input which nothing saves is freed as in plain training. `end` keeps the way back from a block's results without
keeping the results. `differentiate` goes that way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward, saved_tensors_hooks

from lowtide.blocks.block.deferred_saves import Blanks
from lowtide.blocks.block.tensor_spec import storage_key

Gradients = list[Tensor | None]
# What makes results of `_Begin` need a gradient; never differentiated.
_ANCHOR = torch.empty(0, requires_grad=True)


class _Begin(torch.autograd.Function):
    """Passes tensors on; the graph behind it is of no interest."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Return `tensors` as results of this node."""
        del ctx, anchor
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Never run: gradients are taken where they arrive here."""
        raise AssertionError("gradients are captured before this node")


class _End(torch.autograd.Function):
    """Hands gradients to the tensors it was made from; the engine alone owns them then, and frees them early."""

    @staticmethod
    def forward(ctx: Any, box: list[Gradients], *ends: Tensor) -> Tensor:  # type: ignore[override]
        """Return a tensor without elements, to start backward from."""
        ctx.box = box
        return ends[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        """Return what is in the box."""
        del gradient
        return (None, *ctx.box.pop())


# Past a check for transforms of functions, which blocks are not part of: it takes longer than the rest of the call.
_begin, _end = super(torch.autograd.Function, _Begin).apply, super(torch.autograd.Function, _End).apply


@dataclass(slots=True)
class Kept:
    """What is left of a block's run: the way from its results back to its inputs.

    Attributes:
        start: A tensor without elements that stands for all results; None if no result needs a gradient.
        box: Takes the gradients of the results when backward begins.
        edges: Where the gradients of the inputs arrive.
        state: Takes the tensors that the block was run on, if they were not kept.
        blanks: Where a later run puts what autograd saves, if the first one did not keep it.
    """

    start: Tensor | None
    box: list[Gradients]
    edges: list[GradientEdge]
    state: list[Tensor]
    blanks: Blanks | None = None


def begin(tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], list[GradientEdge]]:
    """Return tensors with the data of `tensors` at which a graph begins, and where their gradients will arrive."""
    if not tensors:
        return (), []
    started = _begin(_ANCHOR, *tensors)
    node = started[0].grad_fn
    return started, [GradientEdge(node, index) for index in range(len(started))]


def end(results: Sequence[Tensor], shared: Sequence[Tensor], edges: list[GradientEdge], state: list[Tensor]) -> Kept:
    """Return the way back from `results`; `state` is the list that `apart` was given.

    Sums of gradients that other blocks have begun enter at `shared`, before this block adds to them: the additions
    happen in the order of plain training, one by one.
    """
    if not results:
        return Kept(None, [], edges, state)
    box: list[Gradients] = []
    return Kept(_end(box, *results, *shared), box, edges, state)


@contextmanager
def apart(state: Sequence[Tensor], supply: list[Tensor]) -> Iterator[None]:
    """Let autograd save places instead of the tensors in `state`; `supply` must hold their like in backward."""
    places = {storage_key(tensor): index for index, tensor in enumerate(state)}
    offsets = [tensor.storage_offset() for tensor in state]

    def pack(tensor: Tensor) -> Any:
        index = places.get(storage_key(tensor))
        if index is None:
            return tensor
        return index, tensor.size(), tensor.stride(), tensor.storage_offset() - offsets[index]

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        index, size, stride, offset = packed
        base = supply[index]
        return base.as_strided(size, stride, base.storage_offset() + offset)

    # The block may go back through a part of its own graph while it runs.
    supply[:] = state
    try:
        with saved_tensors_hooks(pack, unpack):
            yield
    finally:
        supply.clear()


@contextmanager
def hooks_off(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Keep hooks on `parameters` from seeing what single blocks contribute: they are for the whole gradient."""
    hooked = [each for each in parameters if each._backward_hooks]
    contents = [dict(each._backward_hooks) for each in hooked]
    for each in hooked:
        each._backward_hooks.clear()
    try:
        yield
    finally:
        for each, hooks in zip(hooked, contents, strict=True):
            each._backward_hooks.update(hooks)


def differentiate(
    kept: Kept, gradients: Gradients, parameters: Sequence[Tensor], *, retain: bool = False
) -> Sequence[Tensor | None]:
    """Return the gradients of the inputs behind `kept`, then those of `parameters`.

    `gradients` are those of the results, then the sums so far of what is shared; the list is emptied, so that nothing
    holds them longer than needed.
    """
    if kept.start is None:
        return [None] * (len(kept.edges) + len(parameters))
    kept.box.append(gradients.copy())
    gradients.clear()
    # As torch.autograd.grad does it, without checking once more what is known: it is called for every block.
    return _engine_run_backward(
        (kept.start,),
        (kept.start.detach(),),
        retain,
        False,
        (*kept.edges, *parameters),
        True,
        accumulate_grad=False,
    )
