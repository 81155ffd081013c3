"""The papers' networks, how results are shown, and the command that shows them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from helpers.paths import published_graph
from lowtide.cli import main
from lowtide.errors import InvalidOptionError
from lowtide.plan.core.problem import Problem
from lowtide.plan.solve import solve
from lowtide.reproduce.nets.cells import GENOTYPES, CellNetwork
from lowtide.reproduce.nets.classification import ResponseNorm
from lowtide.reproduce.networks import FENG, KUSUMOTO, Captured, Network, capture, captured
from lowtide.reproduce.page import Page, Row, format_figure, to_json, to_markdown, to_terminal

PARAMETERS = {
    "alexnet": 61_100_840,
    "vgg11": 132_863_336,
    "vgg13": 133_047_848,
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "densenet121": 7_978_856,
    "densenet161": 28_681_000,
    "densenet169": 14_149_480,
    "densenet201": 20_013_928,
    "inception_v3": 23_834_568,  # 27,161,264 with its auxiliary classifier
    "darts_cifar": 3_349_342,
    # The sums of the parameters in Kusumoto et al.'s graph files.
    "googlenet": 13_378_280,
    "unet": 31_100_354,
    "pspnet": 70_504_418,
}
ALL = [*(("kusumoto", name) for name in KUSUMOTO), *(("feng", name) for name in FENG)]


def network(paper: str, name: str) -> Network:
    return (KUSUMOTO if paper == "kusumoto" else FENG)[name]


def built(paper: str, name: str) -> nn.Module:
    with torch.device("meta"):
        return network(paper, name).build()


@pytest.mark.parametrize(("paper", "name"), [each for each in ALL if each[1] in PARAMETERS])
def test_networks_have_the_published_number_of_parameters(paper: str, name: str) -> None:
    assert sum(parameter.numel() for parameter in built(paper, name).parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", ["nasnet_cifar", "amoebanet_cifar"])
def test_searched_cells_are_near_the_published_size(name: str) -> None:
    """The papers give 3.3 and 3.2 million, for frames that differ in their stem and number of cells."""
    assert 3.0e6 < sum(parameter.numel() for parameter in built("feng", name).parameters()) < 3.9e6


# Smaller networks have every kind of layer that these have.
LARGE = {"resnet34", "resnet101", "resnet152", "vgg13", "vgg16", "densenet161", "densenet169", "densenet201"}


@pytest.mark.parametrize(
    ("paper", "name"),
    [pytest.param(*each, marks=pytest.mark.slow if each[1] in LARGE else ()) for each in ALL],
)
def test_networks_give_scores_for_what_is_labelled(paper: str, name: str) -> None:
    spec = network(paper, name)
    scores = built(paper, name)(torch.empty(2, *spec.image, device="meta"))
    every = scores if isinstance(scores, tuple) else (scores,)
    assert len(every) == len(spec.weights)
    for each in every:
        assert each.shape[0] == 2
        assert each.shape[2:] == (spec.labels or ())


def test_papers_are_complete() -> None:
    assert len(KUSUMOTO) == 7
    assert len(FENG) == 18


def test_response_normalisation_is_torchs() -> None:
    torch.manual_seed(0)
    x = 30 * torch.randn(2, 9, 3, 3, dtype=torch.float64)
    torch.testing.assert_close(ResponseNorm()(x), nn.LocalResponseNorm(5, alpha=1e-4, beta=0.75, k=1.0)(x))
    assert torch.autograd.gradcheck(ResponseNorm(), x.requires_grad_())


@pytest.mark.parametrize(
    "name", ["darts", *(pytest.param(name, marks=pytest.mark.slow) for name in ("amoebanet", "nasnet"))]
)
def test_few_cells_are_captured_and_planned(name: str) -> None:
    few = Network(partial(CellNetwork, GENOTYPES[name], width=4, cells=3), 2, (3, 16, 16), None)
    check_planned(capture(name, few, "rtx2080ti"))


@pytest.mark.parametrize(
    "name", ["alexnet", "vgg19", "unet", "googlenet", pytest.param("resnet18", marks=pytest.mark.slow)]
)
def test_networks_with_few_ops_are_captured_and_planned(name: str) -> None:
    check_planned(captured(name))


@pytest.mark.slow
@pytest.mark.parametrize(("paper", "name"), ALL)
def test_every_network_is_captured_and_planned_at_full_size(paper: str, name: str) -> None:
    check_planned(captured(name, paper=paper))


def check_planned(step: Captured) -> None:
    assert step.graph.boundary
    assert 0 < step.costs.total_seconds < 60
    assert not any(step.costs.workspace_bytes)
    gradients = sum(step.graph.values[value].bytes for value in step.graph.outputs)
    assert gradients >= step.parameter_bytes
    baseline = Problem(step.graph, step.costs, 1).baseline.peak_bytes
    assert baseline > gradients
    plan = solve(Problem(step.graph, step.costs, baseline), "chen_sqrt", throw=False)
    assert plan.peak_bytes <= baseline


def test_losses_are_as_the_papers_have_them() -> None:
    targets = [op.target for op in captured("unet").graph.ops]
    assert "aten.nll_loss2d_forward.default" in targets
    assert targets.count("aten.sum.default") == 0
    summed = [op.target for op in captured("alexnet").graph.ops]
    assert summed.count("aten.sum.default") == 1
    assert not any("nll_loss" in target for target in summed)


# Main results of forward ops against Chainer's functions.
KINDS = {
    "aten.convolution.default": "Convolution2D",
    "aten._native_batch_norm_legit_functional.default": "BatchNormalization",
    "aten.relu.default": "ReLU",
    "aten.max_pool2d_with_indices.default": "MaxPooling2D",
    "aten.cat.default": "Concat",
    "aten.addmm.default": "Linear",
    "aten.add.Tensor": "Add",
    "aten.avg_pool2d.default": "AveragePooling2D",
    "aten.mean.dim": "AveragePooling2D",
    "aten.upsample_bilinear2d.default": "ResizeImages",
}
SCALAR_BYTES = 8


def our_sizes(step: Captured, batch: int) -> dict[str, Counter[int]]:
    """Return how many results of each kind and size forward has, at another batch size."""
    found: dict[str, Counter[int]] = defaultdict(Counter)
    for op in (step.graph.ops[op] for op in step.graph.forward):
        if op.target in KINDS and (size := step.graph.values[op.outputs[0]].bytes) > SCALAR_BYTES:
            found[KINDS[op.target]][size * batch // step.batch] += 1
    return found


def their_sizes(path: Path) -> dict[str, Counter[int]]:
    """Return how many results of each kind and size the forward functions in a graph file of the authors have."""
    lines = iter(path.read_text().splitlines())
    variables, functions = map(int, next(lines).split())
    sizes = {int(number): int(size) for number, size, _ in (next(lines).split(" ", 2) for _ in range(variables))}
    found: dict[str, Counter[int]] = defaultdict(Counter)
    for _ in range(functions):
        direction = next(lines)
        inputs, outputs = map(int, next(lines).split())
        for _ in range(inputs):
            next(lines)
        results = [int(next(lines)) for _ in range(outputs)]
        kind = next(lines).removesuffix("Function").replace("Deconvolution", "Convolution")
        next(lines)
        if direction == "forward" and sizes[results[0]] > SCALAR_BYTES:
            found[kind][sizes[results[0]]] += 1
    return found


@pytest.mark.parametrize(
    ("name", "file", "batch"),
    [
        ("vgg19", "vgg19", 32),
        ("unet", "unet", 8),
        ("googlenet", "googlenet", 32),
        pytest.param("resnet50", "resnet50", 32, marks=pytest.mark.slow),
        pytest.param("resnet152", "resnet152", 32, marks=pytest.mark.slow),
        pytest.param("densenet161", "densenet", 32, marks=pytest.mark.slow),
        pytest.param("pspnet", "pspnet", 1, marks=pytest.mark.slow),
    ],
)
def test_activations_are_those_of_the_authors_graphs(name: str, file: str, batch: int) -> None:
    path = published_graph(f"kusumoto_{file}.txt")
    ours, theirs = our_sizes(captured(name), batch), their_sizes(path)
    if name == "googlenet":  # its normalisation is one function there and several ops here
        ours["Add"].clear()
    assert {kind: ours[kind] for kind in KINDS.values()} == {kind: theirs[kind] for kind in KINDS.values()}


@pytest.mark.parametrize(
    ("name", "total", "batch", "views"),
    [
        ("vgg19", 4_004_508_676, 32, 3_211_264),  # the flattening
        ("unet", 11_781_604_356, 8, 51_380_224 + 88_604_672 + 163_840_000 + 314_703_872),  # the four crops
    ],
)
def test_activations_sum_up_to_the_published_total(name: str, total: int, batch: int, views: int) -> None:
    step = captured(name)
    main = sum(size * count for sizes in our_sizes(step, batch).values() for size, count in sizes.items())
    forward = [step.graph.ops[op] for op in step.graph.forward]
    sizes = [step.graph.values[op.outputs[0]].bytes for op in forward if op.target == "aten.mul.Tensor"]
    dropped = sum(size * batch // step.batch for size in sizes if size > SCALAR_BYTES)
    loss = 4
    assert main + dropped + views + loss == total


def test_bytes_beside_the_step() -> None:
    step = captured("vgg19")
    assert step.parameter_bytes == 4 * PARAMETERS["vgg19"]
    assert step.input_bytes == 64 * (3 * 224 * 224 * 4 + 8)
    assert step.batch == 64
    assert "k40c" in step.costs.source


def test_batch_sizes_scale_what_depends_on_them() -> None:
    two, many = captured("alexnet", batch=2), captured("alexnet")
    assert (two.batch, many.batch) == (2, 1024)
    assert two.parameter_bytes == many.parameter_bytes
    assert 512 * sum(our_sizes(two, 2)["ReLU"].elements()) == sum(our_sizes(many, 1024)["ReLU"].elements())


def test_captures_are_kept() -> None:
    assert captured("alexnet", batch=2) is captured("alexnet", batch=2, paper="feng")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "resnet51"}, "resnet50"),
        ({"name": "unet", "paper": "feng"}, "no network 'unet'"),
        ({"name": "vgg19", "paper": "kingma"}, "kusumoto, feng"),
        ({"name": "vgg19", "batch": 0}, "at least 1"),
    ],
)
def test_unknown_networks_are_told(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        captured(**arguments)


def test_full_size_needs_little_memory() -> None:
    script = (
        # The system's figure for a child begins at that of the process that started it.
        "def own_most_bytes():\n"
        "    text = open('/proc/self/status').read()\n"
        "    return 1024 * int(text.split('VmHWM:')[1].split()[0])\n"
        "from lowtide.plan.core.problem import Problem\n"
        "from lowtide.reproduce.networks import captured\n"
        "step = captured('vgg19')\n"
        "peak = Problem(step.graph, step.costs, 1).baseline.peak_bytes\n"
        "print(peak, own_most_bytes())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    peak_bytes, resident_bytes = map(int, done.stdout.split())
    assert peak_bytes > 5e9
    assert resident_bytes < 1.5 * 2**30


PAGE = Page(
    "A paper 2020",
    (
        Row("net, 8 layers", "peak, one|two", 4.5, 4.48, "GB", "why [they] differ"),
        Row("net, 8 layers", "parameters", None, 143_667_240.0, ""),
        Row("other", "overhead", 30.0, 15.0, "%", "shared by rows"),
        Row("other", "overhead", 0.0, 1e-4, "s", "shared by rows"),
    ),
    ("What holds for all.",),
)


def test_markdown() -> None:
    assert to_markdown(PAGE).splitlines() == [
        "# A paper 2020",
        "",
        "| network | quantity | published | ours | unit | ours / published | note |",
        "| --- | --- | ---: | ---: | --- | ---: | --- |",
        "| net, 8 layers | peak, one\\|two | 4.5 | 4.48 | GB | 0.996 | why [they] differ |",
        "| net, 8 layers | parameters | - | 143,667,240 |  |  |  |",
        "| other | overhead | 30 | 15 | % | 0.500 | note 1 |",
        "| other | overhead | 0 | 0.0001 | s |  | note 1 |",
        "",
        "## Notes",
        "",
        "1. shared by rows",
        "",
        "## Remarks",
        "",
        "- What holds for all.",
    ]


def test_json_keeps_full_precision() -> None:
    content = json.loads(to_json(PAGE))
    assert content["title"] == PAGE.title
    assert content["remarks"] == list(PAGE.remarks)
    rows = [{key: value for key, value in row.items() if key != "ratio"} for row in content["rows"]]
    assert tuple(Row(**row) for row in rows) == PAGE.rows
    assert [row["ratio"] for row in content["rows"]] == [4.48 / 4.5, None, 0.5, None]


def test_terminal_shows_every_figure_and_note() -> None:
    console = Console(width=120)
    with console.capture() as shown:
        console.print(to_terminal(PAGE))
    text = shown.get()
    for word in ("A paper 2020", "4.48", "0.996", "143,667,240", "why [they] differ", "1. ", "2. shared", "for all."):
        assert word in text
    assert text.count("shared by rows") == 1


@pytest.mark.parametrize(
    ("figure", "text"),
    [
        (None, "-"),
        (0, "0"),
        (2.0, "2"),
        (0.12345, "0.123"),
        (12.3456, "12.35"),
        (4785.9, "4,786"),
        (1e9, "1,000,000,000"),
    ],
)
def test_figures_for_people(figure: float | None, text: str) -> None:
    assert format_figure(figure) == text


@pytest.fixture
def papers(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Put pages of our own in place of the papers', and return the calls they receive."""
    calls: list[dict[str, Any]] = []

    def page_of(paper: str) -> Callable[..., Page]:
        def page(*, only: Any, graphs: Any, progress: Callable[[str], None]) -> Page:
            calls.append({"paper": paper, "only": only, "graphs": graphs})
            progress("at work")
            return Page(paper, () if only == ("nothing",) else PAGE.rows, ())

        return page

    for paper in ("chen", "hong", "feng", "kusumoto"):
        monkeypatch.setitem(sys.modules, f"lowtide.reproduce.{paper}", SimpleNamespace(page=page_of(paper)))
    return calls


