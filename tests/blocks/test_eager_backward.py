"""Backward of the code between blocks: estimated from above in the first step, and measured from then on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowtide
from lowtide.blocks.step.eager_code import EagerNodes
from lowtide.blocks.step.eager_watch import EagerWatch
from lowtide.errors import InfeasibleBudgetError
from lowtide.measure import measure_peak
from lowtide.plan.planners.greedy import Greedy
from lowtide.step.policy import POLICY

DIM = 32
WIDE = 256
OFF_BYTES = 64 << 10
NAMED = {"blocks": ["layers"], "costs": "analytic", "planner": Greedy(effort=0.02)}

Tail = Callable[["Net", Tensor], Tensor]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    """Small layers, and eager code behind the first and the last of them whose backward takes most."""

    def __init__(self, tail: Tail, between: Tail | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head, self.back = nn.Linear(DIM, WIDE), nn.Linear(WIDE, DIM)
        self.tail, self.between = tail, between

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number == 0 and self.between is not None:
                x = torch.compiler.disable(self.between)(self, x)
        return torch.compiler.disable(self.tail)(self, x)


def log_softmax(net: Net, x: Tensor) -> Tensor:
    return F.log_softmax(x @ net.head.weight.t(), -1).square().mean()


def waves(net: Net, x: Tensor) -> Tensor:
    return (x @ net.head.weight.t()).exp().sin().cos().mean()


def head_and_loss(net: Net, x: Tensor) -> Tensor:
    return F.cross_entropy(net.head(x), torch.arange(len(x)) % WIDE)


def quotient(net: Net, x: Tensor) -> Tensor:
    wide = x @ net.head.weight.t()
    return (wide / (wide.tanh() + 3)).sum()


def normed(net: Net, x: Tensor) -> Tensor:
    wide = F.layer_norm(net.head(x), (WIDE,))
    return (F.silu(wide) * wide.var(-1, keepdim=True)).mean()


def fan_out(net: Net, x: Tensor) -> Tensor:
    wide = net.head(x)
    return (wide + wide.sigmoid() + wide.clamp(-1, 1)).logsumexp(-1).mean() + x.pow(3).mean()


def expanded(net: Net, x: Tensor) -> Tensor:
    """The gradients of the head's parameters are expanded scalars, of which leaves take copies."""
    return x.sum() + net.head.weight.sum() + net.head.bias.sum()


def wide_residual(net: Net, x: Tensor) -> Tensor:
    return x + net.back(net.head(x).sin().exp()) * 0.01


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 3 * (x * x)


def cubed(net: Net, x: Tensor) -> Tensor:
    return Cube.apply(net.head(x)).tanh().mean()


TAILS = [log_softmax, waves, head_and_loss, quotient, normed, fan_out, expanded, cubed]


@pytest.fixture
def x() -> Tensor:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return torch.randn(512, DIM)


def step(model: nn.Module, x: Tensor) -> Tensor:
    model.zero_grad()
    loss = model(x)
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize(
    ("tail", "between"), [(tail, None) for tail in TAILS] + [(tail, wide_residual) for tail in TAILS[:6]]
)
def test_later_steps_are_predicted_as_they_are(tail: Tail, between: Tail | None, x: Tensor) -> None:
    model = lowtide.wrap(Net(tail, between), budget="100%", **NAMED)
    for _ in range(2):
        step(model, x)
    predicted = lowtide.plans(model)[0].peak_bytes
    model.zero_grad()
    peak = measure_peak(lambda: model(x).backward())
    assert peak <= predicted <= peak + OFF_BYTES
    assert lowtide.plans(model)[0].peak_bytes == predicted


@pytest.mark.parametrize("share", [0.95, 0.85, 0.75])
@pytest.mark.parametrize("tail", [log_softmax, waves, head_and_loss])
def test_budgets_are_kept(tail: Tail, share: float, x: Tensor) -> None:
    plain = Net(tail, wide_residual)
    step(plain, x)
    plain.zero_grad()
    budget = int(share * measure_peak(lambda: plain(x).backward()))
    try:
        model = trained(tail, budget, x)
    except InfeasibleBudgetError as error:
        budget = error.least_bytes or 0
        model = trained(tail, budget, x)
    model.zero_grad()
    assert measure_peak(lambda: model(x).backward()) <= budget


