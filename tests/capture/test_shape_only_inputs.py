"""What an op reads for its shape alone need not be there, and nobody sees it but the planner."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import lowtide
from helpers.exactness import Batch, DropEverything, assert_exact, assert_same, train
from lowtide import device
from lowtide.capture.memory_rewrites import as_traced
from lowtide.capture.shape_only_inputs import READS_SHAPE, is_stand_in, replace_shape_only_inputs
from lowtide.errors import InfeasibleBudgetError, InvalidInputError
from lowtide.graph.ir import Graph
from lowtide.testing.models import MODELS

aten = torch.ops.aten
STATUS = Path("/proc/self/statm")
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def like(tensor: Tensor) -> Tensor:
    return numbers(*tensor.shape, seed=1).to(tensor.dtype).to(memory_format=memory_format(tensor))


def memory_format(tensor: Tensor) -> torch.memory_format:
    last = LAST.get(tensor.dim())
    return last if last and tensor.is_contiguous(memory_format=last) else torch.contiguous_format


def arguments(target: Any, x: Tensor) -> tuple[Any, ...]:
    """Return what backward calls `target` with after its forward has been called with `x`."""
    name, dims = str(target).split(".")[1], x.dim() - 2
    if "pad" in name:
        x, sides = (x[0], [1, 2]) if "1d" in name else (x, [1] * 2 * dims)
        return like(getattr(aten, name.removesuffix("_backward"))(x, sides)), x, sides
    if name.startswith("_adaptive_avg"):
        return like(getattr(aten, name.removesuffix("_backward"))(x, [2] * dims)), x
    if name.startswith("adaptive_max"):
        out, places = getattr(aten, name.removesuffix("_backward"))(x, [3] * dims)
        return like(out), x, places
    window = [3] * dims, [2] * dims, [1] * dims
    if name.startswith("avg_pool"):
        return like(getattr(aten, name.removesuffix("_backward"))(x, *window)), x, *window, False, True, None
    out, places = getattr(aten, name.removesuffix("_backward"))(x, *window)
    return like(out), x, *window, [1] * dims, False, places


def results(target: Any, *args: Any) -> list[Tensor]:
    made = target(*args)
    return [made] if isinstance(made, Tensor) else [result for result in made if result is not None]


def assert_reads_shape_alone(target: Any, args: tuple[Any, ...], position: int) -> None:
    """Raise unless `target` makes the same bits in the same layout whatever numbers the argument has."""
    x, expected = args[position], results(target, *args)
    others = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).fill_(number) for number in (torch.nan, 1e4)]
    untouched = device.untouched_zeros(x.shape, x.stride(), x.dtype)
    assert untouched is not None
    for other in (*others, untouched):
        found = results(target, *args[:position], other, *args[position + 1 :])
        for one, two in zip(expected, found, strict=True):
            assert torch.equal(one, two)
            assert one.stride() == two.stride()


POOLINGS = [target for target in READS_SHAPE if target is not aten.convolution_backward.default]


@pytest.mark.parametrize("target", POOLINGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_kernels_read_the_shape_alone(target: Any, dtype: torch.dtype) -> None:
    size = (6, 6, 6) if "3d" in str(target) else (9, 8)
    for batch, layout in itertools.product((1, 3), (None, LAST[2 + len(size)])):
        x = numbers(batch, 8, *size).to(dtype)
        if layout:
            x = x.to(memory_format=layout)
        try:
            args = arguments(target, x)
        except NotImplementedError as error:
            pytest.skip(str(error))
        assert_reads_shape_alone(target, args, READS_SHAPE[target])


@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.filterwarnings("ignore:TF32")
@pytest.mark.parametrize("mkldnn", [True, False], ids=["onednn", "native"])
@pytest.mark.parametrize("every", [23, pytest.param(1, marks=pytest.mark.slow)])
def test_convolutions_read_the_shape_alone(
    dtype: torch.dtype, dims: int, transposed: bool, mkldnn: bool, every: int
) -> None:
    """Of every 23rd case, too, some have each value of each argument: 23 divides no number of choices."""
    layouts = [False, True] if dims > 1 else [False]
    cases = itertools.product((1, 8, 4), (1, 3), (1, 2), (1, 3), layouts, layouts, (1, 2))
    threads = torch.get_num_threads()
    try:
        for groups, batch, stride, kernel, x_last, weight_last, num_threads in itertools.islice(cases, 0, None, every):
            torch.set_num_threads(num_threads)
            x = numbers(batch, 8, *[7] * dims).to(dtype)
            weight = numbers(8, 8 // groups, *[kernel] * dims).to(dtype)
            x = x.to(memory_format=LAST[x.dim()]) if x_last else x
            weight = weight.to(memory_format=LAST[x.dim()]) if weight_last else weight
            rest = [stride] * dims, [kernel // 2] * dims, [1] * dims, transposed, [0] * dims, groups
            with torch.backends.mkldnn.flags(enabled=mkldnn):
                out = aten.convolution(x, weight, None, *rest)
                args = like(out), x, weight, None, *rest, [True, False, False]
                assert_reads_shape_alone(aten.convolution_backward, args, 1)
    finally:
        torch.set_num_threads(threads)


def test_a_kernel_that_reads_numbers_would_be_seen() -> None:
    x = numbers(2, 8, 9, 9)
    with pytest.raises(AssertionError):
        assert_reads_shape_alone(aten.gelu_backward, (like(x), x), 1)
    gradient, weight = like(x), numbers(8, 8, 1, 1)
    rest = [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False]
    with pytest.raises(AssertionError):
        assert_reads_shape_alone(aten.convolution_backward, (gradient, x, weight, None, *rest), 1)


def resident_bytes() -> int:
    return int(STATUS.read_text().split()[1]) * 4096


@pytest.mark.skipif(not STATUS.exists(), reason="the system does not say how much memory a process has")
def test_untouched_zeros_take_no_memory() -> None:
    before = resident_bytes()
    tensor = device.untouched_zeros((1 << 14, 1 << 14), (1 << 14, 1), torch.float32)
    assert tensor is not None
    assert tensor.nbytes == 1 << 30
    assert not tensor[:: 1 << 10].any()
    assert resident_bytes() - before < 1 << 26
    assert lowtide.measure_peak(lambda: device.untouched_zeros((1 << 14, 1 << 14), (1, 1 << 14), torch.float64)) < 100


def test_untouched_zeros_have_the_shape_asked_for() -> None:
    small = device.untouched_zeros((2, 3, 4), (12, 1, 3), torch.bfloat16)
    assert small is not None
    assert (small.shape, small.stride(), small.dtype) == ((2, 3, 4), (12, 1, 3), torch.bfloat16)
    large = device.untouched_zeros((1 << 20,), (1,), torch.float64)
    assert large is not None
    assert not small.any()
    assert not large.any()


def test_only_the_cpu_has_untouched_zeros() -> None:
    assert device.has_untouched_zeros("cpu")
    assert not device.has_untouched_zeros("cuda")
    with pytest.raises(InvalidInputError):
        device.has_untouched_zeros("meta")


def no_pages(number: int) -> None:
    raise OSError(f"no addresses for {number} bytes")


def test_without_addresses_to_spare_tensors_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    with as_traced():
        traced = captured(Layers(), numbers(2, 3, 24, 24))
    monkeypatch.setattr(device, "_untouched_pages", no_pages)
    assert device.untouched_zeros((2, 3), (3, 1), torch.float32) is None
    graph = captured(Layers(), numbers(2, 3, 24, 24))
    read = {op.name: len(op.inputs) for op in graph.ops if "backward" in op.target and "+" not in op.target}
    assert read
    assert read.items() <= {op.name: len(op.inputs) for op in traced.ops}.items()
    assert_exact(Layers(), batches(2, 3, 24, 24))


def captured(model: nn.Module, *args: Tensor) -> Graph:
    return lowtide.plan(model, args, budget="100%", planner="keep_all", costs="analytic").problem.graph


class Layers(nn.Module):
    """Each kind of layer whose backward reads the shape of its input, behind one whose result is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.pools = nn.ModuleList([nn.MaxPool2d(2), nn.AvgPool2d(3, 1, 1), nn.ReflectionPad2d(1)])
        self.convolutions = nn.ModuleList([nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 8, 1)])
        self.last = nn.ConvTranspose2d(8, 4, 3, stride=2)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        for pool, convolution in zip(self.pools, self.convolutions, strict=True):
            x = torch.tanh(convolution(pool(torch.sin(x))).sin())
        x = nn.functional.adaptive_avg_pool2d(torch.sin(self.norm(x)), (3, 3))
        return self.last(x).square().sum()


