"""Deferred saves: a first run saves placeholders for backward, and a repeated run fills in the tensors.

The repeated run ends as soon as all are filled: what a block computes after the last tensor that its backward reads is
not computed again. The graph alone owns the placeholders, so tensors are freed during backward as in plain training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lowtide.errors import InvalidModelError
from lowtide.pytorch.storages import storage_key


class _Placeholder:
    """Takes the place of a saved tensor. The graph alone owns it: when the graph is freed, so is the tensor."""

    __slots__ = ("__weakref__", "shape", "tensor")

    def __init__(self, shape: torch.Size) -> None:
        self.shape = shape
        self.tensor: Tensor | None = None


class _FilledError(Exception):
    """Ends a run: all placeholders are filled."""


def _stop() -> None:
    raise _FilledError


class DeferredSaves:
    """What autograd would have saved in one run of a block, in order, to be filled in by another run."""

    __slots__ = ("_fixed", "_placeholders")

    def __init__(self, fixed: Sequence[Tensor]) -> None:
        # Statistics of normalisations: they exist anyway, and a repeated run, which does not update them, saves none.
        self._fixed = frozenset(map(storage_key, fixed))
        self._placeholders: list[ref[_Placeholder]] = []

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Make autograd save placeholders instead of tensors."""
        fixed, placeholders = self._fixed, self._placeholders

        def pack(tensor: Tensor) -> Tensor | _Placeholder:
            if fixed and storage_key(tensor) in fixed:
                return tensor
            placeholder = _Placeholder(tensor.shape)
            placeholders.append(ref(placeholder))
            return placeholder

        with saved_tensors_hooks(pack, _contents):
            yield

    @property
    def number(self) -> int:
        """How many placeholders there are up to the last one that backward needs."""
        return max((place for place, each in enumerate(self._placeholders, 1) if each() is not None), default=0)

    def fill(self, run: Callable[[], object], label: str, done: Callable[[], None] = _stop) -> None:
        """Fill the placeholders that backward needs by `run()`, which repeats the first run.

        `label` names the block, for messages. `done` is called when all are filled, and ends the run by default.
        """
        fixed, waiting = self._fixed, [each() for each in self._placeholders[: self.number]]
        place, number = 0, len(waiting)

        def pack(tensor: Tensor) -> None:
            nonlocal place
            if fixed and storage_key(tensor) in fixed:
                return
            if place < number and (placeholder := waiting[place]) is not None:
                if placeholder.shape != tensor.shape:
                    raise _other_saves(label)
                placeholder.tensor = tensor.detach()
            place += 1
            # Called again if the block has caught the exception and goes on.
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
            raise _other_saves(label)

    def clear(self) -> None:
        """Free the tensors, if the graph still exists."""
        for found in self._placeholders:
            if (placeholder := found()) is not None:
                placeholder.tensor = None


def _contents(packed: Tensor | _Placeholder | None) -> Tensor:
    tensor = packed.tensor if isinstance(packed, _Placeholder) else packed
    if tensor is None:
        raise InvalidModelError(
            "A block of the chain goes back through its own graph while it runs (torch.autograd.grad), but did not "
            "when it was profiled. It must compute the same in every run."
        )
    return tensor


def _other_saves(label: str) -> InvalidModelError:
    return InvalidModelError(
        f"{label} saved other tensors for backward when it was run again than in its first run. A block must compute "
        "the same in every run from the same input and random state."
    )
