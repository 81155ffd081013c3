"""Runs for backward only end where the last tensor that backward reads is made: same bits, same peak, less work."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from itertools import pairwise
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import lowtide
from helpers.chain_cases import BATCH, DIM, Counting, Pair, Residual, WithExtra, assert_chain_exact, random_batches
from lowtide import errors
from lowtide.blocks.policy import EARLY_STOP
from lowtide.blocks.profile.chain_graph import ChainOp, OpRole, joined
from lowtide.plan.core.planner import AbstractPlanner, Proposal
from lowtide.plan.core.problem import Problem
from lowtide.progress import Progress, silent
from lowtide.schedule.expand import expand
from lowtide.schedule.steps import Schedule


@dataclass(frozen=True, kw_only=True)
class EveryBlock(AbstractPlanner):
    """Keep what is between blocks and recompute all that is inside."""

    def propose(self, problem: Problem, progress: Progress = silent) -> Proposal:
        graph = problem.graph
        made = [value for op in graph.forward for value in graph.ops[op].outputs]
        return Proposal(expand(graph, [value for value in made if "output" in graph.values[value].name]))


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop early in blocks that are too small for it to be worth the while, too."""
    monkeypatch.setattr("lowtide.blocks.profile.unit_costs.EARLY_STOP", replace(EARLY_STOP, run_seconds=-1.0))


