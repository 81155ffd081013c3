"""Chen et al. 2016: the deep ResNet and the unrolled LSTM under every strategy of the paper, in memory and time.

The paper prints few figures: 48 GB become 7 GB for 1,000 layers at about 30 % more time, system optimisations save a
factor of 2 to 3, the LSTM's plan saves a factor of more than 4. Its curves are pictures. The other figures that ours
are compared with were worked out independently of this program, on networks described in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from lowtide.plan.core.planner import AbstractPlanner
from lowtide.plan.core.problem import Problem
from lowtide.plan.planners.chen_greedy import ChenGreedy, Segments, code_budgets, greedy_segments, paper_budgets
from lowtide.plan.planners.chen_recursive import ChenRecursive
from lowtide.plan.planners.chen_sqrt import ChenSqrt
from lowtide.plan.planners.greedy import Greedy
from lowtide.plan.planners.hong_linear import HongLinear
from lowtide.progress import Progress, silent
from lowtide.reproduce.chen_networks import Network, lstm, resnet
from lowtide.reproduce.page import Page, Row
from lowtide.schedule.arena import Reuse, arena_bytes
from lowtide.schedule.mirror import mirror
from lowtide.schedule.simulate import simulate
from lowtide.schedule.steps import Schedule

_GIB = 2**30
_MIB = 2**20
_DROPPED = ("aten.native_batch_norm.default", "aten.leaky_relu.default")
_HEADLINE_BYTES = 7 * 10**9
_LSTM_GAIN = 4
_QUICK_OPS = 30_000
_FOR_GROWTH = 3

_NONE, _IN_PLACE, _SHARING = "no optimisation", "in-place", "sharing"
_DROP = "normalisations and activations dropped"
_PAPER, _CODE = "sublinear, paper's search", "sublinear, program's search"

# For each ResNet, by blocks in its stages, GiB of these strategies, worked out independently of this program.
_ORDER = (_NONE, _IN_PLACE, _SHARING, _DROP, _PAPER, _CODE)
STAGES: dict[tuple[int, ...], tuple[float, ...]] = {
    (3, 4, 23, 3): (13.83, 9.95, 5.14, 3.95, 1.37, 1.29),
    (3, 8, 36, 3): (19.36, 13.97, 7.15, 5.58, 1.79),
    (3, 24, 36, 3): (27.78, 20.09, 10.21, 8.07, 2.20, 1.79),
    (8, 61, 91, 8): (67.65, 49.09, 24.71, 19.85, 3.37),
    (15, 121, 182, 15): (131.47, 95.51, 47.92, 38.71, 4.75, 4.04),
}
_DEEPEST = "ResNet, 1001 layers"
_PUBLISHED = {
    _SHARING: (48.0, "the paper does not say which strategy needs its 48 GB; this is the one that does"),
    _PAPER: (7.0, "the paper says less than 7 GB; that is probably all of the GPU's memory, parameters included"),
    _CODE: (7.0, "as above; the search of the authors' program finds better segments than the paper's"),
}
STEPS = (64, 128, 256, 512, 1024, 2048)
_OTHERS: dict[str, AbstractPlanner] = {
    "chen_sqrt": ChenSqrt(),
    "chen_recursive, k = 1": ChenRecursive(k=1, depth=-1),
    "chen_greedy": ChenGreedy(),
    "hong_linear": HongLinear(),
    "greedy": Greedy(effort=0.5),
}
_SLOW = ("greedy",)
_SMALL_OPS = 2_000
_TIME_NOTE = "the paper measured it on a Titan X; ours is estimated for that device"
_REMARKS = (
    "Bytes are those of a static allocator that gives every feature map and gradient a buffer before the step runs: no "
    "parameters, no workspace, as in the paper. GiB; the paper's GB may be either.",
    "ResNet: batch 32, 224 x 224 images; four stages of bottleneck blocks, convolution, normalisation and leaky ReLU "
    "everywhere. The paper does not say how its blocks are spread over the stages; the ratio of the authors' published "
    "200-layer example is kept.",
    "LSTM: 4 layers of 1,024, batch 64, 50 inputs, a softmax over 5,000 classes at each step. Each step has its own "
    "gradient of the weights; in place, they are added up in one buffer, which is why that saves so much here.",
    "The paper's curves are pictures without figures. Their axes end at 256 GB for the ResNet and 512 GB for the LSTM.",
    "Extra time is estimated for the paper's GeForce GTX Titan X by arithmetic and memory traffic. Recomputing all "
    "once costs the share of the forward pass. By this estimate it is 36 % of a step and not 30 %: normalisations, "
    "activations and gates take less than twice as long backward as forward. So the paper's own plans come out at 33 "
    "to 36 %, above the 30 % that it measured.",
    "Rows that keep the most expensive results are not the paper's: they spend the memory between its plan and the "
    "published figure on what costs most seconds per byte to recompute.",
    "The LSTM's loss follows the authors' example in using a cross entropy whose gradient reads the scores; with a "
    "softmax as output, the scores of all steps would be outputs and grow with the length under every plan.",
    "The program's search beats the paper's on every ResNet; on LSTMs of 256 steps and more it is the other way round.",
    "Rows of other planners are made for the simulated peak of the program's sublinear plan; chen_sqrt knows no budget "
    "and exceeds it. Static buffers cannot be split, so they need more than what is alive at once, and plans made for "
    "what is alive may need more static buffers than the program's plan. greedy is left out above 2,000 ops, where it "
    "takes minutes.",
)


def footprint(network: Network, schedule: Schedule, reuse: Reuse = Reuse.SHARING) -> int:
    """Return the bytes of feature maps and gradients under a static allocator: the paper's measure."""
    return arena_bytes(network.graph, schedule, reuse, in_place=network.in_place)


