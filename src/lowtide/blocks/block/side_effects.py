"""Running a block without side effects: buffers, running statistics, random number generators and autocast."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lowtide import device as devices
from lowtide.pytorch.modules import buffers

Owner = tuple[nn.Module, str]
Autocast = tuple[tuple[str, bool, torch.dtype], ...]
RandomStates = tuple[Tensor, ...]


def random_devices(tensors: Iterable[Any]) -> tuple[torch.device, ...]:
    """Return the devices whose generators a block with such tensors may draw from; the CPU's comes first."""
    found = {tensor.device for tensor in tensors if isinstance(tensor, Tensor) and tensor.device.type == "cuda"}
    return (torch.device("cpu"), *sorted(found, key=str))


def read_random_states(places: Sequence[torch.device]) -> RandomStates:
    """Return the present states of the generators of `places`."""
    return tuple(devices.get_rng_state(place) for place in places)


def restore_random_states(places: Sequence[torch.device], states: RandomStates) -> None:
    """Set the generators of `places`."""
    for place, state in zip(places, states, strict=True):
        devices.set_rng_state(state, place)


def owners_of(modules: Iterable[nn.Module]) -> list[Owner]:
    """Return every buffer of `modules` as the module that has it and its name there."""
    return [(module, name) for module in modules for name, tensor in buffers(module).items() if tensor is not None]


@contextmanager
def buffers_replaced(owners: Sequence[Owner], contents: Sequence[Tensor]) -> Iterator[None]:
    """Make the modules in `owners` use `contents` as their buffers for a while."""
    own = [buffers(module)[name] for module, name in owners]
    for (module, name), replacement in zip(owners, contents, strict=True):
        buffers(module)[name] = replacement
    try:
        yield
    finally:
        for (module, name), tensor in zip(owners, own, strict=True):
            buffers(module)[name] = tensor


def cloned(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of `tensors`; what is one tensor stays one."""
    copies: dict[int, Tensor] = {}
    return [copies.setdefault(id(tensor), tensor.detach().clone()) for tensor in tensors]


def autocast_now(devices_used: Iterable[torch.device]) -> Autocast:
    """Return which autocast modes are on, and their dtypes."""
    kinds = dict.fromkeys(["cpu", *(place.type for place in devices_used)])
    return tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)


@contextmanager
def autocast_as(state: Autocast) -> Iterator[None]:
    """Set autocast as in `state`, without its cache of converted weights.

    The cache would hand a weight that was converted in a run without gradients to one that needs them.
    """
    with ExitStack() as stack:
        for kind, enabled, dtype in state:
            if enabled or torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
        yield


_NORMS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)


def statistics_norms(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the normalisations that update running statistics in training but do not read them."""
    return [module for module in modules if type(module) in _NORMS and module.track_running_stats]


def track_statistics(norms: Sequence[nn.Module], on: bool) -> None:
    """Let `norms` update their statistics from now on, or not."""
    for module in norms:
        # `nn.Module.__setattr__` takes ten times as long.
        module.__dict__["track_running_stats"] = on
