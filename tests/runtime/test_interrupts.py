"""An interrupt (Ctrl-C, `sys.exit`) in a training call: later calls train as if it had not been."""

from __future__ import annotations

import copy
import pkgutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide

LOOSE: dict[str, Any] = {"budget": "1TiB", "costs": "analytic", "planner": "keep_all"}
DIM = 8


class Layer(nn.Module):
    """A layer that may be interrupted, with a buffer, a random number and a counter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.stop, self.calls = nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM), False, 0
        self.kind: type[BaseException] = KeyboardInterrupt

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = nn.functional.dropout(self.norm(self.linear(x)), 0.25)
        if self.stop:
            raise self.kind
        return torch.tanh(x)


class Net(nn.Module):
    """Three layers, with Python behind the second one that cannot be traced if `breaks`."""

    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        self.layers, self.breaks = nn.ModuleList(Layer() for _ in range(3)), breaks

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if self.breaks and number == 1:
                torch._dynamo.graph_break()
        return x.square().mean()


class Experts(nn.Module):
    """A layer that cannot be captured: how many of its parts run depends on its input."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        chosen = x.detach().sum(1) > 0
        for part, rows in zip(self.parts, (chosen, ~chosen), strict=True):
            x = x.index_add(0, rows.nonzero()[:, 0], torch.tanh(part(x[rows])))
        return x


class Routed(nn.Module):
    """Layers of which it must be found out that they are blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def batch(seed: int) -> Tensor:
    return torch.randn(16, DIM, generator=torch.Generator().manual_seed(seed))


def state(model: nn.Module) -> list[Tensor]:
    counts = [torch.tensor(each.calls) for each in model.modules() if isinstance(each, Layer)]
    return [*(each.clone() for each in model.buffers()), *counts, torch.get_rng_state()]


def trained(model: nn.Module, steps: int = 2) -> list[Tensor]:
    """Return everything that some steps compute and leave."""
    found = []
    for seed in range(steps):
        loss = model(batch(seed))
        loss.backward()
        found += [loss.detach(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]
        model.zero_grad()
    return [*found, *state(model)]


def assert_same(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other)
    assert all(torch.equal(left, right) for left, right in zip(one, other, strict=True))


def after_seed(model: nn.Module, seed: int, act: Any) -> Any:
    torch.manual_seed(seed)
    return act(model)


def interrupt(model: Any, place: int, kind: type[BaseException]) -> list[Tensor]:
    """Return what a call leaves that layer number `place` interrupts."""
    model.layers[place].stop, model.layers[place].kind = True, kind
    with pytest.raises(kind):
        model(batch(9))
    model.layers[place].stop = False
    return state(model)


def follow(plain: nn.Module, model: nn.Module) -> None:
    """Give `plain` the buffers and counters of `model`."""
    for mine, theirs in zip(model.modules(), plain.modules(), strict=True):
        if isinstance(mine, Layer) and isinstance(theirs, Layer):
            theirs.calls = mine.calls
        for left, right in zip(mine.buffers(recurse=False), theirs.buffers(recurse=False), strict=True):
            right.copy_(left)


def trained_from(model: nn.Module) -> list[Tensor]:
    found: list[Tensor] = after_seed(model, 2, trained)
    return found


@pytest.mark.filterwarnings("ignore::lowtide.errors.LowtideWarning")
@pytest.mark.parametrize(
    ("way", "kind", "place"),
    [
        ("whole", KeyboardInterrupt, 0),
        ("whole", SystemExit, 2),
        ("broken", KeyboardInterrupt, 2),
        ("layers", SystemExit, 1),
    ],
)
def test_a_model_that_interrupts_its_calls_trains_on(way: str, kind: type[BaseException], place: int) -> None:
    plain = Net(breaks=way == "broken")
    model = lowtide.wrap(
        copy.deepcopy(plain), **LOOSE, blocks={"layers": ["layers"], "whole": "whole"}.get(way, "auto")
    )
    before = after_seed(plain, 1, state)
    for call in ("first", "later"):
        theirs, ours = (after_seed(each, 1, lambda m: interrupt(m, place, kind)) for each in (plain, model))
        if way == "broken" and call == "first":
            # The call that finds out which layers are blocks is undone.
            assert_same(ours, before)
            follow(plain, model)
        else:
            assert_same(ours, theirs)
        assert_same(trained_from(plain), trained_from(model))
        assert lowtide.plans(model)


RUNTIME = "lowtide.runtime"
STATIONS = {
    "in the compiler": (f"{RUNTIME}.backend.compile_step", 1, "whole"),
    "capture": (f"{RUNTIME}.pipeline.capture", 1, "whole"),
    "planning": (f"{RUNTIME}.model_plans.Session.find_plan", 1, "whole"),
    "the plan is noted": (f"{RUNTIME}.model_plans.Session.record", 1, "whole"),
    "lowering": (f"{RUNTIME}.pipeline.lower_graph", 1, "whole"),
    "at the second graph": (f"{RUNTIME}.pipeline.capture", 2, "broken"),
    "with a block": ("lowtide.blocks.step.session.StepSession.add", 2, "broken"),
    "at a layer": (f"{RUNTIME}.model_plans.Session.find_menu", 1, "layers"),
    "at the end": ("lowtide.blocks.step.session.StepSession.end_call", 1, "layers"),
    "what a layer is": (f"{RUNTIME}.opaque_modules.is_capturable", 1, "routed"),
    "on the first layer": (f"{RUNTIME}.opaque_modules._Alike._decide", 1, "routed"),
    "decided": (f"{RUNTIME}.opaque_modules.LayerDecisions.make", 1, "routed"),
}


@pytest.mark.filterwarnings("ignore::lowtide.errors.LowtideWarning")
@pytest.mark.parametrize("is_done", [False, True], ids=["before", "behind"])
@pytest.mark.parametrize("station", STATIONS)
def test_an_interrupt_of_the_planning_leaves_nothing_half_made(
    station: str, is_done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, nth, way = STATIONS[station]
    torch.manual_seed(0)
    plain = Routed() if way == "routed" else Net(breaks=way == "broken")
    options = LOOSE | ({"blocks": ["layers"]} if way == "layers" else {})
    model, calm = (lowtide.wrap(copy.deepcopy(plain), **options) for _ in range(2))
    with monkeypatch.context() as patch:
        _interrupt_at(function, nth, patch, is_done=is_done)
        with pytest.raises(KeyboardInterrupt):
            model(batch(9))
    # It comes where it might have come in eager mode: what the model has done by then stays.
    follow(plain, model)
    follow(calm, model)
    assert_same(trained_from(plain), trained_from(model))
    trained_from(calm)
    ours, theirs = lowtide.plans(model), lowtide.plans(calm)
    assert [each.fingerprint for each in ours] == [each.fingerprint for each in theirs]
    assert ours[0].peak_bytes == theirs[0].peak_bytes


def _interrupt_at(function: str, nth: int, patch: pytest.MonkeyPatch, *, is_done: bool) -> None:
    """Let call number `nth` of a function be interrupted, before it does anything or when it has done all."""
    plain, left = pkgutil.resolve_name(function), nth

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0 and not is_done:
            raise KeyboardInterrupt
        result = plain(*args, **kwargs)
        if left == 0:
            raise KeyboardInterrupt
        return result

    patch.setattr(function, call)
