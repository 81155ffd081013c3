"""The backward of a convolution runs as two ops, where it makes two gradients, and nobody sees it but the planner."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import lowtide
from helpers.exactness import Batch, DropEverything, Tightest, assert_exact, assert_same, train
from lowtide.capture.program import is_getitem, output_node
from lowtide.capture.split_conv_backward import split_convolutions
from lowtide.errors import InfeasibleBudgetError
from lowtide.graph.ir import Graph

BACKWARD = "aten.convolution_backward.default"
SPLIT, SHAPE_ONLY = (
    "lowtide.capture.build_program.split_convolutions",
    "lowtide.capture.build_program.replace_shape_only_inputs",
)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class Around(nn.Module):
    """A layer of 8 channels between two of kernel 1, of which the first one's input needs no gradient."""

    def __init__(self, layer: nn.Module, dims: int = 2, *, norm: bool = True) -> None:
        super().__init__()
        convolution = CONVOLUTIONS[dims - 1]
        self.first, self.layer, self.last = convolution(3, 8, 1), layer, convolution(8, 4, 1)
        self.norm = NORMS[dims - 1](8) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sin(torch.tanh(self.norm(self.first(x))).exp())
        h = torch.tanh(self.norm(self.layer(h)).sin())
        return self.last(h).square().sum()