def batches(*shape: int, layout: torch.memory_format = torch.contiguous_format) -> list[Batch]:
    return [((numbers(*shape, seed=seed).to(memory_format=layout),), {}) for seed in range(3)]


def three_quarters_or_least(model: nn.Module, x: torch.Tensor) -> int:
    """Return three quarters of the unplanned peak, or the least that works where a kernel needs more than that."""
    try:
        return lowtide.plan(model, (x,), budget="75%").budget_bytes
    except lowtide.errors.InfeasibleBudgetError as error:
        return error.least_bytes


@pytest.mark.parametrize(
    ("dtype", "layout"),
    [
        (torch.float32, torch.contiguous_format),
        (torch.bfloat16, torch.channels_last),
        pytest.param(torch.float32, torch.channels_last, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, torch.contiguous_format, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_training_is_exact(layout: torch.memory_format, dtype: torch.dtype) -> None:
    model = Layers().to(dtype).to(memory_format=layout)
    steps = [((x.to(dtype),), kwargs) for (x,), kwargs in batches(2, 3, 24, 24, layout=layout)]
    for again in (False, True):
        assert_exact(copy.deepcopy(model), steps, wrap={"planner": DropEverything(again=again)})
    plain = copy.deepcopy(model)
    planned = lowtide.wrap(copy.deepcopy(model), budget=three_quarters_or_least(model, *steps[0][0]))
    assert_same(train(plain, plain, steps), train(planned, planned, steps))
    planned.zero_grad()
    (plan,) = lowtide.plans(planned)
    measured = lowtide.measure_peak(lambda: planned(*steps[0][0]).backward())
    # What a convolution needs inside depends by a few bytes on where its arguments lie in memory.
    assert 0 <= plan.peak_bytes - measured <= 256


def test_nothing_reads_what_it_would_not_look_at() -> None:
    graph = captured(Layers(), numbers(2, 3, 24, 24))
    with as_traced():
        traced = captured(Layers(), numbers(2, 3, 24, 24))

    def read(graph: Graph) -> dict[str, int]:
        ops = [op for op in graph.ops if op.name.endswith("_input") or "pool" in op.target or "pad2d" in op.target]
        return {op.name: len(op.inputs) for op in ops if "backward" in op.target}

    assert {name: count - read(graph)[name] for name, count in read(traced).items()} == dict.fromkeys(read(traced), 1)
    assert len(read(graph)) == 8
    assert not any(value.name.startswith("lowtide") for value in graph.values)


def test_the_input_of_a_frozen_layer_is_not_kept() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), *[nn.Conv2d(8, 8, 3, padding=1) for _ in range(4)])
    for layer in list(model)[1:]:
        layer.requires_grad_(False)
    x = numbers(2, 3, 32, 32)
    plan = lowtide.plan(model, (x,), budget="100%", planner="keep_all", costs="analytic")
    with as_traced():
        traced = lowtide.plan(model, (x,), budget="100%", planner="keep_all", costs="analytic")
    one = 4 * 2 * 8 * 32 * 32
    assert traced.saved_bytes - plan.saved_bytes == 4 * one


def test_stand_ins_are_no_state_of_the_model() -> None:
    model = Layers()
    keys = list(model.state_dict())
    lowtide.wrap(model, budget="80%", costs="analytic")
    model(numbers(2, 3, 24, 24)).backward()
    assert list(model.state_dict()) == keys
    assert len(list(model.buffers())) == len(list(Layers().buffers()))


class OneChannel(nn.Module):
    """A norm and a convolution over sizes of 1, whose strides are nobody's but choose the convolution's kernel."""

    def __init__(self, channels: int, side: int, dims: int = 2) -> None:
        super().__init__()
        self.side, self.dims = (side,) * dims, dims
        self.first = (nn.Conv2d if dims == 2 else nn.Conv3d)(channels, channels, 3, padding=1)
        self.norm = nn.LayerNorm(channels)
        self.conv = (nn.Conv2d if dims == 2 else nn.Conv3d)(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(self.first(x).flatten(2).transpose(1, 2))
        h = rows.transpose(1, 2).reshape(rows.shape[0], -1, *self.side)
        return (self.conv(h) + h).square().mean()


@pytest.mark.parametrize(
    ("batch", "channels", "side", "dims"),
    [(16, 1, 7, 2), (1, 1, 7, 2), (1, 3, 7, 2), (4, 8, 1, 2), (4, 1, 3, 3), (2, 4, 1, 3), (1, 1, 1, 2)],
)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_layouts_that_are_open_are_those_of_eager(batch: int, channels: int, side: int, dims: int, seed: int) -> None:
    shape = (batch, channels, *(side,) * dims)
    torch.manual_seed(seed)
    assert_exact(OneChannel(channels, side, dims), [((numbers(*shape, seed=seed),), {})])


class TwoResults(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 8, 3)) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x).sin().sum(), self.two(x).sin().mean((1, 2, 3))


