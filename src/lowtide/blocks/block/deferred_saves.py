"""Blanks in a block's piece of the autograd graph where tensors would be saved, and a run that fills them.

The run ends as soon as it has: what a block computes after the last tensor that its backward reads is not computed
again. A blank belongs to the graph alone, so that tensors are freed during backward as in plain training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lowtide.blocks.block.tensor_spec import storage_key
from lowtide.errors import InvalidModelError


class _Blank:
    """Stands for a saved tensor in the graph, which alone owns it: when the graph lets it go, the tensor goes too."""

    __slots__ = ("__weakref__", "shape", "tensor")

    def __init__(self, shape: torch.Size) -> None:
        self.shape = shape
        self.tensor: Tensor | None = None


class _FilledError(Exception):
    """Ends a run: all blanks are filled."""


def _stop() -> None:
    raise _FilledError


class Blanks:
    """What autograd would have saved in one run of a block, in order, to be filled by another."""

    __slots__ = ("_blanks", "_fixed")

    def __init__(self, fixed: Sequence[Tensor]) -> None:
        # Tensors that are there anyway, and that only some runs save: statistics, which a repeated run does without.
        self._fixed = frozenset(map(storage_key, fixed))
        self._blanks: list[ref[_Blank]] = []

    @contextmanager
    def left(self) -> Iterator[None]:
        """Let autograd save blanks instead of tensors."""
        fixed, blanks = self._fixed, self._blanks

        def pack(tensor: Tensor) -> Tensor | _Blank:
            if fixed and storage_key(tensor) in fixed:
                return tensor
            blank = _Blank(tensor.shape)
            blanks.append(ref(blank))
            return blank

        with saved_tensors_hooks(pack, _contents):
            yield

    @property
    def number(self) -> int:
        """How many blanks there are up to the last one that backward needs."""
        return max((place for place, blank in enumerate(self._blanks, 1) if blank() is not None), default=0)

    def fill(self, run: Callable[[], object], label: str, done: Callable[[], None] = _stop) -> None:
        """Fill the blanks that backward needs by `run()`, which repeats the first run.

        `label` names the block, for messages. `done` is called when all are filled, and ends the run by default.
        """
        fixed, waiting = self._fixed, [blank() for blank in self._blanks[: self.number]]
        place, number = 0, len(waiting)

        def pack(tensor: Tensor) -> None:
            nonlocal place
            if fixed and storage_key(tensor) in fixed:
                return
            if place < number and (blank := waiting[place]) is not None:
                if blank.shape != tensor.shape:
                    raise _unlike(label)
                blank.tensor = tensor.detach()
            place += 1
            # Once more if the block goes on all the same.
            if place >= number:
                done()

        if not number:
            return
        try:
            with saved_tensors_hooks(pack, _contents):
                run()
        except _FilledError:
            return
        if place < number:
            raise _unlike(label)

    def empty(self) -> None:
        """Let go of the tensors, if the graph is still there."""
        for found in self._blanks:
            if (blank := found()) is not None:
                blank.tensor = None


def _contents(packed: Tensor | _Blank | None) -> Tensor:
    tensor = packed.tensor if isinstance(packed, _Blank) else packed
    if tensor is None:
        raise InvalidModelError(
            "A block of the chain goes back through its own graph while it runs (torch.autograd.grad), but did not "
            "when it was looked at. It must compute the same in every run."
        )
    return tensor


def _unlike(label: str) -> InvalidModelError:
    return InvalidModelError(
        f"{label} saved other tensors for backward when it was run again than in its first run. A block must compute "
        "the same in every run from the same input and random state."
    )