class Twice(nn.Module):
    """One layer, used twice."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.shared = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(torch.tanh(self.shared(x)))


def in_a_row(layers: dict[str, nn.Module]) -> nn.Sequential:
    return nn.Sequential(OrderedDict((name, nn.Sequential(layer, nn.Tanh())) for name, layer in layers.items()))


def floats(*shape: int, dtype: torch.dtype = torch.float32, layout: torch.memory_format | None = None) -> list[Batch]:
    xs = [torch.randn(*shape, generator=torch.Generator().manual_seed(s)).to(dtype) for s in (0, 1)]
    return [((x.contiguous(memory_format=layout or torch.contiguous_format),), {}) for x in xs]


def frozen(layer: nn.Conv2d, *, bias: bool = False) -> nn.Conv2d:
    layer.weight.requires_grad_(False)
    layer.bias.requires_grad_(bias)
    return layer


def expected_gradients(model: nn.Module, args: tuple[Tensor, ...]) -> list[tuple[str, int]]:
    """Return the bytes that each op should make, with its layer, in the order of backward, from a plain call."""
    calls: list[list[tuple[str, int]]] = []

    def note(name: str, layer: nn.Module, x: Tensor) -> None:
        trained = [p.nbytes for p in layer.parameters() if p.requires_grad]
        made = [x.nbytes] * x.requires_grad + [sum(trained)] * bool(trained)
        calls.append([(name, size) for size in sorted(made)])

    model = copy.deepcopy(model)
    for name, layer in model.named_modules():
        if hasattr(layer, "transposed"):
            layer.register_forward_pre_hook(lambda layer, inputs, name=name: note(name, layer, inputs[0]))
    model(*args)
    return [op for call in reversed(calls) for op in call]


def captured(model: nn.Module, *args: Tensor) -> Graph:
    return lowtide.plan(model, args, budget="100%", planner="keep_all", costs="analytic").problem.graph


def gradients(graph: Graph) -> list[tuple[str, int]]:
    """Return the bytes that each backward of a convolution makes, with its layer; somebody must read every result."""
    ops = [op for op in graph.ops if op.target.split("+")[0] == BACKWARD]
    assert all(graph.readers[value] or value in graph.held for op in ops for value in op.outputs)
    return [(op.module, sum(graph.values[value].bytes for value in op.outputs)) for op in ops]


def check(model: nn.Module, batches: list[Batch], *, num_split: int, tight: bool = True) -> None:
    """Train plainly, without a plan and in little memory; compare the bits, and the ops with what they should make."""
    expected = expected_gradients(model, batches[0][0])
    plain = copy.deepcopy(model)
    records = train(plain, plain, batches)
    ways = {"100%": "keep_all", "1TiB": Tightest() if tight else DropEverything(again=True)}
    for budget, planner in ways.items():
        planned = lowtide.wrap(copy.deepcopy(model), budget=budget, planner=planner, costs="analytic")
        assert_same(records, train(planned, planned, batches))
        (plan,) = lowtide.plans(planned)
        graph = plan.problem.graph
        assert (plan.schedule.steps == tuple(range(len(graph.ops)))) == (planner == "keep_all")
        assert gradients(graph) == expected
        for part in ("_input", "_weight"):
            assert sum(op.name.endswith(part) for op in graph.ops) == num_split


def test_layers() -> None:
    layers = {
        "with bias": nn.Conv2d(8, 8, 3, padding=1),
        "dilated": nn.Conv2d(8, 8, 3, dilation=2, padding=2),
        "grouped": nn.Conv2d(8, 8, 3, groups=2),
        "depthwise": nn.Conv2d(8, 8, 7, groups=8, padding="same"),
        "strided": nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False),
    }
    check(Around(in_a_row(layers)), floats(2, 3, 14, 14), num_split=6)


def test_transposed_layers() -> None:
    layers = {
        "strided": nn.ConvTranspose2d(8, 8, 3, stride=2, output_padding=1),
        "grouped": nn.ConvTranspose2d(8, 8, 3, groups=4, dilation=2, padding=2, bias=False),
        "with bias": nn.ConvTranspose2d(8, 8, 3, padding=1),
    }
    check(Around(in_a_row(layers)), floats(2, 3, 6, 6), num_split=4)


@pytest.mark.parametrize("layer", [nn.Conv1d, pytest.param(nn.ConvTranspose1d, marks=pytest.mark.slow)])
def test_one_dimension(layer: type[nn.Module]) -> None:
    check(Around(layer(8, 8, 5, stride=2), 1), floats(4, 3, 65), num_split=2)


@pytest.mark.parametrize("layer", [pytest.param(nn.Conv3d, marks=pytest.mark.slow), nn.ConvTranspose3d])
def test_three_dimensions(layer: type[nn.Module]) -> None:
    check(Around(layer(8, 8, 3, bias=False), 3), floats(2, 3, 6, 7, 8), num_split=2)


@pytest.mark.parametrize("weights", [torch.contiguous_format, torch.channels_last], ids=["input", "both"])
def test_channels_last(weights: torch.memory_format) -> None:
    model = Around(nn.Conv2d(8, 8, 3, padding=1)).to(memory_format=weights)
    check(model, floats(2, 3, 12, 12, layout=torch.channels_last), num_split=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float64, marks=pytest.mark.slow)])
def test_types(dtype: torch.dtype) -> None:
    check(Around(nn.Conv2d(8, 8, 3, padding=1)).to(dtype), floats(2, 3, 12, 12, dtype=dtype), num_split=2)


def test_batch_of_one() -> None:
    check(Around(nn.Conv2d(8, 8, 3, padding=1)), floats(1, 3, 16, 16), num_split=2)


def test_batch_of_none() -> None:
    check(Around(nn.Conv2d(8, 8, 3, padding=1), norm=False), floats(0, 3, 12, 12), num_split=2, tight=False)


def test_weight_used_twice() -> None:
    check(Around(Twice(nn.Conv2d(8, 8, 3, padding=1))), floats(2, 3, 12, 12), num_split=3)


def test_input_that_needs_a_gradient() -> None:
    batches = [((args[0].requires_grad_(),), {}) for args, _ in floats(2, 3, 12, 12)]
    check(Around(nn.Conv2d(8, 8, 3, padding=1)), batches, num_split=3)


def test_frozen_layers_stay_one_op() -> None:
    check(Around(frozen(nn.Conv2d(8, 8, 3, padding=1))), floats(2, 3, 12, 12), num_split=1)


def test_frozen_weights_with_a_trained_bias() -> None:
    check(Around(frozen(nn.Conv2d(8, 8, 3, padding=1), bias=True)), floats(2, 3, 12, 12), num_split=2)


@pytest.mark.parametrize(("size", "first"), [(24, "weight"), (4, "input")])
def test_the_smaller_gradient_is_made_first(size: int, first: str) -> None:
    """The weights have 584 numbers, the input 4608 or 128."""
    model = Around(nn.Conv2d(8, 8, 3, padding=1))
    graph = captured(model, torch.randn(1, 3, size, size))
    names = [op.name for op in graph.ops if op.module == "layer" and op.target.split("+")[0] == BACKWARD]
    second = "input" if first == "weight" else "weight"
    assert names == [f"convolution_backward_1_{first}", f"convolution_backward_1_{second}"]


def _traced(function: Callable[..., tuple[Tensor, ...]], *args: Tensor) -> fx.GraphModule:
    module = make_fx(function, tracing_mode="fake")(*args)
    module.graph.eliminate_dead_code()
    split_convolutions(module)
    module.graph.lint()
    module.recompile()
    return module


def num_backward(module: fx.GraphModule) -> int:
    return len(module.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution_backward.default))


@pytest.mark.parametrize(
    ("mask", "num"),
    [
        ([True, True, True], 2),
        ([True, True, False], 2),
        ([True, False, True], 2),
        ([True, False, False], 1),
        ([False, True, True], 1),
        ([False, True, False], 1),
        ([False, False, True], 1),
    ],
)
def test_what_is_wanted_decides(mask: list[bool], num: int) -> None:
    def function(gradient: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        rest = [5], [1, 1], [1, 1], [1, 1], False, [0, 0], 1
        results = torch.ops.aten.convolution_backward(gradient, x, weight, *rest, output_mask=mask)
        return tuple(result for result, want in zip(results, mask, strict=True) if want)

    args = torch.randn(2, 5, 8, 8), torch.randn(2, 4, 8, 8), torch.randn(5, 4, 3, 3)
    module = _traced(function, *args)
    assert num_backward(module) == num
    assert all(map(torch.equal, module(*args), function(*args)))


@pytest.mark.parametrize(("read", "num"), [([0], 1), ([1, 2], 1), ([0, 2], 2)])
def test_no_op_for_what_nobody_reads(read: list[int], num: int) -> None:
    def function(gradient: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        rest = [5], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True]
        results = torch.ops.aten.convolution_backward(gradient, x, weight, *rest)
        return tuple(results[index] for index in read)

    args = torch.randn(2, 5, 8, 8), torch.randn(2, 4, 8, 8), torch.randn(5, 4, 3, 3)
    module = _traced(function, *args)
    assert num_backward(module) == num
    assert all(map(torch.equal, module(*args), function(*args)))


def test_results_that_are_passed_on_together_stay_so() -> None:
    def function(gradient: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        rest = [5], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True]
        return torch.ops.aten.convolution_backward(gradient, x, weight, *rest)

    module = make_fx(function, tracing_mode="fake")(
        torch.ones(2, 5, 8, 8), torch.ones(2, 4, 8, 8), torch.ones(5, 4, 3, 3)
    )
    output = output_node(module)
    output.args = (output.all_input_nodes[0].args[0],)
    split_convolutions(module)
    assert num_backward(module) == 1


def swapped(module: fx.GraphModule) -> None:
    """Split, and take the gradients of the input and of the weights for each other."""
    split_convolutions(module)
    taken = {node.args[0].name: node for node in module.graph.nodes if is_getitem(node)}
    of_input, of_weight = (taken[f"convolution_backward_{part}"] for part in ("input", "weight"))
    of_input.args, of_weight.args = of_weight.args, of_input.args


def test_a_wrong_split_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both gradients have the same shape, so that only their numbers can tell."""
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Tanh(), nn.Conv2d(8, 8, 3, padding=1, bias=False))
    batches = floats(8, 3, 3, 3)
    assert_exact(copy.deepcopy(model), batches)
    monkeypatch.setattr(SPLIT, swapped)
    with pytest.raises(AssertionError, match=r"step 0: gradient of 0\.weight differs"):
        assert_exact(model, batches)


