"""Costs by running every distinct op of a program by itself on the real device.

An op allocates the same bytes whether it is run alone or inside a step, the first time or later, with gradients or
without; the number of threads changes it. That is why running ops one by one predicts a step's peak to the byte.
"""

from __future__ import annotations

import math
import time
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event
from typing import Any

import torch

from lowtide import device as devices
from lowtide.capture.fused_op import Call, in_sequence
from lowtide.costs.analytic import estimate
from lowtide.costs.cache import CostCache
from lowtide.costs.clock import OPS, seconds_of, wall_time
from lowtide.costs.collectives import communicates
from lowtide.costs.device_table import nearest
from lowtide.costs.op_signature import Calls, OpCost, signature, takes_graphs, target_name
from lowtide.errors import LowtideWarning, MeasureError
from lowtide.graph.costs import Costs
from lowtide.measure import run_with_peak
from lowtide.progress import Progress, silent
from lowtide.pytorch.nested import tensors_in, tree_leaves

# So many random numbers are drawn and then repeated: enough that no op sees a pattern, few enough to be drawn quickly.
_BLOCK = 1 << 16

# Positions of the weight and of the first of two saved statistics. With inputs of lower precision than the weight, as
# under autocast, the CPU saves them in the weight's dtype; the fake kernels say the input's, which backward refuses.
_STATISTICS: dict[Callable[..., Any], tuple[int, int]] = {
    torch.ops.aten.native_batch_norm_backward.default: (2, 5),
    torch.ops.aten.native_layer_norm_backward.default: (5, 3),
    torch.ops.aten.native_group_norm_backward.default: (4, 2),
}

# Ops that take as many numbers as a mask has places: the position of the mask, and how many numbers there are.
_MASKED: dict[Callable[..., Any], tuple[int, Callable[[Any], int]]] = {
    torch.ops.aten.masked_scatter.default: (1, lambda args: args[2].numel()),
    torch.ops.aten.masked_scatter_.default: (1, lambda args: args[2].numel()),
    torch.ops.aten.masked_scatter_backward.default: (1, lambda args: math.prod(args[2])),
}


def materialize(call: Call, truth: bool | None = None) -> Call:
    """Return `call` with real tensors of the same shapes, strides, dtypes and devices.

    An argument given twice is made once. Views of one storage become tensors of their own, no larger than the view.

    Args:
        call: The call.
        truth: What single booleans are, which choose between graphs; None if nothing depends on it.
    """
    made: dict[int, torch.Tensor] = {}
    if truth is not None:
        flags = [leaf for leaf in tree_leaves(call[1:]) if isinstance(leaf, torch.Tensor) and _is_flag(leaf)]
        made = {id(flag): torch.full(flag.shape, truth, dtype=torch.bool, device=flag.device) for flag in flags}
    if call[0] is not in_sequence:
        return _real_call(call, made)
    return in_sequence, tuple(_real_call(one, made) for one in call[1]), {}


def _is_flag(fake: torch.Tensor) -> bool:
    return fake.dtype == torch.bool and fake.numel() == 1


def _real_call(call: Call, made: dict[int, torch.Tensor]) -> Call:
    target, args, kwargs = call
    real = _with_true_dtypes(target, _real(tuple(args), made))
    _fit_mask(target, real)
    return target, real, _real(dict(kwargs), made)


def _fit_mask(target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Let a mask select as many places as there are numbers for, as it does in a step; fewer where it is expanded.

    It may be expanded already, and it is to the shape of what is written or read.
    """
    if target not in _MASKED:
        return
    position, count = _MASKED[target]
    mask = args[position]
    distinct = mask.as_strided((mask.untyped_storage().nbytes(),), (1,), 0)
    places = math.prod(torch.broadcast_shapes(args[0].shape, mask.shape))  # type: ignore[no-untyped-call]
    repeats = max(places // distinct.numel(), 1) if distinct.numel() else 1
    distinct.fill_(False)
    distinct[: count(args) // repeats] = True


def _with_true_dtypes(target: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return `args` with the dtypes that a real step has where PyTorch's fake kernels are known to differ."""
    weight, first = _STATISTICS.get(target, (0, 0))
    if not first or args[weight] is None or args[weight].device.type != "cpu":
        return args
    saved = (None if one is None else one.to(args[weight].dtype) for one in args[first : first + 2])
    return (*args[:first], *saved, *args[first + 2 :])


def _real(arg: Any, made: dict[int, torch.Tensor]) -> Any:
    if isinstance(arg, torch.Tensor):
        if id(arg) not in made:
            made[id(arg)] = _tensor(arg)
        return made[id(arg)]
    if isinstance(arg, tuple):
        return tuple(_real(item, made) for item in arg)
    if isinstance(arg, list):
        return [_real(item, made) for item in arg]
    if isinstance(arg, dict):
        return {key: _real(value, made) for key, value in arg.items()}
    if isinstance(arg, torch.SymInt | torch.SymFloat | torch.SymBool):
        raise MeasureError(f"argument {arg!r:.40} is not a plain value")
    return arg


def _tensor(fake: torch.Tensor) -> torch.Tensor:
    if fake.layout != torch.strided:
        raise MeasureError(f"layout {fake.layout} is not strided")
    sizes, strides = tuple(fake.shape), fake.stride()
    span = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) if fake.numel() else 0
    real = _filled(span, fake.dtype, fake.device).as_strided(sizes, strides)
    return real.conj() if fake.is_conj() else real


