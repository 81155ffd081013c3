"""DistributedDataParallel: what it does with the gradients of a model that every process has a replica of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lowtide.distributed.bucket_hooks import Hook, HookMemory, memory_of_hooks
from lowtide.pytorch.data_parallel import communication_hooks, has_final_buckets, reduced_parameters, running_replica


class Buckets(Protocol):
    """Where the gradients of a model go as soon as they are there."""

    @property
    def hooks(self) -> tuple[Hook, ...]:
        """What reduces buckets in the place of a plain all-reduce."""

    @property
    def hook_memory(self) -> HookMemory | None:
        """What the hooks take; None if it is not known."""

    @property
    def keeps_views(self) -> bool:
        """True if a parameter's gradient becomes a part of its bucket, and what backward has made is freed."""

    @property
    def awaits_order(self) -> bool:
        """True as long as the order in which gradients come decides how they are put in buckets."""


_NO_HOOKS = HookMemory()


@dataclass(frozen=True)
class ExpectedBuckets:
    """The buckets of DistributedDataParallel in its usual form, around a model that is only planned."""

    hooks: tuple[Hook, ...] = ()
    hook_memory: HookMemory | None = _NO_HOOKS
    keeps_views: bool = False
    awaits_order: bool = True


@dataclass(frozen=True)
class Replica:
    """One process's copy of a model in DistributedDataParallel.

    Gradients are copied into buckets, and a bucket is reduced over all processes as soon as it is full: while backward
    still runs, if gradients come one after the other.

    Attributes:
        container: The engine.
        hooks: What reduces buckets in the place of a plain all-reduce.
    """

    container: DistributedDataParallel
    hooks: tuple[Hook, ...] = ()

    @staticmethod
    def of(container: DistributedDataParallel) -> Replica:
        """Return the replica in `container`, as it reduces gradients now."""
        return Replica(container, tuple(hook for hook, _ in communication_hooks(container)))

    @property
    def reduced(self) -> list[Tensor]:
        """The parameters whose gradients go to buckets."""
        return [each for each in reduced_parameters(self.container) if each.requires_grad]

    @property
    def bucket_bytes(self) -> int:
        """What the buckets take from the construction on: one copy of the gradients, and what hooks keep beside it."""
        memory = self.hook_memory or HookMemory()
        return int((1 + memory.always) * sum(each.numel() * each.element_size() for each in self.reduced))

    @property
    def hook_memory(self) -> HookMemory | None:
        """What the hooks take; None if it is not known."""
        item_bytes = min((each.element_size() for each in self.reduced), default=1)
        return memory_of_hooks(communication_hooks(self.container), item_bytes)

    @property
    def keeps_views(self) -> bool:
        """True if a parameter's gradient becomes a part of its bucket, and what backward has made is freed."""
        return bool(self.container.gradient_as_bucket_view)

    @property
    def awaits_order(self) -> bool:
        """True as long as the order in which gradients come decides how they are put in buckets."""
        changes = self.container.static_graph or not self.container.find_unused_parameters
        return bool(changes) and not has_final_buckets(self.container)


def running() -> Replica | None:
    """Return the replica whose forward is running, or None if there is none."""
    container = running_replica()
    return None if container is None else Replica.of(container)


def replica_of(model: nn.Module) -> Replica | None:
    """Return `model` as a replica if it is in DistributedDataParallel, and None if it is not."""
    return Replica.of(model) if isinstance(model, DistributedDataParallel) else None


def trained_module(model: nn.Module) -> nn.Module:
    """Return what trains: of a model in DistributedDataParallel, the module inside.

    What the container does around a call (making buckets, sending buffers) is done by all processes together, so it may
    neither be traced nor made again. Its gradients arrive in buckets in any case.
    """
    while isinstance(model, DistributedDataParallel):
        model = model.module
    return model
