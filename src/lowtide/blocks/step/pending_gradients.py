"""Gradients that wait between blocks: the engine adds up what several readers of a tensor return for it.

A block returns one gradient for every read of an input. The engine keeps one sum for each tensor until what made the
tensor runs its backward. No watched storage shows that, because sums are new tensors of the engine's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lowtide.pytorch.storages import storage_bytes, storage_key


@dataclass
class PendingGradients:
    """Bytes of the sums that wait, by the storage of the tensor that they are the gradient of.

    A storage may be freed and its address be another's later on; a tensor that is read by a block in between makes the
    difference, because it is then noted again.
    """

    _first_read: dict[int, int] = field(default_factory=dict)
    _maker: dict[int, int] = field(default_factory=dict)
    _reads: list[list[int | None]] = field(default_factory=list)
    _waiting: dict[int, int] = field(default_factory=dict)

    def note_reads(self, place: int, inputs: Sequence[Any]) -> None:
        """Note what the block run at `place` reads; `place` grows by one with every run."""
        keys = [storage_key(each) if _is_plain(each) else None for each in inputs]
        for key in keys:
            if key is not None:
                self._first_read.setdefault(key, place)
        self._reads.append(keys)

    def note_outputs(self, place: int, outputs: Iterable[Any]) -> None:
        """Note what the block run at `place` has made."""
        for each in outputs:
            if _is_plain(each):
                self._maker[storage_key(each)] = place
                self._first_read.pop(storage_key(each), None)

    def arrive(self, place: int, gradients: Sequence[Any]) -> int:
        """Take in the gradients of a run's inputs; return how many of their bytes are gone when they are added up."""
        returned = added = 0
        for key, gradient in zip(self._reads[place], gradients, strict=False):
            if key is None or not _is_plain(gradient):
                continue
            size = storage_bytes(gradient)
            returned += size
            if key not in self._waiting:
                self._waiting[key] = size
                added += size
        return returned - added

    def leave(self, place: int) -> int:
        """Return the bytes of sums that are used up when the backward of the run at `place` begins.

        These are the gradients of its own outputs, and of what was made by code behind it, which has run by now.
        """
        gone = [key for key in self._waiting if self._is_used_up(key, place)]
        return sum(self._waiting.pop(key) for key in gone)

    def _is_used_up(self, key: int, place: int) -> bool:
        if key in self._maker:
            return self._maker[key] >= place
        return self._first_read.get(key, 0) > place


def _is_plain(tensor: object) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and not tensor.is_meta
