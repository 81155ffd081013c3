"""A model as `fully_shard` would spread it over processes that are not there: for planning on one machine.

Every unit (a layer, as a rule) is sharded by itself, and the model around them. What each of them takes follows from
the shapes of its parameters; when it is taken is worked out as it is for models that are sharded.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence

import torch
from torch import nn

from lowtide.distributed.sharded_step import ShardedStep
from lowtide.errors import InvalidModelError
from lowtide.plan.core.account import MemoryAccount
from lowtide.plan.core.parallel import Parallel
from lowtide.pytorch.fully_sharded import GroupNow, ModelNow, ShardedGroup, ShardedParameter, StateNow
from lowtide.step.surroundings import Around, ModuleRun


class ExpectedShards:
    """What stands around the blocks of a model whose units are sharded; see `Surroundings`.

    Args:
        model: The model, without shards.
        units: The modules in it that are sharded by themselves, by path; none is inside another one.
        parallel: The processes.
    """

    def __init__(self, model: nn.Module, units: Mapping[str, nn.Module], parallel: Parallel) -> None:
        self._ranks = parallel.world_size
        self._numbers = {path: number for number, path in enumerate(["", *units])}
        owned = _owned([*units.values(), model])
        groups = [_group(each, parallel) for each in (owned[-1], *owned[:-1])]
        self._groups = groups
        # The model around the units stays unsharded between forward and backward.
        reshards = [False, *(parallel.reshard_after_forward for _ in units)]
        pairs = zip(groups, map(_at_first, reshards), strict=True)
        states = [StateNow(None if group is None else now, (), ()) for group, now in pairs]
        self._now = ModelNow(tuple(states), is_last_backward=True, most_inputs=1)
        self._parameters = [each for part in owned for each in part]
        self._buffers = list(model.buffers())
        self._shards = parallel.shards

    def begin_call(self) -> ModelNow:
        """Return how the model stands before its first step."""
        return self._now

    def around(
        self, state: Hashable, runs: Sequence[ModuleRun], leaf_bytes: int
    ) -> tuple[Sequence[Around], Sequence[Around]]:
        """Return what FSDP would take and let go between `runs`."""
        assert isinstance(state, ModelNow)
        return ShardedStep(self._numbers, self._groups, state).around(runs, leaf_bytes)

    def account(self, step_bytes: int, sharding_bytes: int) -> MemoryAccount:
        """Return the account of a rank, without batch and optimizer."""
        shards = [(each.requires_grad, shard_bytes(each, self._shards)) for each in self._parameters]
        return MemoryAccount(
            parameter_bytes=sum(size for _, size in shards),
            buffer_bytes=sum(each.numel() * each.element_size() for each in self._buffers),
            batch_bytes=0,
            optimizer_bytes=0,
            gradient_bytes=sum(size for is_trained, size in shards if is_trained),
            step_bytes=step_bytes,
            sharding_bytes=sharding_bytes,
            ranks=self._ranks,
        )


def shard_bytes(parameter: torch.Tensor, ranks: int) -> int:
    """Return what one of so many ranks holds of a parameter: equally many rows as the others, padded."""
    return _shard_elements(parameter, ranks) * parameter.element_size()


def refuse_scalars(model: nn.Module) -> None:
    """Raise if a parameter cannot be sharded."""
    for name, parameter in model.named_parameters():
        if not parameter.dim():
            raise InvalidModelError(
                f"The parameter {name!r} is a scalar, which fully_shard refuses: it is spread over processes by rows. "
                "Make it a tensor of one dimension with one element."
            )


def _shard_elements(parameter: torch.Tensor, ranks: int) -> int:
    rows, *rest = parameter.shape
    return math.ceil(rows / ranks) * math.prod(rest)


def _owned(modules: Iterable[nn.Module]) -> list[list[nn.Parameter]]:
    """Return for each of the modules, in the order in which they are sharded, the parameters that it shards."""
    taken: set[int] = set()
    found: list[list[nn.Parameter]] = []
    for module in modules:
        found.append([each for each in module.parameters() if id(each) not in taken])
        taken.update(map(id, found[-1]))
    return found


def _group(parameters: Sequence[nn.Parameter], parallel: Parallel) -> ShardedGroup | None:
    figures = [
        ShardedParameter(
            shard_elements=_shard_elements(each, parallel.shards),
            elements=each.numel(),
            item_bytes=each.element_size(),
            gathered_item_bytes=each.element_size(),
            reduced_item_bytes=each.element_size(),
            is_trained=each.requires_grad,
        )
        for each in parameters
    ]
    return ShardedGroup.of(figures, parallel.shards, is_replicated=parallel.copies > 1) if figures else None


def _at_first(reshards_forward: bool) -> GroupNow:
    return GroupNow(
        reshards_forward=reshards_forward,
        reshards_backward=True,
        gathers_backward=True,
        reduces=True,
        replicates=True,
        is_unsharded=False,
        has_waiting=False,
        has_gradients=False,
        has_partial=False,
    )