def _filled(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return `count` valid numbers; a random block is repeated, because drawing them all takes longer than most ops."""
    if not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool):
        return torch.zeros(count, dtype=dtype, device=device)
    block = torch.rand(min(count, _BLOCK), generator=torch.Generator().manual_seed(0), device="cpu")
    # The comparison keeps booleans mixed; the range keeps 16- and 8-bit floats away from 0 and 1. In place, because
    # an op that is measured must not take more memory than it takes in the step.
    block = block > 0.5 if dtype == torch.bool else block.mul_(0.8).add_(0.1).to(dtype)
    block = block.to(device)
    if count <= _BLOCK:
        return block
    filled = torch.empty(count, dtype=dtype, device=device)
    whole = count // _BLOCK * _BLOCK
    filled[:whole].view(-1, _BLOCK).copy_(block)
    filled[whole:].copy_(block[: count - whole])
    return filled


_FREE = OpCost(0.0, 0)


def measure_costs(program: Calls, *, progress: Progress = silent, cache: bool = True) -> Costs:
    """Return the measured costs of every op of `program`.

    Ops are run one at a time on made-up data, each distinct one a few times; the shortest time counts. The user's
    random numbers, gradients and modes are left alone. Where a recomputation calls something else than the first run,
    the larger workspace counts.

    Args:
        program: The captured program.
        progress: Is told what is being measured.
        cache: Whether to use and fill the cache on disk.
    """
    ops = range(len(program.graph.ops))
    calls: dict[str, Call] = {}
    firsts = [_enter(program.call(op), calls) for op in ops]
    replays = [_enter(program.replay_call(op), calls) for op in ops]
    table = _look_up(calls, Counter(firsts), program.device, progress, cache)
    runs = [(table.get(first, _FREE), table.get(replay, _FREE)) for first, replay in zip(firsts, replays, strict=True)]
    return Costs(
        seconds=tuple(first.seconds for first, _ in runs),
        workspace_bytes=tuple(max(first.workspace_bytes, replay.workspace_bytes) for first, replay in runs),
        source=f"measured on {devices.describe(program.device)}",
    )


def _enter(call: Call | None, calls: dict[str, Call]) -> str:
    """Return the signature of `call` after adding it to `calls`; that of an op which runs nothing is empty."""
    if call is None:
        return ""
    key = signature(call)
    calls.setdefault(key, call)
    return key


def _look_up(
    calls: dict[str, Call], counts: Counter[str], device: torch.device, progress: Progress, cache: bool
) -> dict[str, OpCost]:
    store = CostCache(devices.describe(device)) if cache else None
    remote = {key: estimate(call, nearest(device)) for key, call in calls.items() if communicates(call)}
    stored = {} if store is None else {key: cost for key in calls if (cost := store.get(key)) is not None}
    known = stored | remote
    missing = {key: call for key, call in calls.items() if key not in known}
    fresh: dict[str, OpCost] = {}
    failures: dict[str, str] = {}
    try:
        if missing:
            _measure_in_thread(missing, counts, device, progress, fresh, failures)
    finally:
        if store is not None:
            store.add(fresh)
    _warn(failures, calls)
    return {**known, **fresh, **{key: estimate(calls[key], nearest(device)) for key in failures}}


def _measure_in_thread(
    calls: dict[str, Call],
    counts: Counter[str],
    device: torch.device,
    progress: Progress,
    found: dict[str, OpCost],
    failures: dict[str, str],
) -> None:
    """Fill `found` and `failures` in a thread of its own.

    Gradient mode, autocast, dispatch modes, default devices and profilers belong to a thread: in a new one ops run as
    they will in the planned graph, whatever the caller is in the middle of.
    """
    kept = [(place, devices.get_rng_state(place)) for place in {torch.device("cpu"), device}]
    stop = Event()
    try:
        with ThreadPoolExecutor(1, "lowtide-measure") as pool:
            try:
                pool.submit(_measure_all, calls, counts, device, progress, found, failures, stop).result()
            finally:
                stop.set()
    finally:
        for place, state in kept:
            devices.set_rng_state(state, place)


def _measure_all(
    calls: dict[str, Call],
    counts: Counter[str],
    device: torch.device,
    progress: Progress,
    found: dict[str, OpCost],
    failures: dict[str, str],
    stop: Event,
) -> None:
    enough = min(OPS.repeats.seconds, OPS.program_seconds / len(calls)) / OPS.sweeps
    until = math.inf
    for sweep in range(OPS.sweeps):
        keys = list(calls) if sweep == 0 else _dearest(found, counts)
        for number, key in enumerate(keys, start=1):
            if stop.is_set() or time.monotonic() > until:
                return
            call = calls[key]
            progress(f"measuring op {number} of {len(keys)}{' again' * sweep}: {target_name(call[0])}")
            known = found.get(key)
            try:
                cost = _measure(call, device, enough, known)
            except Exception as error:  # An op run out of its context may raise anything; each failure is reported.
                failures[key] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
                found.pop(key, None)
            else:
                found[key] = cost
        until = min(until, time.monotonic() + OPS.again_seconds)


def _dearest(found: dict[str, OpCost], counts: Counter[str]) -> list[str]:
    """Return the ops that take a part of the step worth knowing, those first that take most of it."""
    taken = {key: max(counts[key], 1) * cost.seconds for key, cost in found.items()}
    least = OPS.share * sum(taken.values())
    return sorted((key for key in taken if taken[key] >= least), key=lambda key: -taken[key])


def _measure(call: Call, device: torch.device, enough: float, known: OpCost | None = None) -> OpCost:
    """Return the cost of one call, timed for `enough` seconds; of what is `known` only the time is measured again.

    Where booleans choose between graphs, the more expensive choice counts.
    """
    choices = (True, False) if takes_graphs(call) else (None,)
    found = [_measure_choice(materialize(call, choice), device, enough, known) for choice in choices]
    return OpCost(max(cost.seconds for cost in found), max(cost.workspace_bytes for cost in found))


def measure_workspace(call: Call, device: torch.device) -> int:
    """Return the bytes that one call allocates inside, beyond its results; it is run once, on made-up data.

    The user's random numbers and modes are left alone, as in `measure_costs`.
    """

    @torch.no_grad()
    def measure() -> int:
        target, args, kwargs = materialize(call)
        return _workspace_bytes(lambda: target(*args, **kwargs), (args, kwargs), device)

    kept = devices.get_rng_state(device)
    try:
        with ThreadPoolExecutor(1, "lowtide-measure") as pool:
            return pool.submit(measure).result()
    finally:
        devices.set_rng_state(kept, device)


@torch.no_grad()
def _measure_choice(call: Call, device: torch.device, enough: float, known: OpCost | None) -> OpCost:
    target, args, kwargs = call

    def run() -> Any:
        return target(*args, **kwargs)

    times: list[float] = []
    if known is None:
        workspace_bytes = _workspace_bytes(lambda: _timed(run, device, times), (args, kwargs), device)
    else:
        workspace_bytes = known.workspace_bytes
    # What is recorded takes some microseconds longer.
    if not times or times[0] < OPS.long_seconds:
        times = [seconds_of(run, device)]
    brief, long = replace(OPS.repeats, seconds=enough), replace(OPS.repeats, seconds=OPS.patience * enough)
    while (brief if OPS.agree(times) else long).wants_more(len(times), sum(times)):
        times.append(seconds_of(run, device))
    return OpCost(min(times) if known is None else min(known.seconds, *times), workspace_bytes)


def _timed(run: Callable[[], Any], device: torch.device, times: list[float]) -> Any:
    """Return the result of `run()`; its time is added to `times`."""
    start = wall_time(device)
    result = run()
    times.append(wall_time(device) - start)
    return result


def _workspace_bytes(run: Callable[[], Any], inputs: Any, device: torch.device) -> int:
    """Return the highest bytes allocated during `run()` less those of the storages it leaves behind as results."""
    before = {tensor.untyped_storage().data_ptr() for tensor in tensors_in(inputs)}
    result, peak = run_with_peak(run, device)
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors_in(result)}
    left = sum(
        devices.round_bytes(tensor.untyped_storage().nbytes(), device)
        for pointer, tensor in storages.items()
        if pointer not in before and tensor.device.type == device.type
    )
    return max(0, peak - left)


def _warn(failures: dict[str, str], calls: dict[str, Call]) -> None:
    if not failures:
        return
    reasons = {target_name(calls[key][0]): reason for key, reason in failures.items()}
    listed = "; ".join(f"{name} ({reason})" for name, reason in reasons.items())
    warnings.warn(
        f"{len(failures)} of {len(calls)} distinct ops could not be run by themselves, so their time is estimated and "
        f"their temporaries may be missed: {listed}. The measured peak may exceed the planned one by these.",
        LowtideWarning,
        stacklevel=4,
    )
