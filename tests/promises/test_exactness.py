"""Planned training gives the bits of plain training, whatever the model does."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide
from helpers.exactness import (
    STEPS,
    Batch,
    DropEverything,
    Tightest,
    assert_exact,
    assert_same,
    first_loss,
    train,
)
from lowtide.errors import LowtideWarning


def floats(*shape: int, n: int = STEPS) -> list[Batch]:
    generator = torch.Generator().manual_seed(7)
    return [((torch.randn(*shape, generator=generator),), {}) for _ in range(n)]


# The other two recompute less, or in the given order alone; they are for `make test-all`.
OFTEN, SELDOM = ["all again", "waiting"], ["all once", "tightest"]


@pytest.fixture(params=[*OFTEN, *(pytest.param(each, marks=pytest.mark.slow) for each in SELDOM)])
def how(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.param in ("tightest", "waiting"):
        return {"planner": Tightest(waiting=request.param == "waiting")}
    return {"planner": DropEverything(again=request.param == "all again")}


class Randomness(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.drop(F.gelu(self.a(x)))
        h = (
            F.rrelu(h, training=self.training)
            + 0.1 * torch.rand_like(h)
            + torch.randn(32) * torch.bernoulli(torch.full((32,), 0.5))
        )
        h = F.alpha_dropout(h, 0.2, self.training)
        h = F.gumbel_softmax(self.drop(self.b(h)), dim=-1)
        return h.square().sum()


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8, momentum=0.3)
        self.bn3 = nn.BatchNorm2d(8, affine=False, track_running_stats=False)
        self.norm = nn.GroupNorm(2, 8)
        self.inst = nn.InstanceNorm2d(8, track_running_stats=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.bn1(self.conv1(x)), inplace=True)
        h = h + F.silu(self.bn2(self.conv2(h)))
        h = self.bn1(self.bn3(h))  # the statistics of bn1 are renewed twice
        return F.max_pool2d(self.inst(self.norm(h)), 2)


class Mutations(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        h = torch.sigmoid(self.lin(x) + self.seen + memory)
        self.seen.mul_(0.9).add_(h.detach().mean(0))
        self.calls += 1
        memory.add_(1)
        h = h * torch.tanh(h + memory)
        h[:, 0] = 0.5
        return h.sum()


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.gelu(self.lin(x))  # 4, 5, 12
        q, k, v = h.view(4, 5, 3, 4).unbind(2)
        a = torch.softmax(q.transpose(1, 2) @ k, -1)
        e = v.expand(3, 4, 5, 4).permute(1, 0, 3, 2).reshape(4, 12, 5)
        parts = e.split([4, 4, 4], dim=1)
        s = torch.cat([parts[0] @ a.new_ones(5, 1), parts[2][..., ::2].sum(-1, keepdim=True)], 1)
        return s.transpose(0, 1)[1:].contiguous() + torch.as_strided(s, (7, 4, 1), (1, 8, 1))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight
        self.block = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        for _ in range(3):  # a shared submodule
            h = h + self.block(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), ids.flatten())


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.base = nn.Linear(16, 16)
        self.down, self.up = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)
        self.out = nn.Linear(16, 20)
        for frozen in (self.embed, self.base, self.out):
            frozen.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.base(self.embed(ids)))
        h = self.base(h) + self.up(F.dropout(self.down(h), 0.1, self.training))
        return F.cross_entropy(self.out(torch.relu(h)).flatten(0, 1), ids.flatten())


@dataclass
class Output:
    loss: torch.Tensor
    hidden: torch.Tensor
    extra: Any = None


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, *, scale: float, bias: torch.Tensor | None = None, power: int = 2) -> Any:
        h = torch.tanh(self.lin(x)) * scale
        if bias is not None:
            h = h + bias
        return {
            "loss": h.pow(power).mean(),
            "parts": [h, h.detach(), h[0], x, None, 3],
            "data": Output(h.exp().sum(), h.transpose(0, 1), "text"),
            "input": bias,
        }


class Router(nn.Module):
    """Top-k routing over experts with static shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = torch.topk(torch.softmax(self.gate(x), -1), 2)
        mask = torch.zeros(x.shape[0], 4).scatter(1, chosen, weights)
        return (torch.stack([expert(x) for expert in self.experts], 1) * mask.unsqueeze(-1)).sum(1).square().mean()


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.bn = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.dropout(torch.relu(self.bn(self.a(x))), 0.2, self.training)
        torch._dynamo.graph_break()
        return torch.tanh(self.b(torch.sigmoid(h))).sum()


