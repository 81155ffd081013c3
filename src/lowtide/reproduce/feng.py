"""Feng and Huang 2021: memory of intermediate tensors and time of eighteen networks, plain and with their plans.

The authors measured the allocator's peak less what is allocated before or after the step, whichever is more. With the
gradients of the step before still there, that leaves what exists only within a step. So a parameter's gradient counts
while it is made and is then added to the one that is there; results that the caller still holds do not count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lowtide.graph.costs import Costs
from lowtide.graph.ir import Graph, Op, OpId
from lowtide.plan import registry
from lowtide.plan.core.planner import AbstractPlanner
from lowtide.plan.core.problem import Problem
from lowtide.plan.core.result import Plan
from lowtide.plan.planners.feng import Feng
from lowtide.plan.solve import solve
from lowtide.progress import Progress, silent
from lowtide.reproduce.networks import captured
from lowtide.reproduce.page import Page, Row

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Published:
    """A line of the table in the authors' repository.

    Attributes:
        network: The network and its batch.
        plain_mib: Memory of plain training.
        planned_mib: Memory with their plan.
        cut: By how many percent that is less.
        overhead: By how many percent an iteration takes longer.
        doubt: Why else its plain memory may differ from ours.
    """

    network: str
    plain_mib: int
    planned_mib: int
    cut: int
    overhead: int
    doubt: str = ""


_CELLS = (
    "less by a fifth, which is more than on any network with larger images; half the batch, which their code names, "
    "would halve ours, so the batch is not the cause. We do not know it"
)
PUBLISHED: dict[str, Published] = {
    "alexnet": Published(
        "AlexNet, batch 1024",
        4955,
        3287,
        34,
        34,
        "batch and kernels are the largest of all, so workspace, which only theirs has, weighs most",
    ),
    "vgg11": Published("VGG-11, batch 64", 3577, 2781, 22, 34),
    "vgg13": Published("VGG-13, batch 64", 5136, 3565, 31, 33, "theirs looks like that of VGG-16; see below"),
    "vgg16": Published("VGG-16, batch 64", 5136, 3565, 31, 32),
    "vgg19": Published("VGG-19, batch 64", 5189, 3565, 31, 33),
    "resnet18": Published("ResNet-18, batch 256", 5635, 3677, 35, 30),
    "resnet34": Published("ResNet-34, batch 128", 4079, 1838, 55, 35),
    "resnet50": Published("ResNet-50, batch 64", 5323, 1973, 63, 31),
    "resnet101": Published("ResNet-101, batch 32", 3934, 1024, 74, 35),
    "resnet152": Published("ResNet-152, batch 16", 2767, 526, 81, 37),
    "densenet121": Published("DenseNet-121, batch 32", 4027, 898, 78, 34),
    "densenet161": Published("DenseNet-161, batch 16", 3751, 666, 82, 36),
    "densenet169": Published("DenseNet-169, batch 32", 4862, 897, 82, 32),
    "densenet201": Published("DenseNet-201, batch 16", 3146, 474, 85, 53),
    "inception_v3": Published("Inception v3, batch 32", 3074, 881, 71, 29),
    "nasnet_cifar": Published("NASNet CIFAR, batch 64", 5832, 1129, 81, 31, _CELLS),
    "amoebanet_cifar": Published("AmoebaNet CIFAR, batch 64", 4944, 1058, 79, 36, _CELLS),
    "darts_cifar": Published("DARTS CIFAR, batch 64", 5627, 1115, 80, 55, _CELLS),
}


REMARKS = (
    "Memory is that of intermediate tensors: the peak less weights, inputs, gradients of parameters and what is left "
    "when the step ends. A parameter's gradient counts while it is made. MiB are 2^20 bytes.",
    "Published: measured by the authors with PyTorch 1.5.1 on a GPU that they do not name, and printed in their "
    "repository. Ours: simulated on the captured step, workspace left out; seconds from analytic costs of an RTX 2080 "
    "Ti, the GPU they name elsewhere.",
    "feng is the paper's answer, which knows no budget; feng, best of many is the plan with the least peak among those "
    "of the thresholds that are candidates in the paper. greedy and auto are given the peak of the latter as budget; "
    "auto is also given the published cut.",
    "The published memory of VGG-13 and VGG-16 is the same to the last digit, although VGG-16 has three convolutions "
    "more; one of the two lines looks like a copy of the other.",
    "The authors' README says batch 64 for the CIFAR networks and their code 32; ours are for 64.",
)
_PLAIN = (
    "theirs also has the workspace of convolutions and what the allocator rounds up; ours is the tensors of the step, "
    "each freed after its last use"
)
_PEAK = (
    "theirs also has workspace, and PyTorch's checkpoint keeps a segment's tensors until autograd has passed them; "
    "ours are freed after their last use"
)
_CUT = "of each one's own plain peak"
_OVERHEAD = (
    "theirs is wall-clock time without waiting for the GPU; ours is predicted, what follows the last checkpoint is not "
    "recomputed, and neither is what backward does not need"
)


@dataclass(frozen=True)
class Measured:
    """What our planners make of one network.

    Attributes:
        problem: The step, so that its peak is that of intermediate tensors; the budget is not used.
        answer: The paper's own answer.
        family: The plan with the least peak among all that the paper's thresholds give.
        others: Plans of other planners at the peak of `family`, by name.
        strongest: Name of the planner that is asked for the published cut.
        at_published_cut: Its plan.
    """

    problem: Problem
    answer: Plan
    family: Plan
    others: dict[str, Plan]
    strongest: str
    at_published_cut: Plan

    def cut(self, plan: Plan) -> float:
        """Return by how many percent the peak of `plan` is below that of plain training."""
        return 100 - 100 * plan.peak_bytes / self.problem.baseline.peak_bytes


def page(
    *,
    only: Sequence[str] = (),
    graphs: Path | None = None,
    progress: Progress = silent,
    others: Mapping[str, AbstractPlanner] | None = None,
) -> Page:
    """Return the page for the networks in `only`, or for all of them; `others` is as for `measure`."""
    del graphs  # the authors published none
    rows: list[Row] = []
    for name, published in PUBLISHED.items():
        if only and name not in only:
            continue
        progress(f"capturing {name}")
        network = captured(name, paper="feng")
        progress(f"planning {name}")
        rows += rows_of(published, measure(published, network.graph, network.costs, others))
    return Page("Feng and Huang 2021: optimal gradient checkpoint search for arbitrary graphs", tuple(rows), REMARKS)


def intermediate(graph: Graph) -> Graph:
    """Return `graph` with nothing held to its end, so that its peak is what the authors measured."""
    return replace(graph, outputs=())


def measure(
    published: Published, graph: Graph, costs: Costs, others: Mapping[str, AbstractPlanner] | None = None
) -> Measured:
    """Return our plans for a network.

    Args:
        published: What is published about it.
        graph: Its training step, with all it returns as outputs.
        costs: The costs of the step.
        others: Planners to compare with, by name, `greedy` and `auto` by default; the last one is asked for the
            published cut.
    """
    others = others or {name: registry.get(name) for name in ("greedy", "auto")}
    strongest = list(others)[-1]
    problem = Problem(intermediate(graph), costs, 1)
    family = solve(problem, Feng(), throw=False)
    wanted = int(problem.baseline.peak_bytes * (1 - published.cut / 100))
    same = replace(problem, budget_bytes=family.peak_bytes)
    less = replace(problem, budget_bytes=max(wanted, least_bytes(problem)[0]))
    return Measured(
        problem=problem,
        answer=solve(problem, Feng(plans=0), throw=False),
        family=family,
        others={name: solve(same, planner, throw=False) for name, planner in others.items()},
        strongest=strongest,
        at_published_cut=solve(less, others[strongest], throw=False),
    )


def least_bytes(problem: Problem) -> tuple[int, Op]:
    """Return a number of bytes that no schedule can go below, and the op that alone needs them."""
    graph, workspace = problem.graph, problem.costs.workspace_bytes

    def needs(op: OpId) -> int:
        values = [graph.values[value] for value in {*graph.ops[op].inputs, *graph.ops[op].outputs}]
        return workspace[op] + sum(value.bytes for value in values if value.producer is not None)

    worst = max(range(len(graph.ops)), key=needs)
    return needs(worst), graph.ops[worst]


def rows_of(published: Published, found: Measured) -> list[Row]:
    """Return the rows of one network."""

    def row(quantity: str, theirs: float, ours: float, unit: str, note: str) -> Row:
        return Row(published.network, quantity, theirs, ours, unit, note)

    def pair(name: str, plan: Plan, note: str) -> list[Row]:
        return [
            row(f"cut, {name}", published.cut, found.cut(plan), "%", note),
            row(f"overhead, {name}", published.overhead, 100 * plan.overhead, "%", _OVERHEAD),
        ]

    plain = found.problem.baseline.peak_bytes
    short = _why_short(published, found)
    rows = [
        row("peak, plain", published.plain_mib, plain / _MIB, "MiB", published.doubt or _PLAIN),
        row("peak, feng", published.planned_mib, found.answer.peak_bytes / _MIB, "MiB", _PEAK),
        *pair("feng", found.answer, short or _CUT),
        *pair("feng, best of many", found.family, short or _CUT),
    ]
    for name, plan in found.others.items():
        rows += pair(f"{name} at that peak", plan, short or _CUT)
    return rows + pair(f"{found.strongest} at the published cut", found.at_published_cut, short or _CUT)


def _why_short(published: Published, found: Measured) -> str:
    """Return why no plan can reach the published cut, or "" if one can."""
    least, op = least_bytes(found.problem)
    most = 100 - 100 * least / found.problem.baseline.peak_bytes
    if most >= published.cut:
        return ""
    return (
        f"no schedule can cut more than {most:.1f} %: {op.target} alone reads and writes {least / _MIB:.0f} MiB; "
        "theirs is a larger cut of a peak that has workspace, and leaves "
        f"{published.planned_mib - least / _MIB:.0f} MiB more"
    )
