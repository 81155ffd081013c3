"""FSDP2 (`fully_shard`): which modules of a model are sharded, what their parameters take, and where FSDP stands now.

FSDP gathers the parameters of a module before the module runs, forward and backward, lets go of them afterwards, and
scatters their gradients. All of it happens in hooks of modules and of tensors, and nothing public says how many bytes
it takes. What is read here is plain numbers; `lowtide.distributed.sharded_step` says when they are alive.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

# Whoever has not imported it has sharded nothing.
_FSDP = "torch.distributed.fsdp"


@dataclass(frozen=True, slots=True)
class ShardedParameter:
    """One parameter that is spread over ranks.

    Attributes:
        shard_elements: Its elements on every rank, padded.
        elements: Its elements.
        item_bytes: Bytes of one of them.
        gathered_item_bytes: The same in the type that is gathered and that the module reads.
        reduced_item_bytes: The same in the type in which gradients are reduced.
        is_trained: Whether it has a gradient.
        is_cast: Whether the type that is gathered is another one.
        changes_type: Whether reduced gradients are in another type than the parameter.
        waits_in_other_type: Whether gradients are reduced in another type than the one they are made in.
        is_across: Whether it is sharded along another dimension than the first one.
    """

    shard_elements: int
    elements: int
    item_bytes: int
    gathered_item_bytes: int
    reduced_item_bytes: int
    is_trained: bool
    is_cast: bool = False
    changes_type: bool = False
    waits_in_other_type: bool = False
    is_across: bool = False


@dataclass(frozen=True, slots=True)
class ShardedGroup:
    """Parameters that are gathered together: bytes on one rank.

    Attributes:
        ranks: Among how many ranks they are sharded.
        cast: Shards in the type that is gathered, if that is another one; alive while they are gathered.
        gathered: All shards as they are gathered, padded; with one rank nothing is gathered.
        unsharded: The parameters that the module reads, padded.
        swapped: Copies of unsharded parameters that are sharded along another dimension than the first one.
        accumulated: Unsharded gradients in the type of the reduction, which wait for a call that synchronises; 0 if
            they wait as they are.
        scattered: Unsharded gradients as they are reduced, padded.
        reduced: What this rank gets of them.
        gradients: The sharded gradients in the type of the parameters; they share the memory of `reduced` if 0.
        is_replicated: Whether gradients are also reduced among copies of the sharded model (HSDP).
        kept_shard: What stays of the parameters after forward if they are sharded among fewer ranks then.
        is_asynchronous: Whether the module's own gathering does not wait.
    """

    ranks: int
    cast: int
    gathered: int
    unsharded: int
    swapped: int
    accumulated: int
    scattered: int
    reduced: int
    gradients: int
    is_replicated: bool
    kept_shard: int
    is_asynchronous: bool

    @staticmethod
    def of(
        parameters: Sequence[ShardedParameter],
        ranks: int,
        *,
        is_replicated: bool = False,
        kept_among: int = 0,
        is_asynchronous: bool = False,
    ) -> ShardedGroup:
        """Return the group of these parameters among so many ranks.

        Args:
            parameters: The parameters.
            ranks: The ranks.
            is_replicated: Whether gradients are also reduced among copies.
            kept_among: Among how many ranks parameters stay sharded after forward; 0 if that is no other number.
            is_asynchronous: Whether the module's own gathering does not wait.
        """
        trained = [each for each in parameters if each.is_trained]
        unsharded = sum(ranks * each.shard_elements * each.gathered_item_bytes for each in parameters)
        across = [each for each in parameters if each.is_across]
        # All gradients of a group are reduced together, in one type.
        reduced_item = trained[0].reduced_item_bytes if trained else 0
        reduced = sum(each.shard_elements for each in trained) * reduced_item
        waits, changes = (trained[0].waits_in_other_type, trained[0].changes_type) if trained else (False, False)
        return ShardedGroup(
            ranks=ranks,
            cast=sum(each.shard_elements * each.gathered_item_bytes for each in parameters if each.is_cast),
            gathered=unsharded if ranks > 1 else 0,
            unsharded=unsharded,
            swapped=sum(ranks * each.shard_elements * each.gathered_item_bytes for each in across),
            accumulated=sum(each.elements for each in trained) * reduced_item if waits else 0,
            scattered=ranks * reduced,
            reduced=reduced,
            gradients=sum(each.shard_elements * each.item_bytes for each in trained) if changes else 0,
            is_replicated=is_replicated,
            kept_shard=unsharded // kept_among if kept_among else 0,
            is_asynchronous=is_asynchronous,
        )


@dataclass(frozen=True, slots=True)
class GroupNow:
    """Where a group stands when a call begins.

    Attributes:
        reshards_forward: Whether the unsharded parameters are let go after forward.
        reshards_backward: Whether they are let go after backward.
        gathers_backward: Whether they are gathered for backward.
        reduces: Whether gradients are reduced among shards.
        replicates: Whether they are then reduced among copies.
        is_unsharded: Whether the unsharded parameters are there.
        has_waiting: Whether unsharded gradients of earlier calls are there.
        has_gradients: Whether sharded gradients are there.
        has_partial: Whether gradients wait that are reduced among shards alone.
    """

    reshards_forward: bool
    reshards_backward: bool
    gathers_backward: bool
    reduces: bool
    replicates: bool
    is_unsharded: bool
    has_waiting: bool
    has_gradients: bool
    has_partial: bool


@dataclass(frozen=True, slots=True)
class StateNow:
    """Where a sharded module stands: its group, if it has parameters of its own, and what it gathers ahead.

    Attributes:
        group: Its group.
        ahead_forward: Numbers of the modules whose parameters it gathers ahead in forward.
        ahead_backward: The same for backward; empty for the module that ran before.
    """

    group: GroupNow | None
    ahead_forward: tuple[int, ...]
    ahead_backward: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelNow:
    """Where a sharded model stands.

    Attributes:
        states: Its sharded modules, by number.
        is_last_backward: Whether what FSDP holds is let go when backward ends.
        most_inputs: How many buffers of gradients that are being reduced are kept.
    """

    states: tuple[StateNow, ...]
    is_last_backward: bool
    most_inputs: int


def is_sharded(module: object) -> bool:
    """Return True if `fully_shard` was applied to `module` itself."""
    fsdp = sys.modules.get(_FSDP)
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def is_flat(module: object) -> bool:
    """Return True if `module` is one of FullyShardedDataParallel, the older engine."""
    fsdp = sys.modules.get(_FSDP)
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)


@torch.no_grad()
def local_bytes(tensor: torch.Tensor) -> int:
    """Return what a tensor takes on this rank, of one that is spread over ranks the part that is here."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.numel() * local.element_size())


