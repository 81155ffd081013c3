"""A model whose parameters FSDP2 shards: what are its blocks, what stands between them, and whether all ranks agree."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lowtide.distributed.sharded_step import ShardedStep
from lowtide.errors import InvalidModelError, InvalidOptionError
from lowtide.plan.core.account import MemoryAccount
from lowtide.pytorch.fully_sharded import (
    ModelNow,
    ShardedGroup,
    ShardedStates,
    is_flat,
    is_sharded,
    local_bytes,
)
from lowtide.step.surroundings import Around, ModuleRun


class ShardedModel:
    """The sharded modules of a model below one root.

    Args:
        modules: The sharded modules by path, the root first.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = dict(modules)
        self._states = ShardedStates(self._modules)
        self._groups: list[ShardedGroup | None] = []
        for path, feature in self._states.unknown_features():
            raise InvalidModelError(
                f"The sharded module {path or 'at the root'!r} uses {feature}, whose memory lowtide does not know, so "
                "that no budget could be kept. Shard it without that, or leave the model unwrapped."
            )

    @property
    def is_inner(self) -> bool:
        """Whether the model is part of another sharded model, whose step is not planned."""
        return self._states.is_inner

    def blocks(self, chosen: Mapping[str, nn.Module], model: nn.Module) -> dict[str, nn.Module]:
        """Return the modules of `model` that are blocks: those that the user chose, and sharded ones without any.

        A module that is captured has no sharded parts: their hooks would be captured with it.
        """
        inside = {path: [each for each in self._modules if each != path and _is_in(each, path)] for path in chosen}
        for path, parts in inside.items():
            if parts:
                raise InvalidOptionError(
                    f"blocks has {path!r}, in which {parts[0]!r} is sharded by itself: its parameters come and go "
                    "while the block runs. Name the sharded modules or parts of them, or leave blocks out: then every "
                    "sharded module is a block."
                )
        root = next(iter(self._modules))
        inner = [
            path
            for path in self._modules
            if path != root and not any(_is_in(other, path) for other in (*self._modules, *chosen) if other != path)
        ]
        sharded = [path for path in inner if path not in chosen and not any(_is_in(path, each) for each in chosen)]
        order = {path: number for number, (path, _) in enumerate(model.named_modules())}
        found = {**chosen, **{path: self._modules[path] for path in sharded}}
        return dict(sorted(found.items(), key=lambda each: order[each[0]]))

    @property
    def has_parts(self) -> bool:
        """Whether modules inside of the root are sharded by themselves."""
        return len(self._modules) > 1

    def unsharded_parameters(self) -> Iterable[torch.Tensor]:
        """Return the tensors that hold unsharded parameters while they are there."""
        return self._states.unsharded_parameters()

    def forget_forward(self) -> None:
        """Let FSDP forget a forward pass whose backward will not come."""
        self._states.reset()

    def any_rank(self, fact: bool) -> bool:
        """Return True if `fact` is True on any rank; all ranks must ask."""
        tensor = torch.tensor([fact], dtype=torch.int32, device=self._device)
        for group in self._states.process_groups():
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
        return bool(tensor.item())

    @property
    def _device(self) -> torch.device:
        return next(next(iter(self._modules.values())).parameters()).device

    def begin_call(self) -> ModelNow:
        """Return how the model stands; see `Surroundings`."""
        return self._states.now()

    def around(
        self, state: Hashable, runs: Sequence[ModuleRun], leaf_bytes: int
    ) -> tuple[Sequence[Around], Sequence[Around]]:
        """Return what FSDP takes and lets go between `runs`; see `Surroundings`."""
        assert isinstance(state, ModelNow)
        # The first call settles the types of the parameters.
        self._groups = self._groups or self._states.groups()
        return ShardedStep(self._states.numbers, self._groups, state).around(runs, leaf_bytes)

    def account(self, step_bytes: int, sharding_bytes: int) -> MemoryAccount:
        """Return the account of this rank; see `Surroundings`."""
        root = next(iter(self._modules.values()))
        parameters = [local_bytes(each) for each in root.parameters()]
        trained = [local_bytes(each) for each in root.parameters() if each.requires_grad]
        return MemoryAccount(
            parameter_bytes=sum(parameters),
            buffer_bytes=sum(map(local_bytes, root.buffers())),
            batch_bytes=0,
            optimizer_bytes=0,
            gradient_bytes=sum(trained),
            step_bytes=step_bytes,
            sharding_bytes=sharding_bytes,
            ranks=dist.get_world_size(),
        )


def find_sharded(model: nn.Module) -> ShardedModel | None:
    """Return the sharded modules of `model`, or None if there are none; raise if its step cannot be planned."""
    modules = dict(model.named_modules())
    flat = next((path for path, module in modules.items() if is_flat(module)), None)
    if flat is not None:
        raise InvalidModelError(
            f"{flat or type(model).__name__!r} is sharded by FullyShardedDataParallel, which keeps parameters in flat "
            "buffers that no plan can follow. Use torch.distributed.fsdp.fully_shard on the layers and the model."
        )
    sharded = {path: module for path, module in modules.items() if is_sharded(module)}
    roots = [path for path in sharded if not any(path != other and _is_in(path, other) for other in sharded)]
    if not roots:
        return None
    if len(roots) > 1:
        raise InvalidModelError(
            f"{roots[0]!r} and {roots[1]!r} are sharded, and no sharded module holds both, so that each gathers and "
            "reduces for itself. Call fully_shard on the model as well, after its parts."
        )
    return ShardedModel(sharded)


def refuse_sharded(modules: Iterable[Any], what: str) -> None:
    """Raise if one of `modules` or a part of it is sharded; `what` says what cannot be done then."""
    for module in modules:
        if isinstance(module, nn.Module) and any(is_sharded(each) or is_flat(each) for each in module.modules()):
            raise InvalidModelError(what)


def _is_in(path: str, other: str) -> bool:
    """Return True if the module at `path` is the one at `other` or a part of it."""
    return not other or path == other or path.startswith(f"{other}.")
