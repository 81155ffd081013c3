"""What is alive between the blocks of a step: tensors that leave one block, enter another, or are made in between.

Inside a block the plan says to the byte what is alive. Between blocks it is the user's code that holds tensors and lets
them go. The ledger watches their storages without holding them, so it knows at every border between two blocks which of
them have died since the last one. It needs no profiler, and costs microseconds for each tensor that passes a border.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from lowtide.pytorch.storages import storage_bytes, storage_key, storage_watch


@dataclass(slots=True)
class _Watched:
    is_alive: Callable[[], bool]
    bytes: int
    holder: int | None = None


class Ledger:
    """Storages that passed a border between blocks and are counted.

    Args:
        outside: Tensors that were there before the step: they are never counted.
    """

    def __init__(self, outside: Iterable[torch.Tensor]) -> None:
        self._outside = {storage_key(tensor): storage_watch(tensor) for tensor in outside if _has_storage(tensor)}
        self._watched: dict[int, _Watched] = {}

    def add(self, tensors: Iterable[torch.Tensor], holder: int | None = None) -> int:
        """Watch the storages that are not known yet, and return their bytes.

        Args:
            tensors: What passes a border.
            holder: Who will hold the tensors until its backward has run; the first one that is given counts.
        """
        added = 0
        for tensor in tensors:
            if not _has_storage(tensor):
                continue
            key = storage_key(tensor)
            if not self._is_known(key):
                self._watched[key] = _Watched(storage_watch(tensor), storage_bytes(tensor))
                added += self._watched[key].bytes
            if key in self._watched and self._watched[key].holder is None:
                self._watched[key].holder = holder
        return added

    def bytes_by_holder(self) -> dict[int, int]:
        """Return the bytes that die when the backward of each holder has run, whose holder is known."""
        found: Counter[int] = Counter()
        for watched in self._watched.values():
            if watched.holder is not None:
                found[watched.holder] += watched.bytes
        return found

    def gradients_of(self, tensors: Iterable[torch.Tensor], holder: int) -> tuple[int, int]:
        """Return the bytes of the gradients of what one block takes: of distinct storages, and what is added up.

        Args:
            tensors: What the block takes, maybe the same storage several times.
            holder: Who holds them; of storages that others held before, nothing is said to be added up.
        """
        seen: set[int] = set()
        distinct = repeated = 0
        for tensor in tensors:
            if not _has_storage(tensor) or not tensor.requires_grad:
                continue
            key, size = storage_key(tensor), tensor.numel() * tensor.itemsize
            if key not in seen:
                distinct += size
            elif key in self._watched and self._watched[key].holder == holder:
                repeated += size
            seen.add(key)
        return distinct, repeated

    def remove_dead(self) -> int:
        """Return the bytes of watched storages that have died since the last time."""
        dead = [key for key, watched in self._watched.items() if not watched.is_alive()]
        return sum(self._watched.pop(key).bytes for key in dead)

    def hand_over(self, tensors: Iterable[torch.Tensor]) -> int:
        """Stop watching the storages of `tensors`, and return the bytes of those that were watched."""
        keys = {storage_key(tensor) for tensor in tensors if _has_storage(tensor)}
        return sum(self._watched.pop(key).bytes for key in keys if key in self._watched)

    def _is_known(self, key: int) -> bool:
        if key in self._watched:
            return self._watched[key].is_alive()
        return key in self._outside and self._outside[key]()


def _has_storage(tensor: object) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and not tensor.is_meta
