"""What users do that a planner does not expect: it stays exact, planned and within its prediction, or says so."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from helpers.exactness import STEPS, Batch, DropEverything, assert_exact
from lowtide.errors import CaptureError, InfeasibleBudgetError, LowtideWarning, UnsupportedBackwardError

LOOSE: dict[str, Any] = {"budget": "1TiB", "costs": "analytic"}


def floats(*shape: int) -> list[Batch]:
    return [((torch.randn(*shape, generator=torch.Generator().manual_seed(s)),), {}) for s in range(STEPS)]


@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "nearest"])
def test_interpolation_is_eagers(mode: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Upsample(scale_factor=2.3, mode=mode), nn.Conv2d(8, 4, 3))
    model = assert_exact(model, floats(2, 3, 8, 8))
    targets = [op.target for op in lowtide.plans(model)[0].problem.graph.ops]
    assert any("upsample" in target for target in targets)
    assert torch.ops.aten.upsample_bilinear2d.vec.py_kernels, "tracing must be put back as it was"


@pytest.mark.parametrize("loss", [F.multi_margin_loss, F.multilabel_margin_loss])
def test_margin_losses_are_eagers(loss: Any) -> None:
    target = torch.tensor([1, 0, 3, 2]) if loss is F.multi_margin_loss else torch.tensor([[1, 0, -1, 2]] * 4)
    assert_exact(nn.Linear(8, 4), floats(4, 8), loss=lambda out: loss(out, target))

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return loss(self.lin(x), target)

    assert_exact(Inside(), floats(4, 8))


@pytest.mark.parametrize("nested", [False, True])
def test_graph_modules_are_eagers(nested: bool) -> None:
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4)))
    model = nn.Sequential(nn.Linear(8, 8), traced) if nested else traced
    assert_exact(model, floats(4, 8))


class Island(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.weight = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = F.gelu(self.lin(x))
            with torch.autocast("cpu", enabled=False):
                return torch.tanh(h.float() @ self.weight).square().mean()


def test_an_island_without_autocast() -> None:
    assert_exact(Island(), floats(16, 8))


class Inverse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.inv(self.lin(x) + 3 * torch.eye(8)).square().mean()


def test_ops_with_effects() -> None:
    assert_exact(Inverse(), floats(8, 8))


class Box:
    def __init__(self, loss: torch.Tensor, aux: list[torch.Tensor]) -> None:
        self.loss, self.aux = loss, aux


class Boxed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.aux = nn.Linear(8, 8), nn.Linear(8, 1), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> Box:
        h = self.body(x)
        return Box(self.head(h).square().mean(), [self.aux(h)])


def test_opaque_outputs_get_eagers_none() -> None:
    model = Boxed()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_exact(model, floats(4, 8), loss=lambda out: out.loss)
    model.zero_grad()
    model(torch.ones(4, 8)).loss.backward()
    assert model.aux.weight.grad is None
    x = torch.ones(4, 8, requires_grad=True)
    with pytest.raises(UnsupportedBackwardError):
        torch.autograd.grad(model(x).loss, x, create_graph=True)


def test_verify_looks_into_opaque_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowtide.runtime import wrapped

    model = lowtide.wrap(Boxed(), verify=True, **LOOSE)
    honest = wrapped.Wrapped.train

    def wrong(self: Any, *args: Any) -> Box:
        box = honest(self, *args)
        return Box(box.loss + 1, box.aux)

    monkeypatch.setattr(wrapped.Wrapped, "train", wrong)
    with pytest.raises(lowtide.errors.VerificationError):
        model(torch.ones(4, 8))


def test_hooks_added_after_the_first_call_run() -> None:
    model = lowtide.wrap(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), **LOOSE)
    x = torch.ones(2, 8)
    before = model(x)
    model[0].register_forward_hook(lambda module, args, output: output * 2)
    assert not torch.equal(model(x), before)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.calls, self.broken = nn.Linear(8, 8), 0, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for _ in range(2 if self.broken else 0):
            torch._dynamo.graph_break()
            x = self.lin(x)
        return self.lin(x).tanh().sum()


def test_python_values_that_change_stay_planned_and_are_told() -> None:
    model = lowtide.wrap(Counter(), **LOOSE)
    with pytest.warns(LowtideWarning, match="compiled 6 times"):
        names = {model(torch.ones(2, 8)).grad_fn.name() for _ in range(10)}
    assert names == {"CompiledFunctionBackward"}


def test_a_later_call_that_cannot_be_captured_is_refused() -> None:
    model = lowtide.wrap(Counter(), **LOOSE)
    model(torch.ones(2, 8))
    model.broken = True
    with pytest.raises(CaptureError, match="without a budget"):
        model(torch.ones(2, 8))


def test_an_error_at_the_first_call_leaves_no_trace() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn, self.lin = nn.BatchNorm1d(8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = F.dropout(self.bn(x), 0.5, self.training)
            torch._dynamo.graph_break()
            return self.lin(h).exp().sin().exp().sum()

    model = lowtide.wrap(Broken(), budget=600, costs="analytic")
    state, buffers = torch.get_rng_state(), {name: b.clone() for name, b in model.named_buffers()}
    with pytest.raises(InfeasibleBudgetError):
        model(torch.ones(4, 8))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())


def test_sizes_do_not_depend_on_what_was_traced_before() -> None:
    class Assign(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.lin(x).clone()
            h[:, ::2] = 0.5
            h[:100] *= 2
            return h.add_(1).sin().square().mean()

    model, x = Assign(), torch.randn(1000, 64)
    first, second = (lowtide.plan(model, (x,), budget="100%") for _ in range(2))
    assert first.problem.graph.fingerprint == second.problem.graph.fingerprint
    lowtide.wrap(model, budget="100%")
    model(x).backward()
    model.zero_grad()
    # Scalar arguments of an op that writes over its input are counted as if what was read before were still there.
    assert 0 <= first.peak_bytes - lowtide.measure_peak(lambda: model(x).backward()) <= 16


def test_threads_train_their_own_models() -> None:
    names: list[str] = []

    def work() -> None:
        model = lowtide.wrap(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), planner=DropEverything(), **LOOSE)
        for size in (2, 3, 4):
            loss = model(torch.ones(size, 8)).sum()
            names.append(loss.grad_fn.next_functions[0][0].name())
            loss.backward()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert names == ["CompiledFunctionBackward"] * 9