@pytest.mark.filterwarnings("ignore:A gradient came for an output")
@pytest.mark.parametrize("loss", [lambda r: r[0], lambda r: r[1].sum(), lambda r: r[0] + r[1].sum()])
def test_whatever_gradients_come(loss: Callable[[Any], Tensor]) -> None:
    assert_exact(TwoResults(), batches(2, 3, 12, 12), loss=loss)


def with_stand_ins(function: Callable[..., Any], *args: Tensor) -> fx.GraphModule:
    module = make_fx(function, tracing_mode="fake")(*args)
    for _ in range(2):  # the second time there is nothing left to do
        replace_shape_only_inputs(module)
    module.graph.lint()
    module.recompile()
    return module


def num_stand_ins(module: fx.GraphModule) -> int:
    return sum(is_stand_in(node) for node in module.graph.nodes)


def of_input(gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    rest = [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    return aten.convolution_backward(gradient, x, weight, None, *rest, [True, False, False])[0]


def test_one_for_each_layout() -> None:
    def function(x: Tensor, weight: Tensor, wide: Tensor) -> Tensor:
        return of_input(x, x.sin(), weight) + of_input(x, x.cos(), weight) + of_input(wide, wide.cos(), weight).sum()

    args = numbers(2, 8, 9, 9), numbers(8, 8, 1, 1), numbers(2, 8, 5, 5)
    module = with_stand_ins(function, *args)
    assert num_stand_ins(module) == 2
    assert torch.equal(module(*args), function(*args))


def test_what_somebody_reads_stays() -> None:
    rest = [1, 1], [0, 0], [1, 1], False, [0, 0], 1

    def both(x: Tensor, weight: Tensor) -> Tensor:
        made = aten.convolution_backward(x, x.cos(), weight, [8], *rest, [True, True, True])
        return made[0].sum() + made[1].sum() + made[2].sum()

    def twice(x: Tensor, weight: Tensor) -> Tensor:
        y = x.cos()
        return of_input(y, y, weight)

    def part(x: Tensor, weight: Tensor) -> Tensor:
        return of_input(x, torch.cat([x, x])[:2], weight)

    args = numbers(2, 8, 9, 9), numbers(8, 8, 1, 1)
    for function in (both, twice, part):
        module = with_stand_ins(function, *args)
        assert num_stand_ins(module) == 0
        assert torch.equal(module(*args), function(*args))


@pytest.mark.parametrize("levels", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_less_memory_is_needed(levels: int) -> None:
    model, args, kwargs = MODELS["unet"](levels=levels, width=8, size=64, batch=2)

    def least() -> int:
        with pytest.raises(InfeasibleBudgetError) as caught:
            lowtide.plan(model, args, kwargs, budget=1, costs="analytic", planner="greedy")
        return caught.value.least_bytes

    ours = least()
    with as_traced():
        assert ours < least()
