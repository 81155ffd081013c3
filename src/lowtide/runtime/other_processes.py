"""Planning for processes that are not there: what their engine would do with a model, and what it cannot do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from lowtide.blocks.step.find_layers import Layers, find_layers, repeated_layers
from lowtide.distributed.expected_shards import ExpectedShards, refuse_scalars
from lowtide.distributed.replicas import ExpectedBuckets, replica_of
from lowtide.errors import InvalidModelError
from lowtide.plan.core.parallel import Parallel
from lowtide.runtime.sharded_calls import sharded_layers
from lowtide.settings import Settings


@dataclass(frozen=True)
class Sharding:
    """How a model would be sharded.

    Attributes:
        layers: What is sharded by itself, and is a block.
        surroundings: What then stands around the blocks.
    """

    layers: Layers
    surroundings: ExpectedShards


def refuse_parallel(model: Any, settings: Settings) -> None:
    """Raise if `model` cannot be planned for the processes that the user names."""
    if settings.parallel is None:
        return
    if not isinstance(model, nn.Module):
        raise InvalidModelError(
            f"parallel={str(settings.parallel)!r} plans for a model in an engine, and "
            f"{getattr(model, '__name__', model)!r} is a function. Give the nn.Module that the engine is put around."
        )
    if replica_of(model) is not None:
        raise InvalidModelError(
            f"The model is in DistributedDataParallel already, and parallel={str(settings.parallel)!r} is for a model "
            "that is in no engine yet. Give the module inside, or leave parallel out."
        )
    if settings.parallel.is_sharded:
        refuse_scalars(model)


def expected_buckets(parallel: Parallel | None) -> ExpectedBuckets | None:
    """Return the buckets that gradients will go to; None if they go to none."""
    return ExpectedBuckets() if parallel is not None and parallel.strategy == "ddp" else None


def expected_shards(model: nn.Module, settings: Settings) -> Sharding | None:
    """Return how `model` will be sharded; None if it will not be."""
    parallel = settings.parallel
    if parallel is None or not parallel.is_sharded:
        return None
    units = _units(model, settings)
    return Sharding(sharded_layers(units), ExpectedShards(model, units, parallel))


def _units(model: nn.Module, settings: Settings) -> dict[str, nn.Module]:
    """Return the modules that are sharded by themselves: those that the user names, or the repeated layers."""
    if settings.blocks != "auto":
        return find_layers(model, settings.blocks).modules
    found = repeated_layers(model)
    if not found:
        raise InvalidModelError(
            f"{type(model).__name__} has no repeated layers (a ModuleList or Sequential of three or more of one class, "
            "with parts), so it is not known which modules fully_shard will be called on. Name them with blocks=[...]; "
            'blocks="whole" says that only the model itself is sharded.'
        )
    return found