def ids(n: int = STEPS) -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    return [((torch.randint(0, 20, (4, 6), generator=generator),), {}) for _ in range(n)]


def test_random_ops_replay_in_every_copy(how: dict[str, Any]) -> None:
    model = assert_exact(Randomness(), floats(8, 16), wrap=how)
    if isinstance(how["planner"], DropEverything):
        (plan,) = lowtide.plans(model)
        again = [op for op in plan.schedule.backward if plan.problem.graph.ops[op].random]
        assert again, "no random op was recomputed"


def test_batch_norm_statistics_are_renewed_once(how: dict[str, Any]) -> None:
    model = assert_exact(Norms(), floats(4, 3, 8, 8), wrap=how)
    if isinstance(how["planner"], DropEverything):
        (plan,) = lowtide.plans(model)
        names = [plan.problem.graph.ops[op].target for op in plan.schedule.backward]
        assert "aten._native_batch_norm_legit_functional.default" in names


def test_buffers_and_inputs_changed_in_forward(how: dict[str, Any]) -> None:
    batches = [((*args, torch.full((8,), 0.1)), {}) for args, _ in floats(4, 8)]
    assert_exact(Mutations(), batches, wrap=how)


def test_views_and_expanded_gradients(how: dict[str, Any]) -> None:
    assert_exact(Views(), floats(4, 5, 6), wrap=how, loss=lambda out: out.sum())


def test_tied_weights_and_shared_submodules(how: dict[str, Any]) -> None:
    assert_exact(Tied(), ids(), wrap=how)


def test_frozen_parameters_and_adapters(how: dict[str, Any]) -> None:
    model = assert_exact(Lora(), ids(), wrap=how)
    assert all((p.grad is None) for p in model.base.parameters())


def test_structured_outputs_keywords_scalars_and_none() -> None:
    batches = [
        (args, {"scale": 0.5, "bias": torch.ones(8, requires_grad=True) if step else None, "power": 3})
        for step, (args, _) in enumerate(floats(4, 8))
    ]
    model = Structured()
    assert_exact(model, batches, loss=lambda out: out["loss"] + out["data"].loss + out["parts"][2].sum())
    out = model(torch.ones(4, 8), scale=2.0)
    assert isinstance(out["data"], Output)
    assert out["data"].extra == "text"
    assert out["parts"][4] is None
    assert out["parts"][5] == 3


def test_output_that_is_an_input() -> None:
    model = Structured()
    lowtide.wrap(model, budget="1TiB", planner=DropEverything(), costs="analytic")
    x = torch.ones(4, 8)
    assert model(x, scale=1.0)["parts"][3] is x


def test_outputs_stay_readable_after_backward(how: dict[str, Any]) -> None:
    model = lowtide.wrap(Views(), **({"budget": "1TiB", "costs": "analytic"} | how))
    out = model(torch.ones(4, 5, 6))
    before = out.detach().clone()
    out.sum().backward()
    assert torch.equal(out, before)


def test_loss_outside_the_model(how: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))
    target = torch.tensor([0, 1, 2, 3])
    assert_exact(model, floats(4, 8), wrap=how, loss=lambda out: F.cross_entropy(out, target))


def test_input_that_needs_a_gradient() -> None:
    batches = [((args[0].requires_grad_(),), {}) for args, _ in floats(4, 8)]
    assert_exact(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), batches)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("zero_every", [1, 2])
def test_accumulation_and_zeroing(set_to_none: bool, zero_every: int) -> None:
    assert_exact(Tied(), ids(4), set_to_none=set_to_none, zero_every=zero_every)


def test_autocast(how: dict[str, Any]) -> None:
    def call(model: nn.Module) -> Any:
        def run(*args: Any) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return model(*args)

        return run

    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Dropout(0.1), nn.Linear(32, 8))
    plain = copy.deepcopy(model)
    expected = train(plain, call(plain), floats(4, 16))
    lowtide.wrap(model, **({"budget": "1TiB", "costs": "analytic"} | how))
    assert_same(expected, train(model, call(model), floats(4, 16)))