class Ops(TorchDispatchMode):
    """Counts ops by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.GELU(), nn.Linear(3 * DIM, DIM))


def exact(blocks: list[Any], batches: list[Any], **how: Any) -> lowtide.Plan:
    plan = assert_chain_exact(blocks, batches, **({"planner": EveryBlock()} | how))
    assert stopped(plan), "no run stops early"
    return plan


def stopped(plan: lowtide.Plan) -> int:
    """Return how many runs of a plan stop early."""
    names = [plan.problem.graph.ops[op].name for op in plan.schedule.backward]
    return sum(a.endswith(" inside") and not b.endswith(" forward") for a, b in pairwise(names))


@pytest.mark.parametrize("make", [mlp, Residual, Counting, lambda: nn.Linear(DIM, DIM)])
@pytest.mark.parametrize("planner", [EveryBlock(), "greedy", "revolve", "chen_recursive"])
def test_bits_are_those_of_a_loop(make: Any, planner: Any) -> None:
    budget = "1TiB" if isinstance(planner, EveryBlock) else "88%"
    assert_chain_exact([make() for _ in range(9)], random_batches(), planner=planner, budget=budget)


def test_every_block_stops() -> None:
    plan = exact([mlp() for _ in range(5)], random_batches())
    assert stopped(plan) == 5
    assert stopped(exact([Residual() for _ in range(5)], random_batches(needs=False))) == 5


def test_several_tensors_extras_keywords_and_shared_weights() -> None:
    exact([Pair() for _ in range(4)], random_batches(tensors=2))
    exact([mlp()] * 4, random_batches())
    shared = torch.randn(BATCH, DIM, requires_grad=True)
    scale = torch.randn(DIM, requires_grad=True)
    batches = [(args, {"extras": [shared] * 4, "scale": scale}) for args, _ in random_batches()]
    exact([WithExtra() for _ in range(4)], batches)


def test_normalised_convolutions() -> None:
    def block() -> nn.Module:
        return nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))

    batches = [((torch.randn(2, 4, 9, 9, requires_grad=True),), {}) for _ in range(3)]
    exact([block() for _ in range(5)], batches)
    exact([block() for _ in range(5)], batches, set_to_none=False, zero_every=2)


def test_what_is_not_needed_is_not_computed() -> None:
    chained = lowtide.chain([mlp() for _ in range(4)], budget="1TiB", planner=EveryBlock())
    x, gradient = torch.randn(BATCH, DIM, requires_grad=True), torch.randn(BATCH, DIM)
    chained(x).backward(gradient)
    y = chained(x)
    with Ops() as ops:
        y.backward(gradient)
    # Of the two products of a block's forward the first is made again, and the second is not.
    assert ops.seen.count("addmm") == 4
    assert ops.seen.count("native_layer_norm") == 4


def test_a_block_that_saves_nothing_is_not_run_again() -> None:
    runs = 0

    def flip(x: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        return -x.flip(0) + 1

    chained = lowtide.chain([mlp(), flip, mlp()], budget="1TiB", planner=EveryBlock())
    x = torch.randn(BATCH, DIM)
    chained(x).sum().backward()
    runs = 0
    chained(x).sum().backward()
    assert runs == 1


def test_peak() -> None:
    blocks = [nn.Sequential(nn.Linear(64, 192), nn.GELU(), nn.Linear(192, 64)) for _ in range(10)]
    x, gradient = torch.randn(256, 64, requires_grad=True), torch.randn(256, 64)
    for planner, budget in ((EveryBlock(), "1TiB"), ("rotor", "60%"), ("rotor", "40%"), ("greedy", "40%")):
        chained = lowtide.chain(blocks, budget=budget, planner=planner)
        chained(x).backward(gradient)
        for tensor in (x, *chained.parameters()):
            tensor.grad = None
        (plan,) = chained.plans
        assert stopped(plan)
        assert lowtide.measure_peak(lambda c=chained: c(x).backward(gradient)) == plan.peak_bytes


def plain_and_chained(blocks: list[nn.Module]) -> tuple[nn.Module, Any]:
    """Return the same blocks twice: as they are, and in a chain that recomputes every one."""
    return nn.Sequential(*copy.deepcopy(blocks)), lowtide.chain(blocks, budget="1TiB", planner=EveryBlock())


def test_retain_graph_and_two_calls_before_backward() -> None:
    plain, chained = plain_and_chained([Residual() for _ in range(5)])
    x = torch.randn(BATCH, DIM, requires_grad=True)
    results = []
    for model in (plain, chained):
        torch.manual_seed(4)
        inputs = [x, *model.parameters()]
        y, z = model(x), model(2 * x)
        results.append(list(torch.autograd.grad(y.sum(), inputs, retain_graph=True)))
        results[-1] += torch.autograd.grad(z.sum(), inputs)
        results[-1] += torch.autograd.grad((y * y).sum(), inputs)
        results[-1] += [*model.buffers(), torch.get_rng_state()]
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_autocast_in_forward_only() -> None:
    plain, chained = plain_and_chained([mlp() for _ in range(3)])
    x = torch.randn(BATCH, DIM, requires_grad=True)
    found = []
    for model in (plain, chained):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(x)
        found.append(torch.autograd.grad(y.sum(), [x, *model.parameters()]))
    assert stopped(chained.plans[0])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


class _Doubled(torch.autograd.Function):
    """Reads what it saved twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,), (again,) = ctx.saved_tensors, ctx.saved_tensors
        return gradient * (x + again)


class _Private(torch.autograd.Function):
    """Keeps a tensor in its own way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.own = x.cos()
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.own


class Inside(nn.Module):
    """Something between two linear layers."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.first, self.second, self.function = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), function

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.function(self.first(x)))


def _checkpointed(x: Tensor) -> Tensor:
    return checkpoint(torch.tanh, x, use_reentrant=False, preserve_rng_state=False)


def _checkpointed_at_random(x: Tensor) -> Tensor:
    return checkpoint(F.dropout, x, 0.3, use_reentrant=False)


@pytest.mark.parametrize(
    "function", [_Doubled.apply, _checkpointed, lambda x: torch.relu_(x) + 1, lambda x: x**3.0 * 0.1]
)
def test_functions_inside(function: Any) -> None:
    exact([Inside(function) for _ in range(4)], random_batches())


