"""Caches of PyTorch's: two budgets in one process and two processes at once never run each other's code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import lowtide
from helpers.paths import ROOT
from lowtide.measure import measure_peak

pytestmark = pytest.mark.timeout(600)

SCRIPT = """
import sys, torch, lowtide
from torch import nn
from lowtide.measure import measure_peak
torch.manual_seed(0)
model = nn.Sequential(*[each for _ in range(4) for each in (nn.Linear(64, 64), nn.Tanh())])
x = torch.randn(1024, 64)
class Whole(nn.Module):
    def __init__(self): super().__init__(); self.inner = model
    def forward(self, x): return self.inner(x).square().mean()
whole = lowtide.wrap(Whole(), budget=sys.argv[1], engine="inductor", planner="greedy")
def step(): whole.zero_grad(set_to_none=True); whole(x).backward()
step()
peak = measure_peak(step)
plan = lowtide.plans(whole)[0]
print(peak, plan.peak_bytes, plan.budget_bytes, sum(float(p.grad.double().abs().sum()) for p in whole.parameters()))
"""


class Tanhs(nn.Module):
    """Layers, and a loss."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(*[each for _ in range(4) for each in (nn.Linear(64, 64), nn.Tanh())])

    def forward(self, x):
        return self.inner(x).square().mean()


def test_two_budgets_in_one_process_and_back():
    x, gradients, peaks = torch.randn(1024, 64), [], []
    for budget in ("90%", "60%", "90%", "60%"):
        torch.manual_seed(0)
        model = lowtide.wrap(Tanhs(), budget=budget, engine="inductor", planner="greedy")
        model(x).backward()
        gradients.append([p.grad for p in model.parameters()])
        model.zero_grad(set_to_none=True)
        peak = measure_peak(lambda model=model: model(x).backward())
        (plan,) = lowtide.plans(model)
        assert peak == pytest.approx(plan.peak_bytes, rel=0.005)
        assert peak <= plan.budget_bytes
        assert plan.num_recomputed > 0 or budget == "90%"
        peaks.append(peak)
    assert peaks[0] > peaks[1]
    assert peaks[2:] == peaks[:2]
    for other in gradients[1:]:
        assert all(map(torch.equal, gradients[0], other))


def test_two_processes_at_once(tmp_path: Path):
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT / "src")}
    started = [
        subprocess.Popen([sys.executable, "-c", SCRIPT, budget], stdout=subprocess.PIPE, text=True, env=environment)
        for budget in ("90%", "60%")
    ]
    lines = [process.communicate(timeout=500)[0].split() for process in started]
    assert [process.returncode for process in started] == [0, 0]
    for peak, planned, budget, _ in lines:
        assert int(peak) == pytest.approx(int(planned), rel=0.005)
        assert int(peak) <= int(budget)
    assert int(lines[0][0]) > int(lines[1][0])
    assert lines[0][3] == lines[1][3]


def test_identities_differ_with_budget_and_schedule():
    from lowtide.inductor.engine import StepCompilation, Wishes
    from lowtide.plan.diagnose.infeasible import AskedBudget

    def identity(asked):
        wishes = Wishes(AskedBudget("", asked), 0, None, None, 1, losses_only=True, on_forward=None)  # type: ignore[arg-type]
        return StepCompilation(wishes).identity

    assert identity(1) == identity(1) != identity(2)