@pytest.mark.parametrize("p", [0.04, 0.1, 0.025])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_scales_as_eager_does(p: float, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(p), nn.Tanh(), nn.Dropout(p), nn.Linear(16, 4)).to(dtype)
    assert_exact(model, [((args[0].to(dtype),), {}) for args, _ in floats(8, 16)])


class DropView(nn.Module):
    def __init__(self, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.lin, self.view = nn.Linear(16, 16), view

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.view(self.lin(x)), 0.1, self.training).square().mean()


@pytest.mark.parametrize(
    "view",
    [
        lambda h: h.transpose(1, 2).tanh(),
        lambda h: h.unsqueeze(0).contiguous(memory_format=torch.channels_last).tanh(),
        lambda h: h[:, :1].expand(-1, 5, -1),
        lambda h: h[:, ::2],
        lambda h: h.permute(2, 0, 1),
    ],
)
def test_dropout_draws_in_eagers_order(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert_exact(DropView(view), floats(3, 8, 16))


def test_train_eval_switch_and_no_grad() -> None:
    model = Norms()
    plain = copy.deepcopy(model)
    lowtide.wrap(model, budget="1TiB", planner=DropEverything(again=True), costs="analytic")
    x = floats(4, 3, 8, 8)[0][0][0]
    for _ in range(2):
        for mode in (True, False):
            model.train(mode), plain.train(mode)
            with torch.no_grad():
                assert torch.equal(model(x), plain(x))
            a, b = model(x), plain(x)
            assert torch.equal(a, b)
            a.sum().backward(), b.sum().backward()
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name
    for (name, p), q in zip(plain.named_buffers(), model.buffers(), strict=True):
        assert torch.equal(p, q), name
    assert len(lowtide.plans(model)) == 1


def test_eval_mode_is_not_planned() -> None:
    model = lowtide.wrap(nn.Linear(4, 4).eval(), budget="50%")
    model(torch.ones(2, 4)).sum().backward()
    assert lowtide.plans(model) == []


def test_two_shapes_alternate() -> None:
    batches = list(zip(floats(4, 16), floats(6, 16), strict=True))
    model = assert_exact(Randomness(), [batch for pair in batches for batch in pair])
    assert len(lowtide.plans(model)) == 2


def test_graph_breaks_make_blocks_of_one_step() -> None:
    model = assert_exact(Broken(), floats(4, 8))
    step, *blocks = lowtide.plans(model)
    assert isinstance(step, lowtide.StepPlan)
    assert len(blocks) == len(step.choice) == 2


def test_two_wrapped_models_do_not_mix() -> None:
    one, two = Tied(), Tied()
    plain = copy.deepcopy(one), copy.deepcopy(two)
    for model in (one, two):
        lowtide.wrap(model, budget="1TiB", planner=DropEverything(again=True), costs="analytic")
    for model, reference in zip((one, two), plain, strict=True):
        assert_same(train(reference, reference, ids()), train(model, model, ids()))
    assert len(lowtide.plans(one)) == len(lowtide.plans(two)) == 1


def test_a_router_decides_once(how: dict[str, Any]) -> None:
    model = assert_exact(Router(), floats(6, 8), wrap=how)
    (plan,) = lowtide.plans(model)
    decisions = [op for op, node in enumerate(plan.problem.graph.ops) if "topk" in node.target]
    assert decisions
    assert all(plan.schedule.steps.count(op) == 1 for op in decisions)
    assert "decision" in plan.problem.graph.ops[decisions[0]].pinned


def test_same_seed_same_result() -> None:
    model = lowtide.wrap(Randomness(), budget="1TiB", planner=DropEverything(again=True), costs="analytic")
    x = torch.ones(8, 16)

    def losses() -> list[float]:
        torch.manual_seed(5)
        return [model(x).item() for _ in range(3)]

    assert losses() == losses()


def test_two_forwards_before_their_backwards() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 3), nn.Tanh())
    plain = copy.deepcopy(model)
    lowtide.wrap(model, budget="1TiB", planner=DropEverything(again=True), costs="analytic")
    batches = floats(4, 3, 8, 8)
    for net in (plain, model):
        torch.manual_seed(1)
        one, two = net(*batches[0][0]), net(*batches[1][0])
        (one.sum() + two.square().sum()).backward()  # with no gradients yet
        one, two = net(*batches[1][0]), net(*batches[2][0])
        one.sum().backward()  # in the order of the forwards, on top of existing gradients
        two.sum().backward()
        one, two = net(*batches[1][0]), net(*batches[2][0])
        (one.sum() + two.square().sum()).backward()  # two paths to each parameter, existing gradients
    for (name, p), q in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(p.grad, q[1].grad), name
    for (name, p), q in zip(plain.named_buffers(), model.buffers(), strict=True):
        assert torch.equal(p, q), name


