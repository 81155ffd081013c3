"""DistributedDataParallel: which one is running, and what only it knows of its parameters, buckets and hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


def running_replica() -> DistributedDataParallel | None:
    """Return the innermost DistributedDataParallel whose forward is running in this process, or None."""
    found: DistributedDataParallel | None = DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
    return found


def reduced_parameters(replica: DistributedDataParallel) -> list[Tensor]:
    """Return the parameters whose gradients it reduces; those that it was told to ignore are left out."""
    return list(replica._module_parameters)


def has_final_buckets(replica: DistributedDataParallel) -> bool:
    """Return True if the buckets were made anew in the order in which gradients came, which happens once."""
    return bool(replica._has_rebuilt_buckets)


def communication_hooks(replica: DistributedDataParallel) -> list[tuple[Callable[..., Any], object]]:
    """Return the hooks, each with its state, that reduce the buckets in the place of a plain all-reduce."""
    return list(replica._comm_hooks)
