"""Steps of blocks under attack: ways to break the promise that worked once, and their families."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.blocks.step.block_figures import BlockFigures
from lowtide.blocks.step.eager_code import EagerNodes
from lowtide.errors import (
    InfeasibleBudgetError,
    InvalidModelError,
    InvalidOptionError,
    UnsupportedBackwardError,
    VerificationError,
)
from lowtide.measure import measure_peak
from lowtide.plan.menu import make_menu
from lowtide.plan.planners.greedy import Greedy
from lowtide.step.step_block import StepBlock

DIM = 32
QUICK = Greedy(effort=0.02)
NAMED = {"blocks": ["layers"], "costs": "analytic", "planner": QUICK}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Checkpointed(Net):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x.square().mean()


@pytest.fixture
def x() -> Tensor:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return torch.randn(512, DIM)


def scale(weight: Tensor) -> None:
    weight.data.mul_(1.3)


def through_numpy(weight: Tensor) -> None:
    weight.detach().numpy()[:] *= 1.3


def replace(weight: Tensor) -> None:
    weight.data = weight.data * 1.3


@pytest.mark.parametrize("change", [scale, through_numpy, replace])
def test_verify_sees_what_blocks_recompute_from(change: Callable[[Tensor], None], x: Tensor) -> None:
    model = lowtide.wrap(Net(), budget="55%", verify=True, **NAMED)
    for _ in range(2):
        model.zero_grad()
        model(x).backward()
    loss = model(x)
    for layer in model.layers:
        change(layer.up.weight)
    with pytest.raises(VerificationError, match="changed between forward and backward"):
        loss.backward()


@pytest.mark.parametrize("blocks", ["whole", ["layers"]])
def test_verify_tells_calls_apart(blocks: str | list[str], x: Tensor) -> None:
    model = lowtide.wrap(Net(), budget="60%", verify=True, **NAMED | {"blocks": blocks})
    first, second = model(x), model(2 * x)
    first.backward()
    second.backward()


def test_variants_that_never_ran_take_what_others_of_their_block_took() -> None:
    problem = lowtide.plan(Net(1), (torch.randn(8, DIM),), budget="100%", costs="analytic").problem
    figures = BlockFigures([StepBlock("layer", make_menu(problem.graph, problem.costs, QUICK))])
    planned = figures.of(0).variants
    assert len(planned) > 1
    figures.note_excess([(0, 0), (0, 0)], [(100, 7), (60, 9)], recorded=True)
    raised = figures.of(0).variants
    assert [new.forward_peak - old.forward_peak for new, old in zip(raised, planned, strict=True)] == [100] * len(
        planned
    )
    assert [new.backward_peak - old.backward_peak for new, old in zip(raised, planned, strict=True)] == [9] * len(
        planned
    )
    assert figures.was_recorded((0, 0))
    assert not figures.was_recorded((0, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_estimated_costs_are_corrected_by_runs(dtype: torch.dtype, x: Tensor) -> None:
    x = x.to(dtype)
    peak = measure_peak(lambda: Net(6).to(dtype)(x).backward())
    model = lowtide.wrap(Net(6).to(dtype), budget=int(0.75 * peak), **NAMED)
    try:
        for _ in range(6):
            model.zero_grad()
            model(x).backward()
    except InfeasibleBudgetError:
        return
    model.zero_grad()
    assert measure_peak(lambda: model(x).backward()) <= 0.75 * peak


def test_gradients_of_broadcast_operands_count_in_full() -> None:
    rows, weight = torch.randn(64, 1, DIM, requires_grad=True), torch.randn(DIM, DIM, requires_grad=True)
    part = EagerNodes().behind([(rows * weight).sum(-1)])
    # Both gradients are made in the size of the product before they are summed up.
    assert part.backward_peak_bytes >= 2 * 64 * DIM * DIM * 4


class LargeHead(Net):
    """Layers whose backward takes most, behind a head whose gradients are there by then."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.up, layer.down = nn.Linear(DIM, 16 * DIM), nn.Linear(16 * DIM, DIM)
        self.head = nn.Linear(DIM, 8000)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:8]).square().mean()