def test_parameters_used_outside_the_model_too() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    assert_exact(
        model,
        floats(4, 8, n=4),
        zero_every=3,
        loss=lambda out: out.square().sum() * 0.37,
    )
    plain = copy.deepcopy(model)
    for net in (plain, model):
        net.zero_grad()
        for args, _ in floats(4, 8):
            decay = sum(p.square().sum() for p in net.parameters()) * 0.013
            (net(*args).square().sum() * 0.37 + decay).backward()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_autograd_grad_and_hooks_see_their_gradients() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    plain = copy.deepcopy(model)
    lowtide.wrap(model, budget="1TiB", planner=DropEverything(), costs="analytic")
    x = torch.ones(4, 8)
    seen: dict[int, dict[str, torch.Tensor]] = {0: {}, 1: {}}
    for index, net in enumerate((plain, model)):
        net(x).sum().backward()
        first = net[0].weight.grad.clone()
        (gradient,) = torch.autograd.grad(net(x).square().sum(), [net[0].weight])
        assert torch.equal(net[0].weight.grad, first), "torch.autograd.grad must not accumulate"
        mine = seen[index]
        mine["asked for"] = gradient
        net[2].weight.register_hook(lambda g, mine=mine: mine.__setitem__("hook", g.clone()) or g * 2)
        net[2].bias.register_post_accumulate_grad_hook(lambda p, mine=mine: mine.__setitem__("post", p.grad.clone()))
        net(x).square().sum().backward()
        net(x).sum().backward(inputs=[net[0].bias])
    assert seen[0].keys() == seen[1].keys() == {"asked for", "hook", "post"}
    for name, gradient in seen[0].items():
        assert torch.equal(gradient, seen[1][name]), name
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_retained_graph_runs_again(how: dict[str, Any]) -> None:
    model = Randomness()
    plain = copy.deepcopy(model)
    lowtide.wrap(model, **({"budget": "1TiB", "costs": "analytic"} | how))
    for net in (plain, model):
        torch.manual_seed(2)
        loss = net(torch.ones(8, 16))
        loss.backward(retain_graph=True)
        loss.backward()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_second_derivative_is_refused() -> None:
    model = lowtide.wrap(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), budget="100%", costs="analytic")
    x = torch.ones(2, 4, requires_grad=True)
    with pytest.raises(lowtide.errors.UnsupportedBackwardError, match="second derivative"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    model(x).sum().backward()


def test_functions_can_be_wrapped() -> None:
    weight = torch.randn(8, 8, requires_grad=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x @ weight).tanh().sum()

    planned = lowtide.wrap(step, budget="1TiB", planner=DropEverything(), costs="analytic")
    x = torch.ones(4, 8)
    step(x).backward()
    expected, weight.grad = weight.grad, None
    planned(x).backward()
    assert torch.equal(weight.grad, expected)
    assert lowtide.unwrap(planned) is step


def test_compile_backend_does_the_same() -> None:
    model = Tied()
    plain = copy.deepcopy(model)
    options = {"budget": "1TiB", "planner": DropEverything(again=True), "costs": "analytic"}
    compiled = torch.compile(model, backend="lowtide", options=options, dynamic=False)
    assert_same(train(plain, plain, ids()), train(model, compiled, ids()))


def test_verify_compares_the_first_step() -> None:
    model = Norms()
    plain = copy.deepcopy(model)
    x = floats(4, 3, 8, 8)[0][0][0]
    torch.manual_seed(0)
    lowtide.wrap(model, budget="1TiB", planner=DropEverything(again=True), costs="analytic", verify=True)
    model(x).sum().backward()
    torch.manual_seed(0)
    plain(x).sum().backward()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    for p, q in zip(plain.buffers(), model.buffers(), strict=True):
        assert torch.equal(p, q)


def test_verify_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowtide.runtime import wrapped

    model = lowtide.wrap(nn.Linear(4, 4), budget="100%", costs="analytic", verify=True)
    honest = wrapped.Wrapped.train
    monkeypatch.setattr(wrapped.Wrapped, "train", lambda self, *a, **k: honest(self, *a, **k) + 1e-6)
    with pytest.raises(lowtide.errors.VerificationError, match="output 0"):
        model(torch.ones(2, 4))


def test_the_oracle_can_fail() -> None:
    plain, other = Tied(), Tied()
    with pytest.raises(AssertionError, match="differs"):
        assert_same(train(plain, plain, ids()), train(other, other, ids()))


def test_many_shapes_are_announced() -> None:
    model = lowtide.wrap(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), budget="1TiB", costs="analytic")
    for size in range(2, 7):
        model(torch.ones(size, 4)).sum().backward()
    with pytest.warns(LowtideWarning, match="compiled 6 times"):
        model(torch.ones(7, 4)).sum().backward()