def trained(tail: Tail, budget: int, x: Tensor) -> nn.Module:
    """Return a net that has trained three steps within the budget."""
    model = lowtide.wrap(Net(tail, wide_residual), budget=budget, **NAMED)
    for _ in range(3):
        step(model, x)
    return model


@pytest.mark.parametrize("tail", TAILS)
def test_bits_and_hooks_of_the_user_stay(tail: Tail, x: Tensor) -> None:
    plain = Net(tail, wide_residual)
    model = copy.deepcopy(plain)
    seen: dict[int, list[Tensor]] = {}

    def train(net: nn.Module) -> list[Tensor]:
        found = seen.setdefault(id(net), [])
        losses = []
        for _ in range(4):
            net.zero_grad()
            loss = net(x)
            loss.register_hook(lambda gradient: found.append(gradient.clone()))
            loss.grad_fn.register_hook(lambda made, _: found.extend(each.clone() for each in made if each is not None))
            loss.backward()
            losses += [loss.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]
        return losses

    expected = train(plain)
    actual = train(lowtide.wrap(model, budget="100%", **NAMED))
    assert len(expected) == len(actual)
    assert all(map(torch.equal, actual, expected))
    assert len(seen[id(plain)]) == len(seen[id(model)])
    assert all(map(torch.equal, seen[id(model)], seen[id(plain)]))


