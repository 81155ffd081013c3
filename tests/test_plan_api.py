"""`lowtide.plan`: the plan that `wrap` would make, without running or touching anything."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from helpers.exactness import assert_same, train


class Net(nn.Module):
    def __init__(self, depth: int = 6, width: int = 64) -> None:
        super().__init__()
        self.inp = nn.Linear(16, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(0.1))
            for _ in range(depth)
        )
        self.out = nn.Linear(width, 4)
        self.calls = 0

    def forward(self, x: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        self.calls += 1
        h = self.inp(x)
        for block in self.blocks:
            h = h + block(h)
        out = self.out(h)
        return out.sum() if target is None else F.cross_entropy(out, target)


def call() -> tuple[tuple[torch.Tensor], dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(512, 16, generator=generator),), {"target": torch.randint(0, 4, (512,), generator=generator)}


def test_planning_changes_nothing() -> None:
    model = Net()
    args, kwargs = call()
    model(*args, **kwargs).backward()
    before = copy.deepcopy(model.state_dict())
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    parameters, state, calls = list(model.parameters()), torch.get_rng_state(), model.calls
    lowtide.plan(model, args, kwargs, budget="50%")
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(torch.equal(gradients[name], p.grad) for name, p in model.named_parameters())
    assert torch.equal(state, torch.get_rng_state())
    assert model.calls == calls
    assert "_compiled_call_impl" not in vars(model)


def test_planning_needs_no_activation_memory() -> None:
    model, (args, kwargs) = Net(), call()
    plan = lowtide.plan(model, args, kwargs, budget="50%", costs="analytic")
    peak = lowtide.measure_peak(lambda: lowtide.plan(model, args, kwargs, budget="50%", costs="analytic"))
    assert peak < plan.baseline_peak_bytes / 10


def test_measuring_needs_one_op_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path))
    model, (args, kwargs) = Net(), call()
    peak = lowtide.measure_peak(lambda: lowtide.plan(model, args, kwargs, budget="100%"))
    plan = lowtide.plan(model, args, kwargs, budget="100%")
    graph = plan.problem.graph
    sizes = [
        sum(graph.values[v].bytes for v in {*op.inputs, *op.outputs}) + workspace
        for op, workspace in zip(graph.ops, plan.problem.costs.workspace_bytes, strict=True)
    ]
    assert peak < 2 * max(sizes) + 2**20
    assert peak < plan.baseline_peak_bytes


def test_the_plan_is_the_one_wrap_uses(tmp_path: Path) -> None:
    model, (args, kwargs) = Net(), call()
    plan = lowtide.plan(model, args, kwargs, budget="50%")
    path = tmp_path / "plan.json"
    plan.save(path)
    plain = copy.deepcopy(model)
    lowtide.wrap(model, plan=path)
    batches = [(args, kwargs)] * 3
    assert_same(train(plain, plain, batches), train(model, model, batches))
    (used,) = lowtide.plans(model)
    assert used.schedule == plan.schedule
    assert used.problem.graph.fingerprint == plan.problem.graph.fingerprint
    model.zero_grad()
    assert lowtide.measure_peak(lambda: model(*args, **kwargs).backward()) == plan.peak_bytes


def test_plans_are_the_same_for_wrapped_models() -> None:
    model, (args, kwargs) = Net(), call()
    how = {"budget": "60%", "costs": "analytic", "planner": "greedy"}
    plan = lowtide.plan(model, args, kwargs, **how)
    lowtide.wrap(model, **how)
    again = lowtide.plan(model, args, kwargs, **how)
    model(*args, **kwargs).backward()
    assert plan.schedule == again.schedule == lowtide.plans(model)[0].schedule


def test_ops_know_their_module_and_line() -> None:
    model, (args, kwargs) = Net(), call()
    graph = lowtide.plan(model, args, kwargs, budget="100%", costs="analytic").problem.graph
    calls = [op for op in graph.ops if op.target.startswith("aten.")]
    assert all(op.source.startswith(__file__) or "torch" in op.source for op in calls)
    assert {"inp", "blocks.0.0", "blocks.5.2", "out"} <= {op.module for op in calls}
    assert any("test_plan_api.py" in op.source for op in graph.ops)
    backward = [graph.ops[op] for op in graph.backward]
    assert {"blocks.3.0", "out"} <= {op.module for op in backward}


def test_plan_for_a_device_that_is_not_here() -> None:
    model, (args, kwargs) = Net(), call()
    fast = lowtide.plan(model, args, kwargs, budget="60%", costs="a100-80gb", planner="greedy")
    slow = lowtide.plan(model, args, kwargs, budget="60%", costs="t4", planner="greedy")
    assert "a100-80gb" in str(fast)
    assert fast.problem.baseline.seconds < slow.problem.baseline.seconds


def test_plan_of_a_function() -> None:
    weight = torch.randn(32, 32, requires_grad=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = F.gelu(x @ weight)
        return x.sum()

    plan = lowtide.plan(step, (torch.ones(64, 32),), budget="80%", costs="analytic")
    assert plan.peak_bytes <= 0.8 * plan.baseline_peak_bytes
    assert weight.grad is None


def test_several_graphs_are_one_step() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small, self.large = nn.Linear(4, 4), nn.Linear(4, 400)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.relu(self.small(x))
            torch._dynamo.graph_break()
            return torch.tanh(self.large(h)).sum()

    plan = lowtide.plan(Two(), (torch.randn(8, 4),), budget="100%", planner="keep_all", costs="analytic")
    assert isinstance(plan, lowtide.StepPlan)
    assert plan.blocks == ("small", "large")
