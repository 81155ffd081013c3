"""What a block takes if other gradients come than were planned for: its forward keeps what was planned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.blocks.step.session import StepSession
from lowtide.measure import measure_peak

DIM = 64
ROWS = 256


class TwoResults(nn.Module):
    """The first half returns two results; the second half uses as many of them as `uses` says."""

    def __init__(self, uses: int) -> None:
        super().__init__()
        self.first, self.other = self._deep(), self._deep()
        self.last, self.uses = nn.Linear(DIM, DIM), uses

    def _deep(self) -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(DIM, DIM), nn.GELU()) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        used, unused = self.first(x), self.other(x)
        torch._dynamo.graph_break()
        total = self.last(used)
        return (total + unused if self.uses == 2 else total).square().mean() + 0 * len(unused)


def built(uses: int) -> tuple[nn.Module, Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return TwoResults(uses), torch.randn(ROWS, DIM)


@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize("share", [0.6, 0.8, 1.0])
def test_the_peak_of_every_step_is_in_the_budget(uses: int, share: float) -> None:
    model, x = built(uses)
    budget = int(share * measure_peak(lambda: model(x).backward()))
    model.zero_grad()
    lowtide.wrap(model, budget=budget)
    for _ in range(4):
        peak = measure_peak(lambda: model(x).backward())
        model.zero_grad()
        assert peak <= budget
    plan = lowtide.plans(model)[0]
    assert plan.peak_bytes <= budget


@pytest.mark.parametrize("uses", [1, 2])
def test_forward_is_predicted_to_keep_what_was_planned(uses: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions: list[StepSession] = []
    begin = StepSession.begin_call

    def noting(self: StepSession, *args: Any) -> None:
        sessions.append(self)
        begin(self, *args)

    monkeypatch.setattr(StepSession, "begin_call", noting)
    model, x = built(uses)
    lowtide.wrap(model, budget=50_000_000)
    for _ in range(2):
        model(x).backward()
    session = sessions[-1]
    assert len(session.blocks) == 2
    for number, block in enumerate(session.blocks):
        planned = block.as_block().variants
        figures = session._figures.of(number).variants
        assert [each.forward_after for each in figures] == [each.forward_after for each in planned]
        assert all(each.net <= own.net for each, own in zip(figures, planned, strict=True))