def test_hooks_are_gone_when_the_step_is_over(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    model = lowtide.wrap(Net(waves, wide_residual), budget="100%", **NAMED)
    entered, followed = [], []
    enter, follow = EagerWatch._enter, EagerWatch.follow
    monkeypatch.setattr(EagerWatch, "_enter", lambda *args: (entered.append(1), enter(*args)))
    monkeypatch.setattr(EagerWatch, "follow", lambda *args: (followed.append(1), follow(*args)))
    loss = model(x)
    loss.backward(retain_graph=True)
    first = len(entered)
    assert first == len(followed) > 0
    loss.backward()
    assert len(entered) == first
    for _ in range(3):
        step(model, x)
    recorded = len(followed)
    for _ in range(3):
        step(model, x)
    assert len(followed) == recorded == len(entered)


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


OPS: dict[str, Callable[[], Tensor]] = {
    name: (lambda name=name: getattr(torch, name)(leaf(256, 256)))  # type: ignore[misc]
    for name in [
        "exp",
        "sin",
        "cos",
        "tan",
        "tanh",
        "sigmoid",
        "erf",
        "erfinv",
        "expm1",
        "sinh",
        "cosh",
        "asinh",
        "atan",
        "log1p",
        "abs",
        "square",
        "rsqrt",
        "sqrt",
        "reciprocal",
        "log2",
        "acos",
        "prod",
        "var",
        "std",
        "sinc",
        "lgamma",
        "norm",
        "median",
        "amax",
        "max",
        "nan_to_num",
        "exp2",
        "relu",
        "trace",
        "tril",
        "sum",
        "mean",
    ]
} | {
    "gelu": lambda: F.gelu(leaf(256, 256)),
    "mish": lambda: F.mish(leaf(256, 256)),
    "prelu": lambda: F.prelu(leaf(256, 256), leaf(1)),
    "softmax": lambda: leaf(256, 256).softmax(-1),
    "cumprod": lambda: leaf(256, 256).cumprod(0),
    "logcumsumexp": lambda: leaf(256, 256).logcumsumexp(0),
    "logsumexp": lambda: leaf(256, 256).logsumexp(-1),
    "mul": lambda: leaf(256, 256) * leaf(256, 256),
    "mul_broadcast": lambda: leaf(256, 1) * leaf(256),
    "div": lambda: leaf(256, 256) / leaf(256, 256),
    "div_broadcast": lambda: leaf(256, 1) / leaf(256),
    "pow": lambda: leaf(256, 256) ** 3,
    "pow_of_tensors": lambda: leaf(256, 256).abs() ** leaf(256, 256),
    "atan2": lambda: torch.atan2(leaf(256, 256), leaf(256, 256)),
    "where": lambda: torch.where(torch.rand(256, 256) > 0.5, leaf(256, 256), leaf(256, 256)),
    "lerp": lambda: torch.lerp(leaf(256, 256), leaf(256, 256), leaf(256, 256)),
    "matmul": lambda: leaf(256, 256) @ leaf(256, 256).t(),
    "linear": lambda: F.linear(leaf(256, 64), leaf(512, 64), leaf(512)),
    "einsum": lambda: torch.einsum("bij,bjk->bik", leaf(4, 128, 64), leaf(4, 64, 128)),
    "conv1d": lambda: F.conv1d(leaf(2, 8, 256), leaf(16, 8, 3)),
    "conv2d": lambda: F.conv2d(leaf(2, 8, 32, 32), leaf(16, 8, 3, 3), leaf(16), padding=1),
    "conv3d": lambda: F.conv3d(leaf(2, 4, 8, 16, 16), leaf(8, 4, 3, 3, 3)),
    "depthwise": lambda: F.conv2d(leaf(2, 16, 32, 32), leaf(16, 1, 3, 3), padding=1, groups=16),
    "layer_norm": lambda: F.layer_norm(leaf(256, 256), (256,), leaf(256), leaf(256)),
    "group_norm": lambda: F.group_norm(leaf(16, 16, 16, 16), 4, leaf(16), leaf(16)),
    "batch_norm": lambda: F.batch_norm(leaf(64, 16, 16), None, None, leaf(16), leaf(16), training=True),
    "rms_norm": lambda: F.rms_norm(leaf(256, 256), (256,), leaf(256)),
    "attention": lambda: F.scaled_dot_product_attention(leaf(2, 4, 64, 32), leaf(2, 4, 64, 32), leaf(2, 4, 64, 32)),
    "cross_entropy": lambda: F.cross_entropy(leaf(256, 256), torch.arange(256)),
    "smoothed": lambda: F.cross_entropy(leaf(256, 256), torch.arange(256), label_smoothing=0.1),
    "mse": lambda: F.mse_loss(leaf(256, 256), torch.randn(256, 256)),
    "bce": lambda: F.binary_cross_entropy_with_logits(leaf(256, 256), torch.rand(256, 256)),
    "cosine_similarity": lambda: F.cosine_similarity(leaf(256, 256), leaf(256, 256)),
    "normalize": lambda: F.normalize(leaf(256, 256)),
    "cdist": lambda: torch.cdist(leaf(64, 64), leaf(64, 64)),
    "inv": lambda: torch.linalg.inv(leaf(128, 128)),
    "qr": lambda: torch.linalg.qr(leaf(128, 128))[1],
    "solve": lambda: torch.linalg.solve(leaf(128, 128), leaf(128, 128)),
    "lstm_cell": lambda: torch.lstm_cell(
        leaf(64, 64), (leaf(64, 64), leaf(64, 64)), leaf(256, 64), leaf(256, 64), leaf(256), leaf(256)
    )[0],
    "half": lambda: (leaf(256, 256, dtype=torch.bfloat16).sin() @ leaf(256, 256, dtype=torch.bfloat16)).float().cos(),
    "log_softmax_squared": lambda: F.log_softmax(leaf(256, 32) @ leaf(32, 256), -1).square().mean(),
    "waves": lambda: (leaf(256, 32) @ leaf(32, 256)).exp().sin().cos().mean(),
    "cube": lambda: Cube.apply(leaf(256, 256)).tanh(),
}


@pytest.mark.parametrize("name", OPS)
def test_estimates_are_not_too_low(name: str) -> None:
    torch.manual_seed(0)
    OPS[name]().sum().backward()
    out = OPS[name]()
    gradient = torch.randn_like(out)
    part = EagerNodes().behind([out])
    peak = measure_peak(lambda: out.backward(gradient))
    assert peak <= part.backward_peak_bytes


@pytest.mark.parametrize("rows", [16, 1024])
def test_products_are_not_counted_in_the_size_of_their_results(rows: int) -> None:
    def head() -> Tensor:
        return F.linear(leaf(rows, 64), leaf(2048, 64), leaf(2048))

    out, gradient = head(), torch.randn(rows, 2048)
    part = EagerNodes().behind([out])
    peak = measure_peak(lambda: out.backward(gradient))
    assert part.backward_peak_bytes <= peak + POLICY.scalar_bytes


def test_gradients_of_one_part_are_not_taken_for_those_of_another() -> None:
    """The newest nodes each take a gradient of a block; none of them frees what the others have made."""
    inputs = [leaf(256, 256) for _ in range(4)]
    outs = [each.exp().tanh() for each in inputs]
    gradients = [torch.randn(256, 256) for _ in outs]
    part = EagerNodes().behind(outs)
    peak = measure_peak(lambda: torch.autograd.backward(outs, gradients))
    assert peak <= part.backward_peak_bytes