def extra_time(network: Network, schedule: Schedule) -> float:
    """Return the seconds that `schedule` takes beyond plain training, as a share of plain training."""
    return simulate(network.graph, network.costs, schedule).seconds / network.costs.total_seconds - 1


def drop_normalisation(network: Network) -> Schedule:
    """Return the schedule that recomputes normalisations and activations and keeps everything else."""
    ops = network.graph.ops
    return mirror(network.graph, {op: 1 for op in network.graph.forward if ops[op].target in _DROPPED})


def sublinear(network: Network, search: str = "code") -> tuple[Schedule, Segments]:
    """Return the paper's sublinear plan: of the segments at all budgets tried, those with the least footprint.

    Args:
        network: The network; its groups say where segments may end.
        search: "paper" for the budgets of the appendix, "code" for those of the authors' program.
    """
    forward = network.graph.forward
    flags = [op in network.groups for op in forward]
    groups = [network.groups.get(op, -1) for op in forward]
    cut = partial(greedy_segments, network.sizes, flags, groups=groups)
    budgets = paper_budgets(cut) if search == "paper" else code_budgets(cut, _MIB)
    plans = {segments.mirrors: segments for segments in map(cut, budgets)}
    priced = [(mirror(network.graph, dict(enumerate(plan.mirrors))), plan) for plan in plans.values()]
    return min(priced, key=lambda pair: footprint(network, pair[0]))


def keep_expensive(network: Network, segments: Segments, limit_bytes: int) -> Schedule:
    """Return the plan of `segments` with what costs most seconds per byte kept as well, while it fits the limit.

    What follows the last border comes first: backward begins there, so recomputing it frees nothing.
    """
    graph, costs, sizes = network.graph, network.costs, network.sizes
    border = max((op for op, count in enumerate(segments.mirrors) if not count), default=-1)
    dropped = [op for op in range(border) if segments.mirrors[op] and sizes[op]]
    dropped.sort(key=lambda op: costs.seconds[op] / sizes[op], reverse=True)

    def keeping(number: int) -> Schedule:
        return mirror(graph, dict.fromkeys(dropped[number:], 1))

    low, high = 0, len(dropped)
    while low < high:
        middle = (low + high + 1) // 2
        if footprint(network, keeping(middle)) <= limit_bytes:
            low = middle
        else:
            high = middle - 1
    return keeping(low)