@pytest.mark.parametrize("share", [0.9, 0.8, 0.7])
def test_gradients_of_parameters_between_blocks_stay(share: float) -> None:
    model, x = LargeHead(), torch.randn(1024, DIM)

    def step() -> None:
        model.zero_grad()
        model(x).backward()

    step()
    model.zero_grad()
    budget = int(share * measure_peak(lambda: model(x).backward()))
    lowtide.wrap(model, budget=budget, **NAMED)
    for _ in range(2):
        step()
    model.zero_grad()
    peak = measure_peak(lambda: model(x).backward())
    assert peak <= lowtide.plans(model)[0].peak_bytes <= budget


def test_a_broadcast_between_blocks_is_counted_or_refused(x: Tensor) -> None:
    class Broadcasting(Net):
        def __init__(self) -> None:
            super().__init__(6)
            self.weight = nn.Parameter(torch.randn(DIM, DIM))

        def forward(self, x: Tensor) -> Tensor:
            for number, layer in enumerate(self.layers):
                x = layer(x)
                if number == 2:
                    x = x + (x[:, None, :] * self.weight).sum(-1) * 0.01
            return x.square().mean()

    budget = int(0.8 * measure_peak(lambda: Broadcasting()(x).backward()))
    try:
        model = lowtide.wrap(Broadcasting(), budget=budget, **NAMED)
        for _ in range(3):
            model.zero_grad()
            model(x).backward()
    except InfeasibleBudgetError as error:
        budget = error.least_bytes
        model = lowtide.wrap(Broadcasting(), budget=budget, **NAMED)
        for _ in range(3):
            model.zero_grad()
            model(x).backward()
    model.zero_grad()
    assert measure_peak(lambda: model(x).backward()) <= budget


def test_a_compiled_model_is_one_graph_whatever_broke_before(x: Tensor) -> None:
    def breaking(x: Tensor) -> Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    torch.compile(breaking, backend="eager")(x)
    model = Net()
    peak = measure_peak(lambda: model(x).backward())
    model.zero_grad()
    compiled = torch.compile(model, backend="lowtide", options={"budget": int(0.8 * peak), "costs": "analytic"})
    for _ in range(4):
        model.zero_grad()
        compiled(x).backward()


def test_the_compiler_door_takes_no_plan_of_a_step(x: Tensor) -> None:
    plan = lowtide.plan(Net(), (x,), budget="60%", **NAMED)
    compiled = torch.compile(Net(), backend="lowtide", options={"plan": plan})
    with pytest.raises(Exception, match="does not say which graphs make up a step") as raised:
        compiled(x)
    assert isinstance(raised.value.__cause__ or raised.value, InvalidOptionError) or "lowtide.wrap" in str(raised.value)


def test_threads_may_share_a_model(x: Tensor) -> None:
    model = lowtide.wrap(Net(), budget="60%", **NAMED)
    for _ in range(3):
        torch.autograd.grad(model(x), list(model.parameters()))
    expected = torch.autograd.grad(model(x), list(model.parameters()))
    wrong: list[str] = []

    def work() -> None:
        for _ in range(5):
            try:
                found = torch.autograd.grad(model(x), list(model.parameters()))
            except Exception as error:
                wrong.append(repr(error))
            else:
                wrong.extend("bits" for a, b in zip(found, expected, strict=True) if not torch.equal(a, b))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_named_layers_inside_a_checkpoint_are_refused(x: Tensor) -> None:
    with pytest.raises(UnsupportedBackwardError, match=r"inside torch\.utils\.checkpoint"):
        lowtide.wrap(Checkpointed(), budget="100%", **NAMED)(x)