def test_command_prints_and_writes(papers: list, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "new" / "folder"
    code = main(["reproduce", "feng", "--out", str(out), "--only", "other", "net", "--graphs", str(tmp_path)])
    printed = capsys.readouterr()
    assert code == 0
    assert papers == [{"paper": "feng", "only": ("other", "net"), "graphs": tmp_path}]
    assert "0.996" in printed.out
    assert "feng: at work" in printed.err
    assert printed.out.splitlines()[-1] == f"Wrote {out / 'feng.md'}, {out / 'feng.json'}"
    assert (out / "feng.md").read_text().startswith("# feng\n")
    assert len(json.loads((out / "feng.json").read_text())["rows"]) == len(PAGE.rows)


def test_command_does_not_overwrite(papers: list, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "hong.json").write_text("mine")
    assert main(["reproduce", "all", "--out", str(tmp_path)]) == 1
    assert "--force" in capsys.readouterr().err
    assert papers == []
    assert (tmp_path / "hong.json").read_text() == "mine"
    assert main(["reproduce", "all", "--out", str(tmp_path), "--force"]) == 0
    assert [call["paper"] for call in papers] == ["chen", "hong", "feng", "kusumoto"]
    assert (tmp_path / "hong.json").read_text() != "mine"
    assert len(list(tmp_path.iterdir())) == 8


def test_command_tells_when_nothing_matches(papers: list, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["reproduce", "chen", "--out", str(tmp_path), "--only", "nothing"]) == 1
    assert "nothing" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["adam"], 2), (["chen", "--graphs", "nowhere"], 1)])
def test_bad_arguments(
    arguments: list[str], code: int, papers: list, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["reproduce", *arguments, "--out", str(tmp_path)]) == code
    assert "Traceback" not in capsys.readouterr().err
    assert not papers