def page(*, only: Sequence[str] = (), graphs: Path | None = None, progress: Progress = silent) -> Page:
    """Return the page for the networks in `only`, such as "resnet1001", "lstm64" or all of "lstm"; for all by default.

    Args:
        only: The networks.
        graphs: Not used, for the authors published no graphs.
        progress: Receives a line of text now and then.
    """
    del graphs
    return reproduce(
        progress,
        stages=[depths for depths in STAGES if _wanted("resnet", _layers(depths), only)],
        steps=[length for length in STEPS if _wanted("lstm", length, only)],
    )


def _wanted(kind: str, size: int, only: Sequence[str]) -> bool:
    return not only or kind in only or f"{kind}{size}" in only


def _layers(depths: Sequence[int]) -> int:
    return 3 * sum(depths) + 2


def reproduce(
    progress: Progress = silent,
    *,
    stages: Iterable[tuple[int, ...]] = tuple(STAGES),
    steps: Sequence[int] = STEPS,
) -> Page:
    """Return the page: ResNets by depth, LSTMs by length, every strategy; minutes, most of them for long LSTMs.

    Args:
        progress: Receives a line of text now and then.
        stages: Blocks in the stages of each ResNet, shallow ones first.
        steps: Lengths of the LSTM, short ones first.
    """
    rows: list[Row] = []
    figures: list[_Figures] = []
    for depths in stages:
        progress(f"ResNet with {sum(depths)} blocks")
        network = resnet(depths)
        figures.append(_Figures(network, _layers(depths)))
        rows += _resnet_rows(figures[-1], dict(zip(_ORDER, STAGES.get(depths, ()), strict=False)))
    rows += _growth_rows("ResNet, layers", figures, (_SHARING, _PAPER, _CODE))
    figures = []
    for length in steps:
        progress(f"LSTM with {length} steps")
        figures.append(_Figures(lstm(length), length))
        rows += _lstm_rows(figures[-1])
    rows += _growth_rows("LSTM, steps", figures, (_SHARING, _PAPER, _CODE))
    title = "Chen, Xu, Zhang, Guestrin 2016: training deep nets with sublinear memory cost"
    return Page(title=title, rows=tuple(rows), remarks=_REMARKS)


class _Figures:
    """A network's plans and their footprints, by strategy."""

    def __init__(self, network: Network, length: int) -> None:
        self.network, self.length = network, length
        plain = Schedule.keep_all(network.graph)
        self.gib = {
            name: footprint(network, plain, reuse) / _GIB
            for name, reuse in ((_NONE, Reuse.NONE), (_IN_PLACE, Reuse.IN_PLACE), (_SHARING, Reuse.SHARING))
        }
        self.plans: dict[str, Schedule] = {}
        for name, search in ((_PAPER, "paper"), (_CODE, "code")):
            self.plans[name], self.segments = sublinear(network, search)
            self.gib[name] = footprint(network, self.plans[name]) / _GIB

    def row(self, quantity: str, ours: float, unit: str, published: float | None = None, note: str = "") -> Row:
        return Row(self.network.name, quantity, published, ours, unit, note)

    def time_row(self, name: str, schedule: Schedule, published: float | None = None, note: str = "") -> Row:
        return self.row(f"extra time, {name}", 100 * extra_time(self.network, schedule), "%", published, note)