@pytest.mark.filterwarnings("ignore:The model checkpoints")
def test_many_layers_inside_checkpoints_are_one_graph(x: Tensor) -> None:
    plain = Checkpointed(36)
    model = lowtide.wrap(copy.deepcopy(plain), budget="100%", costs="analytic", planner=QUICK)
    for _ in range(2):
        for each in (plain, model):
            each.zero_grad()
            each(x).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), model.parameters(), strict=True))
    assert not isinstance(lowtide.plans(model)[0], lowtide.StepPlan)


def test_layers_of_which_nothing_is_captured_are_blocks(x: Tensor) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(DIM, 3)
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.GELU()) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            weight, index = self.router(x).softmax(-1).max(-1)
            found = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                rows = (index == number).nonzero()[:, 0]
                if rows.numel():
                    found = found.index_add(0, rows, expert(x[rows]) * weight[rows, None])
            return x + found

    class Mixture(Net):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Experts() for _ in range(2))

    plain = Mixture()
    model = lowtide.wrap(copy.deepcopy(plain), budget="100%", costs="analytic", planner=QUICK)
    for _ in range(2):
        for each in (plain, model):
            each.zero_grad()
            each(x).backward()
    assert all(
        (p.grad is None and q.grad is None) or torch.equal(p.grad, q.grad)
        for p, q in zip(plain.parameters(), model.parameters(), strict=True)
    )
    assert lowtide.plans(model)[0].blocks == ("layers.0", "layers.1")


def test_a_layer_that_is_wrapped_cannot_be_a_block() -> None:
    model = Net()
    lowtide.wrap(model.layers[1], budget="90%")
    with pytest.raises(InvalidModelError, match=r"'layers.1', which is to be a block, is wrapped"):
        lowtide.wrap(model, budget="80%", **NAMED)


def test_batches_of_calls_without_backward_are_let_go() -> None:
    model = lowtide.wrap(Net(), budget="60%", **NAMED)
    batches = []
    for _ in range(3):
        batch = torch.randn(512, DIM)
        batches.append(weakref.ref(batch))
        model(batch)
        del batch
    assert [each() for each in batches] == [None] * 3


def test_calls_that_fail_leave_nothing_behind(x: Tensor) -> None:
    class Failing(Net):
        def forward(self, x: Tensor, *, fails: bool = False) -> Tensor:
            x = self.layers[0](x)
            if fails:
                raise ValueError("mine")
            return super().forward(x)

    model = lowtide.wrap(Failing(), budget="80%", **NAMED)
    model(x).backward()
    batch = torch.randn(512, DIM)
    reference = weakref.ref(batch)
    for _ in range(3):
        with pytest.raises(ValueError, match="mine"):
            model(batch, fails=True)
    del batch
    gc.collect()
    assert reference() is None
    model(x).backward()


def test_the_least_budget_of_a_recurrent_model_works() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.cells, self.head = nn.Linear(16, 24), nn.LSTM(24, 32, batch_first=True), nn.Linear(32, 10)

        def forward(self, x: Tensor) -> Tensor:
            found, _ = self.cells(self.inner(x).tanh())
            return self.head(found).square().mean()

    torch._dynamo.reset()
    x = torch.randn(16, 20, 16)
    with pytest.raises(InfeasibleBudgetError) as raised:
        lowtide.wrap(Recurrent(), budget="40%", costs="analytic")(x).backward()
    least = raised.value.least_bytes
    model = lowtide.wrap(Recurrent(), budget=least, costs="analytic")
    for _ in range(6):
        model.zero_grad()
        model(x).backward()
    model.zero_grad()
    assert measure_peak(lambda: model(x).backward()) <= least


def test_all_that_eager_takes_is_enough() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells, self.inner, self.head = nn.LSTM(16, 16, batch_first=True), nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            found, _ = self.cells(torch.tanh(self.inner(x)))
            return self.head(found).square().mean()

    torch._dynamo.reset()
    x = torch.randn(8, 50, 16)
    model = lowtide.wrap(Recurrent(), budget="100%", costs="analytic")
    for _ in range(4):
        model.zero_grad()
        model(x).backward()