def test_many_graphs_of_one_call_are_compiled_once() -> None:
    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(7))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            one, two, three, four, five, six, seven = self.layers
            x = one(x).tanh()
            torch._dynamo.graph_break()
            x = two(x).tanh()
            torch._dynamo.graph_break()
            x = three(x).tanh()
            torch._dynamo.graph_break()
            x = four(x).tanh()
            torch._dynamo.graph_break()
            x = five(x).tanh()
            torch._dynamo.graph_break()
            x = six(x).tanh()
            torch._dynamo.graph_break()
            return seven(x).sum()

    model = lowtide.wrap(Cut(), budget="1TiB", costs="analytic")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(torch.ones(2, 4)).backward()
    step = lowtide.plans(model)[0]
    assert isinstance(step, lowtide.StepPlan)
    assert len(step.choice) == 7
    assert not [each for each in caught if "compiled" in str(each.message)]
    for size in range(3, 7):
        model(torch.ones(size, 4)).backward()
    with pytest.warns(LowtideWarning, match="compiled 6 times"):
        model(torch.ones(7, 4)).backward()


def test_unwrapped_model_trains_as_if_never_wrapped() -> None:
    model = Tied()
    plain = copy.deepcopy(model)
    lowtide.wrap(model, budget="1TiB", planner=DropEverything(), costs="analytic")
    model(*ids()[0][0]).backward()
    model.zero_grad()
    assert lowtide.unwrap(model) is model
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(train(plain, plain, ids()), train(model, model, ids()))
    assert first_loss(model(*ids()[0][0])).grad_fn.name() != "CompiledFunctionBackward"


class LossAndMore(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 16), nn.Tanh())
        self.head = nn.Linear(16, 64)
        self.side = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.body(x)
        logits = self.head(h)
        return {"logits": logits, "loss": logits.logsumexp(-1).mean(), "side": torch.cat([self.side(h), h], -1)}


@pytest.mark.parametrize("used", [["loss"], ["logits"], ["loss", "side"], ["side"], ["loss", "logits", "side"]])
def test_gradients_for_some_of_the_outputs(how: dict[str, Any], used: list[str]) -> None:
    def loss(out: dict[str, torch.Tensor]) -> torch.Tensor:
        return sum((out[name].square().mean() for name in used), start=torch.zeros(()))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = assert_exact(LossAndMore(), floats(8, 8), wrap=how, loss=loss)
    (plan,) = lowtide.plans(model)
    tangents = next(op for op in plan.problem.graph.ops if op.name == "tangents")
    assert sum(plan.problem.graph.values[value].bytes for value in tangents.outputs) == 4
    told = any("not the loss" in str(warning.message) for warning in caught)
    assert told == (used != ["loss"])


def test_without_a_scalar_all_outputs_are_planned_for() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    lowtide.wrap(model, budget="100%", costs="analytic")
    model(torch.ones(4, 8)).sum().backward()
    (plan,) = lowtide.plans(model)
    tangents = next(op for op in plan.problem.graph.ops if op.name == "tangents")
    assert [plan.problem.graph.values[value].bytes for value in tangents.outputs] == [4 * 8 * 4]


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.1)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x.square().mean()


def test_the_budget_wins_over_the_models_own_checkpoints(how: dict[str, Any]) -> None:
    with pytest.warns(LowtideWarning, match="The budget decides"):
        assert_exact(Checkpointed(), floats(4, 8), wrap=how)
