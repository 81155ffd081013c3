"""`lowtide.plan` without data: models on the meta device are planned as if they were on the CPU."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide import errors
from lowtide.plan.core.result import Plan
from lowtide.testing.models import MODELS, SMALL

MIB = 2**20
LONG = {"resnet50", "densenet121", "inception", "moe", "lstm", "encoder_decoder"}
NAMES = [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in MODELS]


def plan(model: Callable[..., Any], args: Any, kwargs: Any = None, planner: str = "keep_all") -> Plan:
    return lowtide.plan(model, args, kwargs, budget="100%", planner=planner, costs="t4")


@pytest.mark.parametrize("name", NAMES)
def test_same_graph_costs_and_peak_as_with_data(name: str) -> None:
    real = plan(*MODELS[name](**SMALL[name]))
    with torch.device("meta"):
        model, args, kwargs = MODELS[name](**SMALL[name])
    assert all(parameter.is_meta for parameter in model.parameters())
    bare = plan(model, args, kwargs)
    assert bare.problem.graph == real.problem.graph
    assert bare.problem.graph.fingerprint == real.problem.graph.fingerprint
    assert bare.problem.costs == real.problem.costs
    assert bare.peak_bytes == real.peak_bytes


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 4))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.inner(x), target)


def case(device: str) -> tuple[Net, tuple[torch.Tensor, torch.Tensor]]:
    with torch.device(device):
        return Net(), (torch.zeros(64, 16), torch.zeros(64, dtype=torch.int64))


def test_a_plan_made_without_data_runs_on_real_data() -> None:
    bare, bare_args = case("meta")
    made = lowtide.plan(bare, bare_args, budget="80%", costs="analytic")
    model, args = case("cpu")
    plain = copy.deepcopy(model)
    lowtide.wrap(model, plan=made)
    torch.manual_seed(3)
    loss = model(*args)
    loss.backward()
    torch.manual_seed(3)
    expected = plain(*args)
    expected.backward()
    assert torch.equal(loss, expected)
    assert lowtide.plans(model) == [made]
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_the_model_is_not_touched() -> None:
    model, args = case("meta")
    before = {name: (id(tensor), tensor.device.type) for name, tensor in model.state_dict(keep_vars=True).items()}
    plan(model, args)
    after = {name: (id(tensor), tensor.device.type) for name, tensor in model.state_dict(keep_vars=True).items()}
    assert before == after
    assert all(parameter.grad is None for parameter in model.parameters())


def test_shared_storage_stays_shared() -> None:
    """A view among the inputs is a view in the graph, with and without data."""

    def step(whole: torch.Tensor, part: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return ((whole * weight).sin().sum() + (part * weight[:4]).cos().sum()).exp()

    def arguments(device: str) -> tuple[torch.Tensor, ...]:
        whole = torch.zeros(8, 8, device=device)
        return whole, whole[:4], torch.zeros(8, 8, device=device, requires_grad=True)

    assert plan(step, arguments("meta")).problem.graph == plan(step, arguments("cpu")).problem.graph


def test_a_function_whose_closure_has_no_data() -> None:
    def step_of(model: nn.Module) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        def step(x: torch.Tensor, target: torch.Tensor, *, scale: float = 2.0) -> torch.Tensor:
            return scale * model(x, target)

        return step

    (bare, bare_args), (real, real_args) = case("meta"), case("cpu")
    assert plan(step_of(bare), bare_args).problem.graph == plan(step_of(real), real_args).problem.graph


def test_a_model_made_of_fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model, args = case("cpu")
    real, real_args = case("cpu")
    assert plan(model, args).problem.graph == plan(real, real_args).problem.graph


def test_training_needs_data() -> None:
    model, args = case("meta")
    lowtide.wrap(model, budget="50%", costs="analytic")
    with pytest.raises(errors.InvalidInputError, match=r"meta device.*no data.*lowtide\.plan"):
        model(*args)


def test_half_of_the_model_without_data_is_refused() -> None:
    model, args = case("cpu")
    model.inner[0].to("meta")
    with pytest.raises(errors.InvalidInputError, match="cpu and meta"):
        plan(model, args)


def test_planning_takes_little_memory_however_large_the_model_is() -> None:
    """Three billion parameters and activations of many gigabytes."""
    script = (
        # The system's figure for a child begins at that of the process that started it.
        "import torch, lowtide\n"
        "def own_most_bytes():\n"
        "    text = open('/proc/self/status').read()\n"
        "    return 1024 * int(text.split('VmHWM:')[1].split()[0])\n"
        "from lowtide.testing.models import gpt\n"
        "with torch.device('meta'):\n"
        "    model, args, kwargs = gpt(layers=3, dim=8192, heads=64, tokens=4096, batch=16, vocab=32000)\n"
        "plan = lowtide.plan(model, args, kwargs, budget='100%', planner='keep_all', costs='a100-80gb')\n"
        "print(plan.peak_bytes, own_most_bytes())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    peak_bytes, resident_bytes = map(int, done.stdout.split())
    assert peak_bytes > 64 * 2**30
    assert resident_bytes < 1024 * MIB