@pytest.mark.parametrize("function", [_Private.apply, _checkpointed_at_random])
def test_functions_that_hold_tensors_in_their_own_way_run_whole(function: Any) -> None:
    plan = assert_chain_exact([Inside(function) for _ in range(4)], random_batches(), planner=EveryBlock())
    assert plan.num_recomputed
    assert not stopped(plan)


def test_a_block_that_catches_everything() -> None:
    def stubborn(x: Tensor) -> Tensor:
        try:
            return x + torch.relu_(x.sin())
        except Exception:
            return x.exp()

    x = torch.randn(BATCH, DIM, requires_grad=True)
    found = lowtide.chain([stubborn] * 3, budget="1TiB", planner=EveryBlock())(x)
    expected = stubborn(stubborn(stubborn(x)))
    assert torch.equal(*(torch.autograd.grad(y.sum(), x)[0] for y in (expected, found)))


def test_a_block_that_saves_less_later() -> None:
    # Not a counter: that would be set back for repeated runs.
    runs: SimpleQueue[int] = SimpleQueue()

    def fickle(x: Tensor) -> Tensor:
        runs.put(1)
        return x.sin().cos() + 1 if whole or runs.qsize() % 2 else x.sin() + 1

    whole = True
    chained = lowtide.chain([fickle, lambda x: x.sin() + 1], budget="1TiB", planner=EveryBlock())
    x = torch.randn(BATCH, DIM, requires_grad=True)
    chained(x).sum().backward()
    whole = False
    if runs.qsize() % 2:
        runs.put(1)
    y = chained(x)
    with pytest.raises(errors.InvalidModelError, match=r"Block 0 .*saved other tensors"):
        y.sum().backward()


def test_a_block_that_returns_less_later() -> None:
    number = 2
    chained = lowtide.chain([lambda a, b: (a.sin() + b, b + 1)[:number]] * 2, budget="1TiB", planner=EveryBlock())
    args = [torch.randn(BATCH, DIM, requires_grad=True) for _ in range(2)]
    chained(*args)
    assert stopped(chained.plans[0])
    number = 1
    with pytest.raises(errors.InvalidModelError, match="returned 1 tensors"):
        chained(*args)


def test_forward_hooks_do_not_run_where_a_run_has_stopped() -> None:
    blocks = [mlp() for _ in range(3)]
    queue: SimpleQueue[str] = SimpleQueue()
    for name, module in (("first", blocks[1][0]), ("last", blocks[1][3]), ("block", blocks[1])):
        module.register_forward_hook(lambda *_, name=name: queue.put(name))
    blocks[1].register_full_backward_hook(lambda *_: queue.put("backward"))
    chained = lowtide.chain(blocks, budget="1TiB", planner=EveryBlock())
    x = torch.randn(BATCH, DIM, requires_grad=True)
    chained(x).sum().backward()
    looked = queue.qsize()
    chained(x).sum().backward()
    calls = [queue.get() for _ in range(queue.qsize())][looked:]
    assert calls == ["first", "last", "block", "first", "backward"]


def test_ops_that_belong_together_are_joined() -> None:
    steps = [ChainOp(role, k) for k in (0, 1) for role in (OpRole.INSIDE, OpRole.FORWARD)]
    steps += [ChainOp(role, k) for k in (1, 0) for role in (OpRole.BACKWARD, OpRole.GRADIENTS)]
    backward = (1, 2, 3, 4, 0, 5, 2, 6, 7)
    assert joined(steps, Schedule((0, 1, 2, 3), backward)) == Schedule((0, 1, 2, 3), (0, 1, 2, 3, 4, 5, 0, 6, 7))


def test_it_is_left_where_it_is_not_worth_the_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.blocks.profile.unit_costs.EARLY_STOP", replace(EARLY_STOP, run_seconds=1.0))
    plan = assert_chain_exact([mlp() for _ in range(4)], random_batches(), planner=EveryBlock())
    assert plan.num_recomputed
    assert not stopped(plan)
    assert not any(op.name.endswith("inside") for op in plan.problem.graph.ops)
