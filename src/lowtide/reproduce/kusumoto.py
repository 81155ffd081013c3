"""Kusumoto et al. 2019: the least memory of seven networks, with lower sets and with other plans.

The authors measured the most bytes in use of Chainer's memory pool: activations, their gradients, parameters, their
gradients, inputs, and what functions hold inside. Ours is the simulated peak of the captured step, in which gradients
of parameters stay to its end, plus parameters and inputs. GB are 1e9 bytes, as in their script.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lowtide.graph.costs import Costs
from lowtide.graph.ir import Graph
from lowtide.plan import registry
from lowtide.plan.core.planner import AbstractPlanner
from lowtide.plan.core.problem import Problem
from lowtide.plan.core.result import Plan
from lowtide.plan.planners.chen_sqrt import ChenSqrt
from lowtide.plan.planners.kusumoto import Kusumoto
from lowtide.plan.planners.kusumoto_exact import KusumotoExact
from lowtide.plan.planners.kusumoto_lower_sets.budget import minimum_budget
from lowtide.plan.planners.kusumoto_lower_sets.family import Family, all_lower_sets, pruned_lower_sets
from lowtide.plan.planners.kusumoto_lower_sets.program import solve as solve_program
from lowtide.plan.planners.kusumoto_lower_sets.transitions import transitions_of
from lowtide.plan.solve import solve
from lowtide.progress import Progress, silent
from lowtide.reproduce.chainer_graphs import ChainerGraph, read_chainer_graph
from lowtide.reproduce.networks import captured
from lowtide.reproduce.page import Page, Row

_GB = 1e9
_ANY = 1
# The planners besides the paper's that are asked for their least peak: that of `auto` is at best this one's.
_LOWEST = ("greedy",)


@dataclass(frozen=True, slots=True)
class Published:
    """A line of the paper's table, in GB, and the graph that the authors released.

    Attributes:
        network: The network and its batch.
        batch: The batch.
        file: Name of the released graph.
        file_batch: The batch in that graph.
        least: By column, the least memory that was reached.
        plain: Memory of plain training.
    """

    network: str
    batch: int
    file: str
    file_batch: int
    least: Mapping[str, float]
    plain: float


_COLUMNS = (
    "kusumoto, memory-centric",
    "kusumoto_exact, memory-centric",
    "chen_sqrt",
    "kusumoto, time-centric",
    "kusumoto_exact, time-centric",
)


def _line(network: str, batch: int, file: str, file_batch: int, figures: Sequence[float], plain: float) -> Published:
    return Published(network, batch, file, file_batch, dict(zip(_COLUMNS, figures, strict=True)), plain)


PUBLISHED: dict[str, Published] = {
    "pspnet": _line("PSPNet, batch 2", 2, "pspnet", 1, (2.7, 2.8, 4.0, 3.1, 3.2), 9.4),
    "unet": _line("U-Net, batch 8", 8, "unet", 8, (5.0, 4.7, 7.4, 6.7, 5.3), 9.1),
    "resnet50": _line("ResNet-50, batch 96", 96, "resnet50", 32, (3.4, 3.4, 3.7, 4.4, 4.3), 8.9),
    "resnet152": _line("ResNet-152, batch 48", 48, "resnet152", 32, (2.3, 2.3, 2.4, 2.5, 2.5), 9.2),
    "vgg19": _line("VGG-19, batch 64", 64, "vgg19", 32, (4.5, 4.5, 4.7, 5.5, 5.5), 7.0),
    "densenet161": _line("DenseNet-161, batch 32", 32, "densenet", 32, (1.6, 1.7, 1.8, 1.9, 1.8), 8.5),
    "googlenet": _line("GoogLeNet, batch 256", 256, "googlenet", 32, (5.2, 5.2, 6.5, 5.5, 5.5), 8.5),
}
_PLANNERS: dict[str, AbstractPlanner] = {
    "kusumoto, memory-centric": Kusumoto(strategy="memory"),
    "kusumoto_exact, memory-centric": KusumotoExact(strategy="memory"),
    "chen_sqrt": ChenSqrt(),
    "kusumoto, time-centric": Kusumoto(strategy="time"),
    "kusumoto_exact, time-centric": KusumotoExact(strategy="time"),
}

REMARKS = (
    "Memory: activations, their gradients, parameters, their gradients and inputs. GB are 1e9 bytes. Published: the "
    "most bytes in use of the memory pool of Chainer and CuPy; the memory-centric and Chen's columns are on the "
    "authors' poster; batches and the time-centric columns could not be checked against the paper's own text. "
    "Ours: simulated on the captured step, workspace left out; seconds from analytic costs of the K40c.",
    "Every row of the paper's planners is the least true peak over many budgets of its model; the least budget of the "
    "model alone does not give the published figures. Lifetimes always end at the last use, which is the paper's "
    "liveness analysis. The last block is kept, not recomputed.",
    "The exact program over all lower sets minimises the model's peak, not the true one, so it can end above the one "
    "over fewer sets, in the paper as here. The authors' exact solver is not exact: it numbers sets as a search meets "
    "them and misses steps to sets with lower numbers.",
    "Chen's column was made with lower sets of one boundary vertex, cut where the bytes pass a multiple of the total "
    "over the square root of their number; ours cuts the captured chain into about as many equal parts.",
    "Planners without a kind are given the best published memory as budget, kusumoto and kusumoto_exact with all that "
    "lies between time-centric and memory-centric; greedy is also asked for the least peak it finds.",
)
_PLAIN = (
    "theirs also has the workspace of convolutions, masks of dropout and states of functions; PyTorch's pooling keeps "
    "indices of 8 bytes that Chainer does not have"
)
_LEAST = {
    "googlenet": "theirs holds 1.64 GB inside the two normalisation functions that are never freed",
    "default": "the captured step differs from Chainer's in what backward reads: additions and concatenations read "
    "nothing",
}
_CHEN = "borders at cut points of the captured chain, so blocks may be larger or smaller than theirs"


@dataclass(frozen=True)
class Measured:
    """What our planners make of one network.

    Attributes:
        problem: The step; its budget is the best published memory, less what is there before the step.
        resident_bytes: Parameters and inputs.
        least: Plans with the least peak, by column.
        refused: Why a planner did not serve, by column.
        fitted: Plans for the budget, by planner.
        lowest: Plans of other planners with the least peak, by planner.
    """

    problem: Problem
    resident_bytes: int
    least: Mapping[str, Plan]
    refused: Mapping[str, str]
    fitted: Mapping[str, Plan]
    lowest: Mapping[str, Plan]

    def gigabytes(self, peak_bytes: int) -> float:
        """Return a peak with what is there before the step."""
        return (peak_bytes + self.resident_bytes) / _GB


def page(
    *,
    only: Sequence[str] = (),
    graphs: Path | None = None,
    progress: Progress = silent,
    others: Mapping[str, AbstractPlanner] | None = None,
) -> Page:
    """Return the page for the networks in `only`, or for all of them.

    Args:
        only: Names of networks.
        graphs: Folder with the authors' graphs as `kusumoto_<name>.txt`; adds the figures of their model.
        progress: Is told what is being done.
        others: Planners to compare with, by name; `greedy` and `auto` by default.
    """
    rows: list[Row] = []
    remarks: list[str] = []
    for name, published in PUBLISHED.items():
        if only and name not in only:
            continue
        progress(f"capturing {name}")
        network = captured(name, paper="kusumoto")
        progress(f"planning {name}")
        resident = network.parameter_bytes + network.input_bytes
        measured = measure(published, network.graph, network.costs, resident, others)
        rows += rows_of(name, published, measured)
        remarks += [f"{published.network}: {column} did not serve: {why}." for column, why in measured.refused.items()]
        if graphs is not None:
            progress(f"solving the authors' graph of {name}")
            rows += released_rows(published, read_chainer_graph(graphs / f"kusumoto_{published.file}.txt"))
    title = "Kusumoto, Inoue, Watanabe, Akiba, Koyama 2019: a graph theoretic framework of recomputation algorithms"
    return Page(title, tuple(rows), (*REMARKS, *remarks))


def measure(
    published: Published,
    graph: Graph,
    costs: Costs,
    resident_bytes: int,
    others: Mapping[str, AbstractPlanner] | None = None,
) -> Measured:
    """Return our plans for a network whose parameters and inputs have `resident_bytes`."""
    if others is None:
        others = {name: registry.get(name) for name in ("greedy", "auto")}
    budget = max(_ANY, int(min(published.least.values()) * _GB) - resident_bytes)
    problem, hopeless = Problem(graph, costs, budget), Problem(graph, costs, _ANY)
    refused = {column: why for column, planner in _PLANNERS.items() if (why := planner.supports(problem)) is not None}
    fitted = {"kusumoto": Kusumoto(), "kusumoto_exact": KusumotoExact(), **others}
    return Measured(
        problem=problem,
        resident_bytes=resident_bytes,
        least={
            column: solve(hopeless, planner, throw=False)
            for column, planner in _PLANNERS.items()
            if column not in refused
        },
        refused=refused,
        fitted={
            name: solve(problem, planner, throw=False)
            for name, planner in fitted.items()
            if planner.supports(problem) is None
        },
        lowest={name: solve(hopeless, others[name], throw=False) for name in others if name in _LOWEST},
    )


def rows_of(name: str, published: Published, measured: Measured) -> Iterator[Row]:
    """Yield the rows of one network."""
    network, plain = published.network, measured.problem.baseline.peak_bytes
    yield Row(network, "plain training", published.plain, measured.gigabytes(plain), "GB", _PLAIN)
    for column, plan in measured.least.items():
        note = _CHEN if column == "chen_sqrt" else _LEAST.get(name, _LEAST["default"])
        ours = measured.gigabytes(plan.peak_bytes)
        yield Row(network, f"least memory, {column}", published.least[column], ours, "GB", note)
        yield Row(network, f"extra time, {column}", None, 100 * plan.overhead, "%", "predicted; of a whole step")
    best = min(published.least.values())
    peaks = {column: plan.peak_bytes for column, plan in measured.least.items()}
    winner = min(peaks, key=lambda column: peaks[column])
    ours = measured.gigabytes(peaks[winner])
    yield Row(network, "least memory, best of these", best, ours, "GB", f"ours: {winner}")
    cut = 100 * (1 - ours / measured.gigabytes(plain))
    yield Row(network, "cut, best of these", 100 * (1 - best / published.plain), cut, "%", "each of its own plain peak")
    for other, plan in measured.fitted.items():
        ours = measured.gigabytes(plan.peak_bytes)
        yield Row(network, f"memory, {other} at the best published", best, ours, "GB", "")
        yield Row(network, f"extra time, {other} at the best published", None, 100 * plan.overhead, "%", "predicted")
    for other, plan in measured.lowest.items():
        ours = measured.gigabytes(plan.peak_bytes)
        note = f"predicted extra time {100 * plan.overhead:.1f} %; ops may run more than twice"
        yield Row(network, f"least memory, {other}", best, ours, "GB", note)


def released_rows(published: Published, chainer: ChainerGraph) -> Iterator[Row]:
    """Yield the figures of the authors' own graph: in their model, and simulated as a training step."""
    network = f"{published.network}, authors' graph"
    families = {
        "vertices with ancestors": pruned_lower_sets(chainer.dag),
        "all lower sets": all_lower_sets(chainer.dag),
    }
    for what, family in families.items():
        yield from _model_rows(network, published.file_batch, what, family)
    step = chainer.scaled(published.batch, published.file_batch)
    resident = step.parameter_bytes + step.input_bytes
    problem = Problem(*step.training(declared=False), _ANY)
    plain = (problem.baseline.peak_bytes + resident) / _GB
    note = "no workspace, masks or states of functions"
    yield Row(network, "plain training, simulated", published.plain, plain, "GB", note)
    for column, planner in _PLANNERS.items():
        if planner.supports(problem) is None:
            peak = solve(problem, planner, throw=False).peak_bytes
            ours = (peak + resident) / _GB
            yield Row(network, f"least memory, {column}, simulated", published.least[column], ours, "GB", note)


def _model_rows(network: str, batch: int, what: str, family: Family) -> Iterator[Row]:
    """Yield least budget and overheads of the paper's model, without liveness analysis."""
    steps = transitions_of(family)
    least = minimum_budget(steps)
    note = f"the paper's model at batch {batch}: no parameters, nothing freed inside a block; {len(family):,} sets"
    yield Row(network, f"least budget of the model, {what}", None, least / _GB, "GB", f"{least:,} bytes; {note}")
    table, total = solve_program(steps, least), sum(family.dag.ticks)
    for objective, name in (("time", "time-centric"), ("memory", "memory-centric")):
        strategy = table.best(objective)
        assert strategy is not None, "the least budget has a strategy"
        share = 100 * strategy.overhead / total
        note = f"{strategy.overhead} of {total} ticks of forward are recomputed at the least budget"
        yield Row(network, f"overhead in the model, {name}, {what}", None, share, "%", note)