class ShardedStates:
    """The sharded modules below one root, as FSDP knows them.

    Args:
        paths: The sharded modules by their paths, the root first.
    """

    def __init__(self, paths: dict[str, nn.Module]) -> None:
        self._states: list[Any] = []
        self.numbers: dict[str, int] = {}
        self.root: Any = next(iter(paths.values()))
        for path, module in paths.items():
            state = state_of(module)
            if state not in self._states:
                self._states.append(state)
            self.numbers[path] = self._states.index(state)

    @property
    def is_inner(self) -> bool:
        """Whether the root is part of another sharded model, as its calls have shown."""
        return self._states[0]._is_root is False or self._states[0]._state_ctx.iter_forward_root is not None

    def reset(self) -> None:
        """Let FSDP forget a forward pass whose backward will not come."""
        self.root.reset_iter_state()

    def groups(self) -> list[ShardedGroup | None]:
        """Return the groups of the states; the model must have run once, which settles their types."""
        return [_figures(group) if (group := _group(state)) is not None else None for state in self._states]

    def now(self) -> ModelNow:
        """Return where they stand."""
        context = self._states[0]._state_ctx
        most = max((group.reduce_scatter_max_input_buffers for group in map(_group, self._states) if group), default=1)
        return ModelNow(tuple(map(self._now, self._states)), bool(context.is_last_backward), most)

    def unsharded_parameters(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that hold unsharded parameters while they are there, and are empty at other times."""
        for parameter in self._parameters():
            if hasattr(parameter, "_unsharded_param"):
                yield parameter._unsharded_param

    def process_groups(self) -> list[Any]:
        """Return the groups of ranks that the root communicates in, shards first."""
        found: list[Any] = []
        for group in filter(None, map(_group, self._states)):
            for name in ("shard_process_group", "replicate_process_group"):
                each = getattr(group.mesh_info, name, None)
                if each is not None and each not in found:
                    found.append(each)
        return found

    def unknown_features(self) -> Iterator[tuple[str, str]]:
        """Yield what takes memory in ways that are not known here: the module, and what it uses."""
        paths = {number: path for path, number in reversed(self.numbers.items())}
        for number, state in enumerate(self._states):
            for feature in _unknown(state):
                yield paths[number], feature

    def _parameters(self) -> Iterator[Any]:
        for group in filter(None, map(_group, self._states)):
            yield from group.fsdp_params

    def _now(self, state: Any) -> StateNow:
        group = _group(state)
        return StateNow(
            None if group is None else _group_now(group),
            tuple(self._states.index(each) for each in state._states_to_forward_prefetch if each in self._states),
            tuple(self._states.index(each) for each in state._states_to_backward_prefetch if each in self._states),
        )


def state_of(module: nn.Module) -> Any:
    """Return what FSDP keeps for a sharded module."""
    return module._get_fsdp_state()  # type: ignore[operator]


def _group(state: Any) -> Any:
    """Return the parameters that a state gathers together, or None if it has none."""
    return next(iter(state._fsdp_param_groups), None)


def _unknown(state: Any) -> Iterator[str]:
    groups = state._fsdp_param_groups
    if len(groups) > 1:
        yield "parameters on several meshes (shard_placement_fn)"
    for group in groups:
        if not hasattr(group.mesh_info, "shard_process_group"):
            yield "replicate() in the place of fully_shard()"
        if type(group._all_gather_comm).__name__ != "DefaultAllGather":
            yield "communication of its own for gathering"
        if type(group._reduce_scatter_comm).__name__ != "DefaultReduceScatter":
            yield "communication of its own for reducing"
        if group._all_reduce_hook is not None:
            yield "an all-reduce hook"
        if any(hasattr(_local(each), "fsdp_pre_all_gather") for each in group.fsdp_params):
            yield "a tensor class with all-gather extensions"


@torch.no_grad()
def _local(parameter: Any) -> Any:
    return parameter.sharded_param.to_local()


def _figures(group: Any) -> ShardedGroup:
    mesh = group.mesh_info
    kept = group.post_forward_mesh_info if group._use_post_forward_mesh else None
    return ShardedGroup.of(
        [_parameter(each) for each in group.fsdp_params],
        mesh.shard_mesh_size,
        is_replicated=hasattr(mesh, "replicate_process_group"),
        kept_among=0 if kept is None else kept.shard_mesh_size,
        is_asynchronous=bool(group.unshard_async_op),
    )


def _parameter(parameter: Any) -> ShardedParameter:
    return ShardedParameter(
        shard_elements=_shard(parameter),
        elements=int(parameter._orig_size.numel()),
        item_bytes=parameter.orig_dtype.itemsize,
        gathered_item_bytes=_type(parameter).itemsize,
        reduced_item_bytes=(parameter.reduce_dtype or _type(parameter)).itemsize,
        is_trained=bool(parameter.sharded_param.requires_grad),
        is_cast=parameter.param_dtype is not None,
        changes_type=(parameter.reduce_dtype or _type(parameter)) != parameter.orig_dtype,
        waits_in_other_type=parameter.reduce_dtype is not None,
        is_across=bool(parameter.fsdp_placement.dim),
    )


def _shard(parameter: Any) -> int:
    """Return the elements of a parameter on every rank."""
    return int(parameter.padded_sharded_param_size.numel())


def _type(parameter: Any) -> torch.dtype:
    found: torch.dtype = parameter.param_dtype or parameter.orig_dtype
    return found


def _group_now(group: Any) -> GroupNow:
    return GroupNow(
        reshards_forward=bool(group._reshard_after_forward),
        reshards_backward=bool(group.reshard_after_backward),
        gathers_backward=bool(group.unshard_in_backward),
        reduces=bool(group.reduce_grads),
        replicates=bool(group.all_reduce_grads),
        is_unsharded=bool(group.is_unsharded),
        has_waiting=any(map(_is_waiting, group.fsdp_params)),
        has_gradients=_has_gradients(each.sharded_param for each in group.fsdp_params),
        has_partial=group._partial_reduce_output is not None,
    )


def _is_waiting(parameter: Any) -> bool:
    if parameter.unsharded_accumulated_grad is not None:
        return True
    return hasattr(parameter, "_unsharded_param") and parameter._unsharded_param.grad is not None


def _has_gradients(tensors: Iterable[torch.Tensor]) -> bool:
    return any(each.grad is not None for each in tensors)
