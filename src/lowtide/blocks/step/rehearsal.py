"""A training call on fake tensors, block by block: which blocks run, and what the code between them holds.

Inside of a block its plan says what is alive. The code between blocks runs op by op on tensors without data, forward
and backward, and the storages that it makes and lets go are counted as they come and go. So the level between blocks is
known to the byte, but for temporaries inside of single ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowtide.blocks.step.ledger import Ledger
from lowtide.pytorch.nested import tensor_leaves
from lowtide.pytorch.op_watch import OpWatch
from lowtide.step.problem import Gap

Forward = Callable[..., Any]


@dataclass(frozen=True)
class BlockRun:
    """One run of a block.

    Attributes:
        block: Number of the block.
        parameters: The parameters among its arguments.
    """

    block: int
    parameters: tuple[nn.Parameter, ...]


class Rehearsal:
    """Watches a call and its backward on fake tensors.

    Args:
        outside: Tensors that were there before the call: they are never counted.
    """

    def __init__(self, outside: Iterable[torch.Tensor]) -> None:
        self.runs: list[BlockRun] = []
        self._ledger = Ledger(outside)
        self._meter = _Meter(self._ledger)
        self._forward_gaps: list[Gap] = []
        # By the place of the run in the call.
        self._backward_gaps: dict[int, Gap] = {}
        self._order: list[int] = []
        self._last: Gap | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count what ops make from now on."""
        with OpWatch(self._meter.see):
            yield

    def run(self, block: int, forward: Forward, args: Sequence[Any], trained: Sequence[bool]) -> Any:
        """Return what a block returns; `trained` says which of its results need gradients."""
        return _Run.apply(self, block, forward, trained, *args)  # type: ignore[no-untyped-call]

    def end_forward(self) -> None:
        """Note that the call has returned."""
        self._forward_gaps.append(self._meter.end_gap())

    def end_backward(self) -> None:
        """Note that backward has ended."""
        self._last = self._meter.end_gap()

    @property
    def forward_gaps(self) -> tuple[Gap, ...]:
        """The code before, between and after the forwards of the runs."""
        return tuple(self._forward_gaps)

    @property
    def backward_gaps(self) -> tuple[Gap, ...] | None:
        """The code before, between and after their backwards; None if they have not all run in the reverse order."""
        places = list(reversed(range(len(self.runs))))
        if self._order != places or self._last is None:
            return None
        return (*(self._backward_gaps[place] for place in places), self._last)

    def begin(self, block: int, args: Sequence[Any]) -> int:
        """Note that a block comes next, and return the place of its run."""
        # Arguments that no op between blocks has made, such as constants.
        self._meter.see(tensor_leaves(args))
        self._forward_gaps.append(self._meter.end_gap())
        self.runs.append(BlockRun(block, tuple(arg for arg in args if isinstance(arg, nn.Parameter))))
        return len(self.runs) - 1

    def end(self, results: Iterable[Any]) -> None:
        """Note what a block has returned: it counts with the block until it dies."""
        self._ledger.add(tensor_leaves(results))
        self._meter.begin_gap()

    def begin_backward(self, place: int, tangents: Sequence[Any]) -> None:
        """Note that the backward of a run comes next: from now on it counts its tangents."""
        self._meter.level -= self._ledger.hand_over(tensor_leaves(tangents))
        self._backward_gaps[place] = self._meter.end_gap()
        self._order.append(place)


class _Meter:
    """The level of the code between two blocks, relative to its beginning."""

    def __init__(self, ledger: Ledger) -> None:
        self.level = 0
        self._peak = 0
        self._ledger = ledger
        self._is_on = True

    def see(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count what an op has made, and what has died before."""
        if not self._is_on:
            return
        self.level -= self._ledger.remove_dead()
        self.level += self._ledger.add(tensors)
        self._peak = max(self._peak, self.level)

    def end_gap(self) -> Gap:
        """Return the gap that ends; until the next one begins nothing is counted."""
        self.level -= self._ledger.remove_dead()
        gap = Gap(max(self._peak, self.level, 0), self.level)
        self._is_on = False
        return gap

    def begin_gap(self) -> None:
        """Begin another gap."""
        self.level = self._peak = 0
        self._is_on = True


class _Run(torch.autograd.Function):
    """A block as one node of autograd: it keeps its inputs, and returns gradients for those that need them."""

    @staticmethod
    def forward(
        ctx: Any, rehearsal: Rehearsal, block: int, forward: Forward, trained: Sequence[bool], *args: Any
    ) -> Any:
        """Run the block without recording."""
        ctx.rehearsal = rehearsal
        ctx.place = rehearsal.begin(block, args)
        ctx.inputs = args
        results = tuple(forward(*args))
        rehearsal.end(results)
        free = [
            each for each, needs in zip(results, trained, strict=True) if isinstance(each, torch.Tensor) and not needs
        ]
        ctx.mark_non_differentiable(*free)
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> Any:
        """Return gradients without contents."""
        rehearsal: Rehearsal = ctx.rehearsal
        rehearsal.begin_backward(ctx.place, tangents)
        inputs, ctx.inputs = ctx.inputs, ()
        needs = ctx.needs_input_grad[4:]
        gradients = [torch.empty_like(arg) if need else None for arg, need in zip(inputs, needs, strict=True)]
        del inputs, tangents
        rehearsal.end(gradients)
        return (None, None, None, None, *gradients)
