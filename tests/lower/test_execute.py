"""Cheaper calls must compute the same, and leave out only what changes nothing."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from lowtide.capture.normalise import dropout_mask, dropout_noise
from lowtide.lower.execute import _FUNCTIONS, quicken

aten = torch.ops.aten


def traced(fn: Callable[..., object], *args: Tensor) -> fx.GraphModule:
    return make_fx(fn, tracing_mode="fake")(*args)


def calls(module: fx.GraphModule) -> int:
    return sum(node.op == "call_function" for node in module.graph.nodes)


def test_views_that_change_nothing_are_left_out() -> None:
    def fn(x: Tensor) -> Tensor:
        y = aten.t.default(aten.t.default(x))
        y = aten.expand.default(aten.view.default(y, [4, 6]), [4, 6])
        y = aten.alias.default(aten.detach.default(y))
        y = aten.view.default(aten.view.default(y, [2, 12]), [3, 8])
        return aten.exp.default(y)

    x = torch.randn(4, 6)
    module = traced(fn, x)
    quick = quicken(module)
    assert calls(quick) == 2
    assert torch.equal(quick(x), fn(x))


def test_what_is_returned_stays_a_tensor_of_its_own() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = aten.exp.default(x)
        return y, aten.detach.default(y)

    x = torch.randn(3)
    one, other = quicken(traced(fn, x))(x)
    assert one is not other
    assert torch.equal(one, other)


def test_module_is_not_changed() -> None:
    x = torch.randn(4, 6)
    module = traced(lambda x: aten.mm.default(x, aten.t.default(x)), x)
    before = [str(node.target) for node in module.graph.nodes]
    quicken(module)
    assert [str(node.target) for node in module.graph.nodes] == before


SAMPLES = {
    aten._softmax.default: lambda x: (x, -1, False),
    aten._unsafe_view.default: lambda x: (x, [6, 4]),
    aten.add.Tensor: lambda x: (x, 0.1),
    aten.addmm.default: lambda x: (x[0], x, x.new_ones(6, 6)),
    aten.bmm.default: lambda x: (x[None], x.t()[None]),
    aten.cat.default: lambda x: ([x, x], 1),
    aten.div.Tensor: lambda x: (x, 3.0),
    aten.expand.default: lambda x: (x[None], [5, -1, -1]),
    aten.mm.default: lambda x: (x, x.t()),
    aten.mul.Tensor: lambda x: (x, x),
    aten.native_layer_norm.default: lambda x: (x, [6], None, None, 1e-5),
    aten.permute.default: lambda x: (x, [1, 0]),
    aten.reshape.default: lambda x: (x, [3, 8]),
    aten.sub.Tensor: lambda x: (x, 0.7),
    aten.sum.dim_IntList: lambda x: (x, [0], True),
    aten.transpose.int: lambda x: (x, 0, -1),
    aten.unsqueeze.default: lambda x: (x, 1),
    aten.view.default: lambda x: (x, [3, 8]),
}


@pytest.mark.parametrize("target", _FUNCTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_function_is_the_op(target: torch._ops.OpOverload, dtype: torch.dtype) -> None:
    x = torch.randn(4, 6).to(dtype)
    args = SAMPLES.get(target, lambda x: (x,))(x)
    expected, got = target(*args), _FUNCTIONS[target](*args)
    pairs = zip(expected, got, strict=True) if isinstance(expected, tuple) else [(expected, got)]
    for one, other in pairs:
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
        assert one.dtype == other.dtype
        assert (one.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()) == (
            other.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("keep", [0.9, 0.5, 0.96, 1e-3])
def test_mask_and_noise_are_eagers(dtype: torch.dtype, keep: float) -> None:
    for x in (torch.ones(7), torch.ones(64, 33).t(), torch.ones(3, 1, 5).expand(3, 4, 5), torch.ones(2, 3, 4, 5)[::2]):
        x = x.to(dtype)
        torch.manual_seed(1)
        expected = torch.empty_like(x).bernoulli_(keep).div_(keep)
        state = torch.get_rng_state()
        torch.manual_seed(1)
        noise = dropout_noise(dropout_mask(x, keep), keep, dtype)
        assert torch.equal(noise, expected)
        assert noise.stride() == expected.stride()
        assert torch.equal(torch.get_rng_state(), state)
