"""A training call on fake tensors, block by block: which blocks run, and what the code between them holds.

Inside of a block its plan says what is alive. The code between blocks runs op by op on tensors without data, forward
and backward, and the storages that it makes and lets go are counted as they come and go. So the level between blocks is
known to the byte, but for temporaries inside of single ops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lowtide.blocks.step.ledger import Ledger
from lowtide.pytorch.nested import tensor_leaves
from lowtide.pytorch.op_watch import OpWatch
from lowtide.pytorch.storages import storage_key
from lowtide.step.problem import Gap
from lowtide.step.surroundings import ModuleRun

Forward = Callable[..., Any]


@dataclass(frozen=True)
class BlockRun:
    """One run of a block.

    Attributes:
        block: Number of the block.
        parameters: The parameters among its arguments.
        module: How what surrounds it sees it.
    """

    block: int
    parameters: tuple[nn.Parameter, ...]
    module: ModuleRun


@dataclass(frozen=True)
class RunForm:
    """How a block runs on tensors without data.

    Attributes:
        forward: What it computes.
        trained: Which of its results need gradients.
        kept: Positions of the results that its own backward reads: they live until it has run.
    """

    forward: Forward
    trained: Sequence[bool]
    kept: Collection[int] = ()


class Rehearsal:
    """Watches a call and its backward on fake tensors.

    Args:
        outside: Tensors that were there before the call: they are never counted.
        next_run: Returns which module the run that comes next is, which has these parameters.
    """

    def __init__(
        self, outside: Iterable[torch.Tensor], next_run: Callable[[Sequence[nn.Parameter]], ModuleRun]
    ) -> None:
        self.runs: list[BlockRun] = []
        self._next_run = next_run
        self._ledger = Ledger(outside)
        self._meter = _Meter(self._ledger)
        self._forward_gaps: list[Gap] = []
        # By the place of the run in the call.
        self._backward_gaps: dict[int, Gap] = {}
        self._order: list[int] = []
        self._last: Gap | None = None
        # Gradients that the code between blocks leaves to parameters, by the run before it; -1 if there is none.
        self._leaf_bytes: Counter[int] = Counter()
        self._hooks: list[RemovableHandle] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count what ops make from now on."""
        with OpWatch(self._meter.see):
            yield

    def run(self, block: int, form: RunForm, args: Sequence[Any]) -> Any:
        """Return what a block returns."""
        return _Run.apply(self, block, form, *args)  # type: ignore[no-untyped-call]

    def end_forward(self, parameters: Iterable[nn.Parameter] = ()) -> None:
        """Note that the call has returned, and watch which of `parameters` get gradients from no block."""
        self._forward_gaps.append(self._meter.end_gap())
        self._meter.begin_gap()
        of_blocks = {id(each) for run in self.runs for each in run.parameters}
        for parameter in parameters:
            if parameter.requires_grad and id(parameter) not in of_blocks:
                hook = parameter.register_post_accumulate_grad_hook(self._note_leaf)  # type: ignore[no-untyped-call]
                self._hooks.append(hook)

    def _note_leaf(self, parameter: torch.Tensor) -> None:
        place = self._order[-1] - 1 if self._order else len(self.runs) - 1
        self._leaf_bytes[place] += parameter.numel() * parameter.element_size()

    def end_backward(self) -> None:
        """Note that backward has ended."""
        self._last = self._meter.end_gap()
        while self._hooks:
            self._hooks.pop().remove()

    @property
    def leaf_bytes(self) -> tuple[int, ...]:
        """The gradients of parameters that the code before each run leaves in its backward; the last: behind all."""
        return tuple(self._leaf_bytes[place] for place in range(-1, len(self.runs)))

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
        parameters = tuple(arg for arg in args if isinstance(arg, nn.Parameter))
        self.runs.append(BlockRun(block, parameters, self._next_run(parameters)))
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
    def forward(ctx: Any, rehearsal: Rehearsal, block: int, form: RunForm, *args: Any) -> Any:
        """Run the block without recording."""
        ctx.rehearsal = rehearsal
        ctx.place = rehearsal.begin(block, args)
        ctx.inputs = args
        results = tuple(form.forward(*args))
        rehearsal.end(results)
        ctx.kept = [results[position].detach() for position in form.kept if isinstance(results[position], torch.Tensor)]
        free = [
            each
            for each, needs in zip(results, form.trained, strict=True)
            if isinstance(each, torch.Tensor) and not needs
        ]
        ctx.mark_non_differentiable(*free)
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> Any:
        """Return gradients without contents."""
        rehearsal: Rehearsal = ctx.rehearsal
        rehearsal.begin_backward(ctx.place, tangents)
        inputs, ctx.inputs, ctx.kept = ctx.inputs, (), ()
        needs = ctx.needs_input_grad[3:]
        gradients = [torch.empty_like(arg) if need else None for arg, need in zip(inputs, needs, strict=True)]
        rehearsal.end(gradients)
        # Of several gradients of one input the engine makes their sum in the place of the first.
        repeated = _repeated(inputs)
        del inputs, tangents
        return (None, None, None, *(None if place in repeated else each for place, each in enumerate(gradients)))


def _repeated(inputs: Sequence[Any]) -> set[int]:
    """Return the places of inputs that are another one once more."""
    seen: set[tuple[int, torch.Size]] = set()
    found: set[int] = set()
    for place, each in enumerate(inputs):
        if not isinstance(each, torch.Tensor) or isinstance(each, nn.Parameter):
            continue
        key = storage_key(each), each.shape
        if key in seen:
            found.add(place)
        seen.add(key)
    return found
