"""The least budget that a refused step names works in every later step, and is not above what eager takes."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowtide
from lowtide.blocks.step.call import Call
from lowtide.blocks.step.gap_book import Basis, GapBook, Gaps, highest_gaps, raised
from lowtide.blocks.step.recorder import Stretch
from lowtide.blocks.step.session import StepSession
from lowtide.errors import InfeasibleBudgetError
from lowtide.measure import measure_peak
from lowtide.step.policy import POLICY
from lowtide.step.problem import Gap, StepProblem, Variant, holding
from lowtide.step.simulate import simulate_step

DIM = 64


class HeldByCode(nn.Module):
    """Code between blocks makes tensors that its variables hold while the next block runs."""

    def __init__(self) -> None:
        super().__init__()
        widths = [DIM, DIM, 2 * DIM, 4 * DIM, 32 * DIM, 1]
        self.layers = nn.ModuleList(map(nn.Linear, widths, widths[1:]))

    def part(self, layer: nn.Module, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        x = x + 0.5
        torch._dynamo.graph_break()
        return layer(x)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.elu(x)
            x = self.part(layer, x)
        return x.mean()


class Shared(nn.Module):
    """Layers take a tensor that the model has made for all of them: it dies when the first layer is through."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, 8 * DIM)
        self.layers = nn.ModuleList(nn.Linear(8 * DIM, DIM) for _ in range(4))
        self.wide = nn.ModuleList(nn.Sequential(nn.Linear(DIM, 8 * DIM), nn.GELU()) for _ in range(4))

    def part(self, layer: nn.Module, wide: nn.Module, x: Tensor, shared: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x + layer(wide(x) * shared)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            shared = self.first(x)
        for layer, wide in zip(self.layers, self.wide, strict=True):
            x = self.part(layer, wide, x, shared)
        return x.mean()


class LossInEagerCode(nn.Module):
    """What comes behind the last block takes most."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.head = nn.Linear(DIM, 8 * DIM)

    def part(self, layer: nn.Module, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return torch.sin(layer(x))

    @torch._dynamo.disable
    def loss(self, x: Tensor) -> Tensor:
        return self.head(x).sin().square().mean()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.part(layer, x)
        return self.loss(x)


@dataclass
class Hidden:
    """What a layer returns in an object, as the results of many models are."""

    states: Tensor


class PassedInObjects(nn.Module):
    """Code between blocks passes tensors on in objects, which a tracer looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width // 2) for width in (DIM, DIM // 2, DIM // 4))
        self.passed: list[weakref.ref[Hidden]] = []
        self.most_alive = 0

    @torch._dynamo.disable
    def note(self, hidden: Hidden) -> None:
        self.passed.append(weakref.ref(hidden))
        self.most_alive = max(self.most_alive, self.num_alive())

    def num_alive(self) -> int:
        return sum(each() is not None for each in self.passed)

    def part(self, layer: nn.Module, hidden: Hidden) -> Hidden:
        self.note(hidden)
        return Hidden(layer(hidden.states).sin())

    def forward(self, x: Tensor) -> Tensor:
        hidden = Hidden(x)
        for layer in self.layers:
            hidden = self.part(layer, hidden)
        return hidden.states.mean()


def eager_peak(kind: type[nn.Module], x: Tensor) -> int:
    model = built(kind)
    return measure_peak(lambda: model(x).backward())


def built(kind: type[nn.Module]) -> nn.Module:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return kind()


def least_budget(kind: type[nn.Module], x: Tensor, asked: int) -> int:
    model = lowtide.wrap(built(kind), budget=asked)
    with pytest.raises(InfeasibleBudgetError) as refused:
        model(x).backward()
    return refused.value.least_bytes


def peaks_within(kind: type[nn.Module], x: Tensor, budget: int) -> list[int]:
    """Return the measured peaks of every second step: in the others the model is free to record itself."""
    model = lowtide.wrap(built(kind), budget=budget)
    found = []
    for number in range(5):
        run = lambda: model(x).backward()  # noqa: E731
        if number % 2:
            found.append(measure_peak(run))
        else:
            run()
        assert lowtide.plans(model)[0].peak_bytes <= budget
        model.zero_grad()
    return found


@pytest.mark.parametrize("kind", [HeldByCode, Shared, LossInEagerCode])
def test_the_least_budget_works_in_every_step(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    x = torch.randn(1024, DIM)
    eager = eager_peak(kind, x)
    least = least_budget(kind, x, eager // 4)
    assert max(peaks_within(kind, x, least)) <= least <= eager + POLICY.scalar_bytes + POLICY.unseen_bytes


def test_what_is_compiled_in_a_call_holds_nothing_of_it() -> None:
    model = lowtide.wrap(built(PassedInObjects), budget=10**9, costs="analytic")
    frozen = gc.get_freeze_count()
    gc.disable()
    try:
        loss = model(torch.randn(16, DIM))
        assert model.num_alive() == 0
    finally:
        gc.enable()
    assert gc.get_freeze_count() == frozen
    assert len(model.passed) == 3
    # The one that is passed, and no earlier one.
    assert model.most_alive == 1
    loss.backward()


def test_gaps_of_two_calls_are_compared_by_levels() -> None:
    # 8 bytes are held for one gap: one call sees them come and go, the other one never.
    seen = Gaps((Gap(16, 16), Gap(0, -8)), (Gap(0, 0), Gap(1, -8)))
    unseen = Gaps((Gap(8, 8), Gap(0, 0)), (Gap(2, 0), Gap(0, -8)))
    assert highest_gaps(seen, unseen) == Gaps((Gap(16, 16), Gap(0, -8)), (Gap(2, 0), Gap(1, -8)))
    assert highest_gaps(seen, unseen) == highest_gaps(unseen, seen)


def test_what_an_earlier_attempt_left_does_not_lower_the_level() -> None:
    call, x, y = Call(tuple), torch.empty(25), torch.empty(10, requires_grad=True)
    call.is_whole = True
    call.enter([x])
    call.blocks.append(0)
    call.figures.append(Variant(140, 40, 0, -40, 0.0, 0.0, 0))
    call.tangent_bytes.append(0)
    call.leave([y])
    call.end_forward([y])
    # The call has made 100 bytes, and freed 300 that were there before.
    call.forward.stretches = [Stretch(0, -200), Stretch(-60, -160), Stretch(-160, -160)]
    call.begin_backward()
    call.enter_backward(0)
    call.leave_backward([x], [])
    shown = call.end_backward()
    assert shown is not None
    assert shown.gaps.forward[0].after == 100
    assert shown.gaps.forward[1] == Gap(0, 0)


ROOM = 100
EXPECTED = Gaps((Gap(10, 10), Gap(0, 0)), (Gap(0, 0), Gap(0, -10)))


@pytest.mark.parametrize("more", [0, ROOM // 2, ROOM])
def test_what_a_step_shows_uses_the_room_that_was_kept_for_it(more: int) -> None:
    book = GapBook()
    book.note((0,), EXPECTED, Basis.EXPECTED)
    allowed = book.with_room((0,), EXPECTED, ROOM)
    shown = raised(EXPECTED, more)
    book.note((0,), shown, Basis.WATCHED)
    # The budget was allowed for the highest level of these gaps, and must work for the next step.
    assert book.with_room((0,), shown, ROOM) == allowed == raised(EXPECTED, ROOM)


def test_a_step_that_shows_more_than_the_room_is_believed() -> None:
    book = GapBook()
    book.note((0,), EXPECTED, Basis.EXPECTED)
    shown = raised(EXPECTED, 2 * ROOM)
    book.note((0,), shown, Basis.WATCHED)
    assert book.with_room((0,), shown, ROOM) == shown


def test_what_was_recorded_needs_no_room() -> None:
    book = GapBook()
    book.note((0,), EXPECTED, Basis.EXPECTED)
    book.note((0,), EXPECTED, Basis.RECORDED)
    assert book.with_room((0,), EXPECTED, ROOM) == EXPECTED


class WithTable(nn.Module):
    """A large buffer, of which a copy is made before the first call, from which that call could begin again."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(128, 1024))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.GELU()) for _ in range(4))

    def part(self, layer: nn.Module, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return layer(x)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.part(layer, x)
        return x.mean()


def test_copies_are_counted_as_long_as_forward_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    problems: list[StepProblem] = []
    problem = StepSession._problem

    def noting(self: StepSession, *args: Any) -> StepProblem:
        problems.append(problem(self, *args))
        return problems[-1]

    monkeypatch.setattr(StepSession, "_problem", noting)
    model = lowtide.wrap(built(WithTable), budget=50_000_000)
    model(torch.randn(32, DIM)).backward()
    levels = simulate_step(problems[0], (0,) * len(problems[0].instances)).levels
    assert levels[0] >= model.table.nbytes
    assert levels[2 * len(problems[0].instances)] < model.table.nbytes


def test_gaps_hold_copies_until_forward_ends() -> None:
    assert holding((Gap(3, 2), Gap(5, 1)), 10) == (Gap(13, 12), Gap(5, -9))
