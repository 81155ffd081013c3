"""The processes that train together: how many, which one this is, who is in a group, and the store that they share.

The store is the one that the process group was made by. Reading and writing it is no collective, so nothing that a
rank does here can be paired with what another one does there.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lowtide.errors import RanksError

# Ranks of this backend are imagined: there is one process, and no store.
_IMAGINED = "fake"


def num_ranks() -> int:
    """Return how many processes train together with this one, itself included; 1 if it trains alone."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_backend() == _IMAGINED:
        return 1
    return dist.get_world_size()


def rank() -> int:
    """Return the number of this process among those that train together."""
    return dist.get_rank() if num_ranks() > 1 else 0


def is_distributed_tensor(kind: type) -> bool:
    """Return True if `kind` is that of tensors of which every rank has a part; nothing is imported to find out."""
    known = sys.modules.get("torch.distributed.tensor")
    return known is not None and issubclass(kind, known.DTensor)


def members(group: Any) -> tuple[int, ...]:
    """Return the ranks of the process group that an op names, in order; none if there is no such group."""
    found = _group(group)
    return () if found is None else tuple(sorted(dist.get_process_group_ranks(found)))


def backend_of(group: Any) -> str:
    """Return the name of the backend that communicates for the process group that an op names; "" if there is none."""
    found = _group(group)
    return "" if found is None else str(dist.get_backend(found))


def wait_for(started: torch.Tensor) -> torch.Tensor:
    """Return the result of a functional collective that was started, once it is there: the same tensor, filled."""
    result: torch.Tensor = torch.ops._c10d_functional.wait_tensor(started)
    return result


def _group(named: Any) -> Any:
    """Return the process group that an op names; None if there is none of this name here."""
    if not isinstance(named, str):
        return named
    try:
        return dist.distributed_c10d._resolve_process_group(named)  # type: ignore[arg-type, attr-defined]
    except (RuntimeError, ValueError, KeyError):  # Which one depends on the version.
        return None


def shared_store() -> SharedStore | None:
    """Return the store of the processes that train together; None if this one is alone."""
    if num_ranks() == 1:
        return None
    plain = dist.distributed_c10d._get_default_store()
    return SharedStore(dist.PrefixStore("lowtide", plain))  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class SharedStore:
    """Texts by key, which all ranks read and write; no call waits for another rank.

    Every method raises `RanksError` if the store is gone, with the process that keeps it.
    """

    _store: Any

    def put(self, key: str, text: bytes | str) -> None:
        """Write a text."""
        self._do(self._store.set, key, text)

    def get(self, key: str) -> bytes | None:
        """Return a text, or None if there is none."""
        return bytes(self._do(self._store.get, key)) if self._do(self._store.check, [key]) else None

    def put_if(self, key: str, before: str, text: str) -> str:
        """Write a text if `before` is there, "" for none; return what is there then."""
        return bytes(self._do(self._store.compare_set, key, before, text)).decode()

    def another(self) -> SharedStore:
        """Return the same store on a connection of its own, for another thread; it is made by connecting anew."""
        return SharedStore(self._do(self._store.clone))

    @staticmethod
    def _do(method: Any, *args: Any) -> Any:
        try:
            return method(*args)
        except RuntimeError as error:
            raise RanksError(
                "The store of the process group does not answer, so the process that keeps it has ended: rank 0, or "
                f"the launcher ({str(error).splitlines()[0]:.200}). Its own output says why; start the training again."
            ) from error
