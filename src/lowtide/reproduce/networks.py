"""The papers' networks at their published size, captured without their memory.

Models and batches live on the meta device, so a network whose activations need gigabytes is captured in a few hundred
megabytes. Capturing takes some milliseconds per op; results are kept for as long as the process lives.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowtide.api import plan
from lowtide.capture.memory_rewrites import as_traced
from lowtide.errors import CaptureError, InvalidOptionError
from lowtide.graph.costs import Costs
from lowtide.graph.ir import Graph
from lowtide.plan.core.result import Plan
from lowtide.reproduce.nets.cells import GENOTYPES, CellNetwork
from lowtide.reproduce.nets.classification import GoogLeNet, alexnet, densenet, inception_v3, resnet, vgg
from lowtide.reproduce.nets.segmentation import PSPNet, UNet

IMAGE = (3, 224, 224)


@dataclass(frozen=True)
class Network:
    """A network as a paper trains it.

    Attributes:
        build: Makes the network.
        batch: Images in a batch.
        image: Channels, height and width of an image.
        labels: Height and width of the labels of one image; empty if an image has one label; None if the loss is the
            sum of the scores.
        weights: Weight of the cross entropy of each of the network's results.
    """

    build: Callable[[], nn.Module]
    batch: int
    image: tuple[int, int, int] = IMAGE
    labels: tuple[int, ...] | None = ()
    weights: tuple[float, ...] = (1.0,)


KUSUMOTO: dict[str, Network] = {
    "pspnet": Network(PSPNet, 2, (3, 713, 713), (713, 713), (1.0, 0.4)),
    "unet": Network(UNet, 8, (1, 572, 572), (388, 388)),
    "resnet50": Network(partial(resnet, 50, early=True), 96),
    "resnet152": Network(partial(resnet, 152, early=True), 48),
    "vgg19": Network(partial(vgg, 19), 64),
    "densenet161": Network(partial(densenet, 161), 32),
    "googlenet": Network(GoogLeNet, 256, weights=(1.0, 1.0, 1.0)),
}
"""The networks of Kusumoto et al. 2019 as Chainer has them, trained with softmax cross entropy."""

FENG: dict[str, Network] = {
    "alexnet": Network(alexnet, 1024, labels=None),
    **{f"vgg{depth}": Network(partial(vgg, depth), 64, labels=None) for depth in (11, 13, 16, 19)},
    **{
        f"resnet{depth}": Network(partial(resnet, depth), batch, labels=None)
        for depth, batch in ((18, 256), (34, 128), (50, 64), (101, 32), (152, 16))
    },
    **{
        f"densenet{depth}": Network(partial(densenet, depth), batch, labels=None)
        for depth, batch in ((121, 32), (161, 16), (169, 32), (201, 16))
    },
    "inception_v3": Network(inception_v3, 32, (3, 300, 300), None),
    **{
        f"{name}_cifar": Network(partial(CellNetwork, genotype), 64, (3, 32, 32), None)
        for name, genotype in GENOTYPES.items()
    },
}
"""The networks of Feng and Huang 2021 as torchvision and DARTS have them; the loss is the sum of the scores."""

DEVICES = {"kusumoto": "k40c", "feng": "rtx2080ti"}
"""The GPU of each paper, for analytic costs."""
_PAPERS = {"kusumoto": KUSUMOTO, "feng": FENG}


@dataclass(frozen=True)
class Captured:
    """The training step of one of the papers' networks.

    Attributes:
        name: The network.
        graph: Forward and backward in one graph.
        costs: Analytic seconds on the paper's GPU. Workspace is left out, as it is from the papers' memory models.
        parameter_bytes: Bytes of all parameters, which are there before the step and not part of its peak.
        input_bytes: Bytes of images and labels, likewise.
        batch: Images in the batch.
    """

    name: str
    graph: Graph
    costs: Costs
    parameter_bytes: int
    input_bytes: int
    batch: int


class Training(nn.Module):
    """A network that returns its loss."""

    def __init__(self, network: nn.Module, weights: tuple[float, ...]) -> None:
        super().__init__()
        self.network = network
        self.weights = weights

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the weighted sum of the cross entropies of all scores; without labels the sum of the first scores."""
        scores: Tensor | tuple[Tensor, ...] = self.network(images)
        every = scores if isinstance(scores, tuple) else (scores,)
        if labels is None:
            return every[0].sum()
        losses = [weight * F.cross_entropy(each, labels) for weight, each in zip(self.weights, every, strict=True)]
        return sum(losses[1:], start=losses[0])


def captured(name: str, *, batch: int | None = None, paper: str | None = None) -> Captured:
    """Return the captured training step of the network called `name`.

    Args:
        name: The network, such as "vgg19".
        batch: Images in the batch; the published number by default.
        paper: Whose version of it: "kusumoto" or "feng"; by default the first of them that has it.
    """
    if batch is not None and batch < 1:
        raise InvalidOptionError(f"A batch of {batch} is not possible; it must be at least 1.")
    paper = _paper_of(name, paper)
    return _captured(name, batch or _PAPERS[paper][name].batch, paper)


@cache
def _captured(name: str, batch: int, paper: str) -> Captured:
    return capture(name, replace(_PAPERS[paper][name], batch=batch), DEVICES[paper])


def capture(name: str, network: Network, device: str) -> Captured:
    """Return the captured training step of `network` with analytic costs for `device`."""
    with torch.device("meta"):
        model = Training(network.build(), network.weights)
        batch = [torch.empty(network.batch, *network.image)]
        if network.labels is not None:
            batch.append(torch.zeros(network.batch, *network.labels, dtype=torch.int64))
    with as_traced():
        made = plan(model, batch, budget="100%", planner="keep_all", costs=device, blocks="whole")
    if not isinstance(made, Plan):
        raise CaptureError(f"{name} was captured as several graphs; the papers' figures are for one.")
    problem = made.problem
    no_workspace = (0,) * len(problem.graph.ops)
    return Captured(
        name=name,
        graph=problem.graph,
        costs=replace(problem.costs, workspace_bytes=no_workspace, source=f"{problem.costs.source}, without workspace"),
        parameter_bytes=sum(parameter.nbytes for parameter in model.parameters()),
        input_bytes=sum(tensor.nbytes for tensor in batch),
        batch=network.batch,
    )


def _paper_of(name: str, paper: str | None) -> str:
    if paper is not None and paper not in _PAPERS:
        raise InvalidOptionError(f"There are no networks of {paper!r}; there are those of {', '.join(_PAPERS)}.")
    papers = _PAPERS if paper is None else {paper: _PAPERS[paper]}
    found = next((each for each, networks in papers.items() if name in networks), None)
    if found is None:
        names = sorted({each for networks in papers.values() for each in networks})
        near = difflib.get_close_matches(name, names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise InvalidOptionError(f"There is no network {name!r}; there are {', '.join(names)}.{hint}")
    return found
