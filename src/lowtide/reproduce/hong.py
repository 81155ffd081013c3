"""Hong et al. 2025 on VGG-19 and uniform chains: plans, their values in every model, and planning time.

VGG-19 is also captured as PyTorch trains it, where the planners' schedules have their true peak.

The abstract is all of the paper that could be had, and it has no figures. The values beside ours are those that follow
from its recurrences, worked out independently of this program and checked by trying every plan of small chains.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from lowtide.plan.core.problem import Problem
from lowtide.plan.planners.hong_cubic import cubic_checkpoints, cubic_cost
from lowtide.plan.planners.hong_linear import linear_checkpoints, linear_peak
from lowtide.plan.solve import solve
from lowtide.progress import Progress, silent
from lowtide.reproduce.networks import captured
from lowtide.reproduce.page import Page, Row

_MIB = 2**20
_BATCH = 64
_STAGES = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))
_NETWORK = f"VGG-19, batch {_BATCH}"
_EVERY = tuple(range(1, 24))
# For every plan: the values of model A with gradient buffer, of model B, and of the event simulations without and with
# the recomputation of a segment's last output, all in MiB.
_EXPECTED: dict[str, tuple[tuple[int, ...], tuple[int, int, int, int]]] = {
    "no checkpoint": ((), (4786, 4786, 4067, 4067)),
    "every layer": (_EVERY, (4003, 4024, 4024, 4067)),
    "every fourth layer": ((4, 8, 12, 16), (3258, 2940, 3136, 3136)),
    "best of model A, outputs": ((3, 6), (2646, 2548, 3136, 3136)),
    "best of model A, gradient": ((3, 11), (2597, 2548, 3136, 3136)),
    "best of model B": ((2, 4, 6, 9, 11, 14, 16, 19, 21, 22), (3241, 2352, 2352, 3136)),
}
_UNIFORM = {10**3: 47, 10**4: 143, 10**5: 449}
_TIMED = (10**4, 10**5, 10**6)
_REPEATS = 3
_CAPTURED = (
    "no published figure; the simulated peak of the captured step, with parameter gradients and the indices of pools "
    "and without workspace; overhead by analytic costs of a Tesla K40c"
)
_DERIVED = "no published figure; the recurrence gives"


def vgg19_sizes(batch: int = _BATCH) -> list[int]:
    """Return the bytes of VGG-19's input, which is not counted, and of its 24 layers, ReLU included."""
    sizes, side = [0], 224
    for channels, convolutions in _STAGES:
        sizes += [4 * batch * channels * side * side] * convolutions
        side //= 2
        sizes.append(4 * batch * channels * side * side)
    return [*sizes, 4 * batch * 4096, 4 * batch * 4096, 4 * batch * 1000]


def event_peak(
    sizes: Sequence[int],
    checkpoints: Collection[int],
    inside: Sequence[int] | None = None,
    *,
    recompute_output: bool = False,
    loss_gradient: bool = False,
) -> int:
    """Return the peak of one training step, found by allocating and freeing every buffer in turn.

    Args:
        sizes: Bytes of the chain's input and of every layer's output.
        checkpoints: Layers whose output is kept.
        inside: Bytes inside every layer that exist only while its segment is materialised; none by default.
        recompute_output: True if the output at the end of a segment is recomputed too.
        loss_gradient: True if the last layer's output and its gradient are there together when backward begins.
    """
    n = len(sizes) - 1
    within = inside or [0] * (n + 1)
    memory = _Memory()
    memory.allocate(("output", 0), sizes[0])
    for k in range(1, n + 1):
        memory.allocate(("inside", k), within[k])
        memory.allocate(("output", k), sizes[k])
        memory.free(("inside", k))
        if k - 1 and k - 1 not in checkpoints:
            memory.free(("output", k - 1))
    if not loss_gradient:
        memory.free(("output", n))
    memory.allocate(("gradient", n), sizes[n])
    memory.free(("output", n))
    borders = [0, *sorted(set(checkpoints) - {0, n}), n]
    for left, right in zip(reversed(borders[:-1]), reversed(borders[1:]), strict=True):
        for k in range(left + 1, right + 1):
            memory.allocate(("inside", k), within[k])
            if k < right or recompute_output:
                memory.allocate(("output", k), sizes[k])
        for k in range(right, left, -1):
            memory.allocate(("gradient", k - 1), sizes[k - 1])
            for buffer in ("gradient", "output", "inside"):
                memory.free((buffer, k))
        memory.free(("output", left))
    return memory.peak


