"""Will it fit: plans within the memory of a device, and the largest batch, on fake tensors."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lowtide.analysis.batch_search import BatchFit, Trial, search
from lowtide.costs.device_table import device_figures
from lowtide.device import round_bytes
from lowtide.distributed.expected_shards import shard_bytes
from lowtide.distributed.replicas import Replica, replica_of
from lowtide.errors import (
    InvalidBudgetError,
    InvalidInputError,
    InvalidModelError,
    LowtideError,
    LowtideWarning,
)
from lowtide.plan.core.account import MemoryAccount, OptimizerMemory, optimizer_memory, parse_memory
from lowtide.plan.core.parallel import Parallel
from lowtide.plan.core.result import Plan
from lowtide.plan.diagnose.infeasible import infeasible_memory
from lowtide.progress import ProgressLine
from lowtide.pytorch.fake_tensors import new_fake_mode
from lowtide.pytorch.nested import tensor_leaves
from lowtide.pytorch.storages import storage_key
from lowtide.runtime.dry_run import plan_call
from lowtide.runtime.model_plans import Session
from lowtide.runtime.other_processes import refuse_parallel
from lowtide.settings import Settings
from lowtide.step.peak import peak_facts
from lowtide.step.plan import StepPlan
from lowtide.units import Budget

# What the driver, its libraries and their handles take of an accelerator before the first tensor is made.
CONTEXT_BYTES = 2**30

Batch = tuple[tuple[Any, ...], dict[str, Any]]


def memory_of(memory: int | str | None, device: str | None) -> int:
    """Return the bytes there are for training: `memory`, or what the named device has for tensors."""
    if (memory is None) == (device is None):
        raise InvalidBudgetError(
            "Give memory= as a size or device= by name, one of them: "
            f"memory={memory!r} and device={device!r} were given."
        )
    if memory is not None:
        return parse_memory(memory)
    figures = device_figures(str(device))
    return figures.memory_bytes - (0 if figures.name == "cpu" else CONTEXT_BYTES)


def plan_within(
    model: Callable[..., Any], batch: Batch, settings: Settings, *, memory_bytes: int, optimizer: str | int
) -> Plan | StepPlan:
    """Return the plan with which training `model` on `batch` takes at most `memory_bytes`, optimizer and all.

    Settings bring everything but the budget, which is what the rest leaves.
    """
    refuse_parallel(model, settings)
    trial = attempt(model, batch, settings, memory_bytes=memory_bytes, optimizer=optimizer)
    if not trial.fits:
        raise infeasible_memory(trial.account, peak_facts(trial.plan), memory_bytes)
    return trial.plan


def largest_batch(
    model: Callable[..., Any],
    make_batch: Callable[[int], Any],
    settings: Settings,
    *,
    memory_bytes: int,
    optimizer: str | int,
    most: int,
) -> BatchFit:
    """Return the largest batch up to `most` with which training `model` takes at most `memory_bytes`."""
    # Fail at once if the optimizer is not known.
    optimizer_memory(optimizer, [], together=False)
    refuse_parallel(model, settings)
    with ProgressLine() as progress:

        def attempt_size(size: int) -> Trial:
            progress(f"planning for a batch of {size}")
            batch = batch_on_fakes(model, make_batch, size)
            trial = attempt(model, batch, settings, memory_bytes=memory_bytes, optimizer=optimizer)
            return replace(trial, batch=size)

        return search(attempt_size, memory_bytes, most=most)


def attempt(
    model: Callable[..., Any], batch: Batch, settings: Settings, *, memory_bytes: int, optimizer: str | int
) -> Trial:
    """Return what planning for `batch` gives: a plan that fits, or the one of least peak known."""
    account, update = account_without_step(model, batch, optimizer, settings.parallel)
    left = memory_bytes - account.resident_bytes
    account = replace(account, update_bytes=update.update_bytes)
    session = Session(replace(settings, budget=Budget(bytes=max(1, left))), over_budget=True)
    plan = plan_call(model, *batch, session)
    account = with_step(account, plan)
    return Trial(0, account.peak_bytes <= memory_bytes, replace(plan, account=account), account)


def plan_with_account(
    model: Callable[..., Any], batch: Batch, settings: Settings, *, optimizer: str | int
) -> Plan | StepPlan:
    """Return the plan within the budget in `settings`, with all that training takes besides."""
    refuse_parallel(model, settings)
    account, update = account_without_step(model, batch, optimizer, settings.parallel)
    plan = plan_call(model, *batch, Session(settings))
    return replace(plan, account=with_step(replace(account, update_bytes=update.update_bytes), plan))


def with_step(account: MemoryAccount, plan: Plan | StepPlan) -> MemoryAccount:
    """Return the account with the step that `plan` is of."""
    sharding = 0 if plan.account is None else plan.account.sharding_bytes
    return replace(account, step_bytes=plan.peak_bytes, sharding_bytes=sharding)


def account_without_step(
    model: Callable[..., Any], batch: Batch, optimizer: str | int, parallel: Parallel | None = None
) -> tuple[MemoryAccount, OptimizerMemory]:
    """Return what is there while `model` trains on `batch`, and what its optimizer needs; of each of all processes."""
    shards = 1 if parallel is None else parallel.shards
    modules = _modules_of(model)
    parameters = _distinct(parameter for module in modules for parameter in module.parameters())
    buffers = _distinct(buffer for module in modules for buffer in module.buffers())
    inputs = _distinct(tensor_leaves(batch))
    sizes = [_size(each) if shards == 1 else shard_bytes(each, shards) for each in parameters]
    trained = [size for size, parameter in zip(sizes, parameters, strict=True) if parameter.requires_grad]
    replica = replica_of(model) if isinstance(model, nn.Module) else None
    in_buckets = replica is not None and replica.keeps_views
    on_accelerator = any(parameter.device.type == "cuda" for parameter in parameters)
    memory = optimizer_memory(optimizer, trained, together=on_accelerator)
    account = MemoryAccount(
        parameter_bytes=sum(sizes),
        buffer_bytes=sum(map(_size, buffers)),
        batch_bytes=sum(map(_size, inputs)),
        optimizer_bytes=memory.state_bytes,
        gradient_bytes=0 if in_buckets else sum(trained),
        bucket_bytes=_bucket_bytes(replica, trained, parallel),
        ranks=0 if parallel is None else parallel.world_size,
    )
    return account, memory


def _bucket_bytes(replica: Replica | None, trained: Sequence[int], parallel: Parallel | None) -> int:
    """Return what buckets of gradients take, which are one copy of the gradients where hooks keep nothing beside it."""
    if replica is not None:
        return replica.bucket_bytes
    return 0 if parallel is None or parallel.is_sharded else sum(trained)


def batch_on_fakes(model: Callable[..., Any], make_batch: Callable[[int], Any], size: int) -> Batch:
    """Return the arguments that `make_batch(size)` makes, without their data where that can be avoided."""
    is_meta = any(parameter.is_meta for module in _modules_of(model) for parameter in module.parameters())
    where: contextlib.AbstractContextManager[Any] = torch.device("meta") if is_meta else new_fake_mode()
    try:
        with torch.random.fork_rng(), where:
            made = make_batch(size)
    except LowtideError:
        raise
    except Exception as error:  # whatever the user's function does with tensors that have no data
        # Not everything can be made of fakes: data from files or other libraries. Then the batch is a real one.
        made = _make_real_batch(make_batch, size)
        warnings.warn(
            f"make_batch does not work without data ({type(error).__name__}: {error}), so real batches are made. "
            "Make it of new tensors only, as torch.zeros(size, ...), to plan without their memory.",
            LowtideWarning,
            stacklevel=2,
        )
    return as_batch(made)


def as_batch(made: Any) -> Batch:
    """Return what a user's function gives for a call: a tuple of arguments, a dictionary, or one tensor."""
    if isinstance(made, torch.Tensor):
        return (made,), {}
    if isinstance(made, Mapping):
        return (), dict(made)
    if isinstance(made, Sequence) and not isinstance(made, str | bytes):
        return tuple(made), {}
    raise InvalidInputError(
        f"make_batch returned a {type(made).__name__}; it must return the model's arguments: a tuple, a dictionary of "
        "keyword arguments, or one tensor."
    )


def _make_real_batch(make_batch: Callable[[int], Any], size: int) -> Any:
    try:
        with torch.random.fork_rng():
            return make_batch(size)
    except Exception as error:
        raise InvalidInputError(f"make_batch({size}) failed with {type(error).__name__}: {error}") from error


def _modules_of(model: Callable[..., Any]) -> list[nn.Module]:
    """Return the modules that hold the parameters of `model`, which may be a function over them."""
    if isinstance(model, nn.Module):
        return [model]
    cells = getattr(model, "__closure__", None) or ()
    found = [cell.cell_contents for cell in cells if isinstance(_content(cell), nn.Module)]
    if not found:
        raise InvalidModelError(
            f"{getattr(model, '__name__', model)!r} is a function without an nn.Module in its closure, so its "
            "parameters cannot be counted. Pass the module, or a function defined where it is a local variable."
        )
    return found


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return None


def _distinct(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return one tensor of each storage."""
    found: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        found.setdefault(storage_key(tensor), tensor)
    return list(found.values())


def _size(tensor: torch.Tensor) -> int:
    number = tensor.untyped_storage().nbytes()
    return number if tensor.device.type not in ("cpu", "cuda") else round_bytes(number, tensor.device)