class Taper(nn.Module):
    """As in most networks, large activations and small weights come first, and small ones and large weights then."""

    def __init__(self) -> None:
        super().__init__()
        early = [nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 8, 3, padding=1), nn.Tanh()]
        middle = [nn.Conv2d(8, 16, 4, stride=4), nn.Tanh(), nn.Conv2d(16, 64, 2, stride=2), nn.Tanh()]
        late = [nn.Conv2d(64, 64, 3, padding=1), nn.Tanh(), nn.Conv2d(64, 64, 3, padding=1), nn.Tanh()]
        self.layers = nn.Sequential(*early, *middle, *late)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


class Solid(nn.Module):
    """Three dimensions, in which kernels need the most memory of their own for the gradient of the input."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv3d(3, 16, 3, padding=1), nn.Tanh(), nn.Conv3d(16, 16, 3, stride=2), nn.Tanh()]
        self.layers = nn.Sequential(*layers, nn.Conv3d(16, 8, 1), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


@pytest.mark.parametrize(("kind", "shape"), [(Taper, (2, 3, 32, 32)), (Solid, (2, 3, 12, 12, 12))])
def test_predicted_peak_is_the_measured_peak(kind: type[nn.Module], shape: tuple[int, ...]) -> None:
    model, x = kind(), torch.randn(*shape)
    plain = copy.deepcopy(model)

    def measured(net: nn.Module) -> int:
        net(x).backward()
        net.zero_grad()
        peak = lowtide.measure_peak(lambda: net(x).backward())
        net.zero_grad()
        return peak

    with pytest.raises(InfeasibleBudgetError) as error:
        lowtide.plan(model, (x,), budget=1)
    peaks = []
    for budget, planner in (("100%", "keep_all"), (error.value.least_bytes, "auto")):
        lowtide.wrap(model, budget=budget, planner=planner)
        peaks.append(measured(model))
        (plan,) = lowtide.plans(model)
        assert peaks[-1] == plan.peak_bytes <= plan.budget_bytes
    assert peaks[1] < peaks[0]
    pairs = zip(expected_gradients(model, (x,)), expected_gradients(model, (x,))[1:], strict=False)
    smaller = max(size for (name, size), (other, _) in pairs if name == other)
    assert peaks[0] <= measured(plain) + smaller


def together(module: fx.GraphModule) -> None:
    """Change nothing."""


def test_gradients_of_weights_can_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Late weights' gradients are made when the early activations are gone, and nothing is recomputed for it."""
    how = {"budget": "60%", "planner": "auto", "costs": "analytic"}
    x = torch.randn(2, 3, 32, 32)
    apart = lowtide.plan(Taper(), (x,), **how)
    assert_exact(Taper(), floats(2, 3, 32, 32), wrap={"planner": Tightest()})
    assert apart.num_recomputed == 0
    assert apart.peak_bytes <= 0.6 * apart.baseline_peak_bytes
    monkeypatch.setattr(SPLIT, together)
    with pytest.raises(InfeasibleBudgetError) as error:
        lowtide.plan(Taper(), (x,), **how)
    assert error.value.least_bytes > apart.budget_bytes
    least = lowtide.plan(Taper(), (x,), **how | {"budget": error.value.least_bytes})
    assert least.num_recomputed > 0
    assert least.peak_bytes > apart.peak_bytes


def recomputed(plan: lowtide.Plan) -> set[str]:
    runs = Counter(plan.schedule.steps)
    return {plan.problem.graph.ops[op].name for op, num in runs.items() if num > 1}


def test_one_gradient_is_made_again_without_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    how = {"budget": 480_000, "planner": "greedy", "costs": "analytic"}
    x = torch.randn(2, 3, 32, 32)
    monkeypatch.setattr(SHAPE_ONLY, together)
    apart = lowtide.plan(Taper(), (x,), **how)
    monkeypatch.setattr(SPLIT, together)
    joint = lowtide.plan(Taper(), (x,), **how)
    assert recomputed(apart) == {f"{name}_weight" for name in recomputed(joint)}
    assert apart.peak_bytes == joint.peak_bytes
    assert 0 < apart.overhead < joint.overhead