def _resnet_rows(figures: _Figures, expected: Mapping[str, float]) -> list[Row]:
    network, deepest = figures.network, figures.network.name == _DEEPEST
    dropped = drop_normalisation(network)
    figures.gib[_DROP] = footprint(network, dropped) / _GIB
    rows = []
    for name in _ORDER:
        published, why = _PUBLISHED.get(name, (None, "")) if deepest else (None, "")
        independent = f"worked out independently: {expected[name]:.2f}" if name in expected else ""
        note = "; ".join(part for part in (why or "no published figure", independent) if part)
        rows.append(figures.row(name, figures.gib[name], "GiB", published, note))
    ratio = figures.gib[_NONE] / figures.gib[_SHARING]
    rows.append(
        figures.row("no optimisation / sharing", ratio, "times", 2.0, "the lower end of the paper's 2 to 3 times")
    )
    rows.append(figures.time_row(_DROP, dropped, note="no published figure"))
    for name, plan in figures.plans.items():
        rows.append(figures.time_row(name, plan, *((30.0, _TIME_NOTE) if deepest else (None, "no published figure"))))
    return rows + (_headline_rows(figures) if deepest else []) + _other_rows(figures)


def _headline_rows(figures: _Figures) -> list[Row]:
    """Return what our plan makes of the paper's 7 GB, and what the parameters add to its own."""
    network = figures.network
    plan = keep_expensive(network, figures.segments, _HEADLINE_BYTES)
    name = "sublinear, most expensive results kept within 7 GB"
    weights = 2 * network.parameter_bytes / _GIB
    note = "the program's segments; what costs most seconds per byte to recompute is kept while 7e9 bytes allow"
    return [
        figures.row(name, footprint(network, plan) / _GIB, "GiB", 7.0, note),
        figures.time_row(name, plan, 30.0, "as above"),
        figures.row(
            f"{_CODE}, with parameters and their gradients",
            figures.gib[_CODE] + weights,
            "GiB",
            7.0,
            f"{weights:.2f} GiB on top; workspace and the framework's own memory would come on top as well",
        ),
    ]


def _other_rows(figures: _Figures) -> list[Row]:
    network = figures.network
    peak = simulate(network.graph, network.costs, figures.plans[_CODE]).peak_bytes
    problem = Problem(network.graph, network.costs, peak)
    rows = []
    for name, planner in _OTHERS.items():
        if name in _SLOW and len(network.graph.ops) > _SMALL_OPS:
            continue
        schedule = planner.propose(problem).schedule
        live = problem.price(schedule).peak_bytes / _GIB
        note = f"no published figure; at most {live:.2f} GiB alive at once, {peak / _GIB:.2f} in the program's plan"
        rows.append(figures.row(name, footprint(network, schedule) / _GIB, "GiB", note=note))
        rows.append(figures.time_row(name, schedule, note="no published figure"))
    return rows


def _lstm_rows(figures: _Figures) -> list[Row]:
    network, gib = figures.network, figures.gib
    rows = [figures.row(name, gib[name], "GiB", note="no published figure") for name in _ORDER if name in gib]
    for name, plan in figures.plans.items():
        note = "the paper says more than 4 times; gradients of the weights are part of it and do not shrink"
        rows.append(figures.row(f"sharing / {name}", gib[_SHARING] / gib[name], "times", float(_LSTM_GAIN), note))
        rows.append(figures.time_row(name, plan, 30.0, _TIME_NOTE))
    if len(network.graph.ops) <= _QUICK_OPS:
        plan = keep_expensive(network, figures.segments, int(gib[_SHARING] * _GIB / _LSTM_GAIN))
        name = "sublinear, most expensive results kept within a quarter of sharing"
        rows.append(figures.row(name, footprint(network, plan) / _GIB, "GiB", note="no published figure"))
        rows.append(figures.time_row(name, plan, 30.0, "as above"))
    return rows


def _growth_rows(network: str, figures: Sequence[_Figures], names: Iterable[str]) -> list[Row]:
    """Return the exponents by which footprints grow, from the third longest network to the longest."""
    if len(figures) < _FOR_GROWTH:
        return []
    short, long = figures[-_FOR_GROWTH], figures[-1]
    rows = []
    for name in names:
        exponent = math.log(long.gib[name] / short.gib[name]) / math.log(long.length / short.length)
        published = 1.0 if name == _SHARING else 0.5
        note = f"from {short.length} to {long.length}; the paper proves the exponent for uniform chains"
        rows.append(Row(network, f"growth exponent, {name}", published, exponent, "", note))
    return rows