class _Memory:
    """Buffers by name; freeing one that is not there does nothing."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, int], int] = {}
        self._used = self.peak = 0

    def allocate(self, buffer: tuple[str, int], size: int) -> None:
        self._buffers[buffer] = size
        self._used += size
        self.peak = max(self.peak, self._used)

    def free(self, buffer: tuple[str, int]) -> None:
        self._used -= self._buffers.pop(buffer, 0)


def page(*, only: Sequence[str] = (), graphs: Path | None = None, progress: Progress = silent) -> Page:
    """Return the page: plans and values on VGG-19, the square-root law, and planning seconds.

    Args:
        only: Of "vgg19" and "uniform", those to show; both by default.
        graphs: Not used, for the authors published no graphs.
        progress: Receives a line of text now and then.
    """
    del graphs
    parts: tuple[tuple[str, str, Callable[[], list[Row]]], ...] = (
        ("vgg19", "plans of VGG-19", _plan_rows),
        ("vgg19", "values of the plans of VGG-19", _value_rows),
        ("vgg19", "VGG-19 as PyTorch trains it", _captured_rows),
        ("uniform", "uniform chains", _uniform_rows),
        ("uniform", "planning time", _time_rows),
    )
    rows: list[Row] = []
    for name, message, rows_of in parts:
        if not only or name in only:
            progress(message)
            rows += rows_of()
    return Page(
        title="Hong, Tsai, Wang, Liu, Wu 2025: GPU memory usage optimization for backward propagation",
        rows=tuple(rows),
        remarks=(
            "Only the abstract of the paper was available; it states the two problems and their complexity, O(n^3) and "
            "O(n), and no figures. The figures in the notes follow from its recurrences.",
            "VGG-19 at 224 x 224 in 32-bit floats, each convolution with its ReLU one layer, pools and fully connected "
            "layers one each: 24 layers, 4,002 MiB of outputs. The batch itself is not counted.",
            "Model A counts all checkpoints during the whole of backward; model B frees each as backward passes it. "
            "The event simulation allocates and frees outputs and gradients one by one.",
            "The C++ program published by a co-author returned the cost without any checkpoint plus one buffer on all "
            "400 random chains it was tried on, so it cannot serve as a reference.",
        ),
    )


def _plan_rows() -> list[Row]:
    sizes = vgg19_sizes()
    plans = {
        "best of model A, outputs": cubic_checkpoints(sizes, cost="outputs"),
        "best of model A, gradient": cubic_checkpoints(sizes, cost="gradient"),
        "best of model B": linear_checkpoints(sizes, cost="buffer"),
    }
    expected = (1862, 2597, 2352)
    rows = []
    for (name, (checkpoints, value)), figure in zip(plans.items(), expected, strict=True):
        same = "the same plan" if checkpoints == _EXPECTED[name][0] else "another plan of equal value"
        note = f"{_DERIVED} {figure} with {_listed(_EXPECTED[name][0])}; {same}: {_listed(checkpoints)}"
        rows.append(Row(_NETWORK, name, None, value / _MIB, "MiB", note))
    for cost in ("exact", "exact_output"):
        checkpoints, value = linear_checkpoints(sizes, cost=cost)
        note = f"no published figure; plan {_listed(checkpoints)}"
        rows.append(Row(_NETWORK, f"best of model B, {cost}", None, value / _MIB, "MiB", note))
    return rows


def _value_rows() -> list[Row]:
    sizes = vgg19_sizes()
    rows = []
    for name, (checkpoints, figures) in _EXPECTED.items():
        values = (
            cubic_cost(sizes, checkpoints, cost="gradient"),
            linear_peak(sizes, checkpoints, cost="buffer"),
            event_peak(sizes, checkpoints),
            event_peak(sizes, checkpoints, recompute_output=True),
        )
        models = ("model A, gradient", "model B", "events", "events, segment output recomputed")
        for model, value, figure in zip(models, values, figures, strict=True):
            rows.append(Row(_NETWORK, f"{name}: {model}", None, value / _MIB, "MiB", f"{_DERIVED} {figure}"))
    return rows


def _captured_rows() -> list[Row]:
    """Return the true peaks and overheads of the paper's planners and of others on the captured training step."""
    step = captured("vgg19", batch=_BATCH)
    network = f"{_NETWORK}, PyTorch"
    least = Problem(step.graph, step.costs, 1)
    plans = {name: solve(least, name, throw=False) for name in ("keep_all", "hong_cubic", "hong_linear", "chen_sqrt")}
    same = Problem(step.graph, step.costs, plans["hong_linear"].peak_bytes)
    plans |= {f"{name} at hong_linear's peak": solve(same, name, throw=False) for name in ("greedy", "auto")}
    rows = []
    for name, plan in plans.items():
        rows.append(Row(network, f"peak, {name}", None, plan.peak_bytes / _MIB, "MiB", _CAPTURED))
        if plan.num_recomputed:
            rows.append(Row(network, f"overhead, {name}", None, 100 * plan.overhead, "%", _CAPTURED))
    return rows


def _uniform_rows() -> list[Row]:
    rows = []
    for layers, figure in _UNIFORM.items():
        _, value = linear_checkpoints([1] * (layers + 1))
        note = f"{_DERIVED} {figure}; sqrt(2 n) = {(2 * layers) ** 0.5:.0f}, Chen's 2 sqrt(n) = {2 * layers**0.5:.0f}"
        rows.append(Row(f"uniform chain, {layers:,} layers", "best of model B", None, float(value), "layers", note))
    return rows


def _time_rows() -> list[Row]:
    rows = []
    before: float | None = None
    for layers in _TIMED:
        seconds = min(_planning_seconds(layers) for _ in range(_REPEATS))
        growth = "" if before is None else f"; {seconds / before:.1f} times the time of a tenth of the layers"
        note = f"the paper states O(n){growth}"
        rows.append(Row(f"uniform chain, {layers:,} layers", "planning, model B", None, seconds, "s", note))
        before = seconds
    return rows


def _planning_seconds(layers: int) -> float:
    sizes = [1] * (layers + 1)
    started = time.perf_counter()
    linear_checkpoints(sizes)
    return time.perf_counter() - started


def _listed(checkpoints: Sequence[int]) -> str:
    return ", ".join(map(str, checkpoints)) or "none"
