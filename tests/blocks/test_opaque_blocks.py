"""Modules that run in eager mode as blocks of a step: the bits of plain training, within the budget of the step."""

from __future__ import annotations

import copy
import gc
import pickle
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import lowtide
from lowtide import errors
from lowtide.blocks.opaque.opaque_block import CannotBeOpaque, OpaqueBlock
from lowtide.lower.variants import Turn
from lowtide.plan.menu import Entry
from lowtide.runtime.opaque_modules import is_capturable, repeated_layers
from lowtide.runtime.wrapped import wrapped_of

DIM = 12


class FixedSession:
    """A session that runs one variant, and notes what it is told."""

    keeps_values = True

    def __init__(self, variant: int) -> None:
        self.variant = variant
        self.menus: list[Sequence[Entry]] = []
        self.told: list[str] = []

    def add(self, menu: Sequence[Entry], device: Any, *, name: str | None = None) -> int:
        del name, device
        self.menus.append(menu)
        return len(self.menus) - 1

    def when_discarded(self, note: Any) -> None:
        del note

    def update(self, block: int, menu: Sequence[Entry]) -> None:
        self.menus[block] = menu

    def num_runs(self, blocks: Any) -> int:
        del blocks
        return self.told.count("begin forward") - self.told.count("begin backward")

    def begin_forward(self, block: int, args: Any, parameters: Any) -> Turn:
        del block, args, parameters
        self.told.append("begin forward")
        return Turn(self.variant, 0)

    def end_forward(self, turn: Turn, outputs: Any) -> None:
        del turn, outputs
        self.told.append("end forward")

    def begin_backward(self, turn: Turn, tangents: Any) -> None:
        del turn, tangents
        self.told.append("begin backward")

    def end_backward(self, turn: Turn, of_inputs: Any, of_parameters: Any) -> None:
        del turn, of_inputs, of_parameters
        self.told.append("end backward")


def as_block(module: nn.Module, variant: int) -> FixedSession:
    """Let `module` run as an opaque block, and return its session."""
    session = FixedSession(variant)
    module.forward = OpaqueBlock("part", module, module.forward, session)
    return session


Use = Callable[[nn.Module, Tensor], Tensor]


def training(module: nn.Module, use: Use, x: Tensor, *, steps: int = 3, peaks: list[int] | None = None) -> list[Any]:
    """Return all that training steps leave behind."""
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    left: list[Any] = []
    for _ in range(steps):
        given = x.clone().requires_grad_(x.is_floating_point())
        loss = use(module, given)
        loss.backward()
        left += [loss.detach(), given.grad, torch.get_rng_state(), torch.tensor(random.random()), np.random.rand()]
        left += [None if each.grad is None else each.grad.clone() for each in module.parameters()]
        left += [each.clone() for each in module.buffers()]
        with torch.no_grad():
            for each in module.parameters():
                if each.grad is not None:
                    each -= 0.1 * each.grad
                each.grad = None
    return left


def same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) and isinstance(other, Tensor) else one == other


def assert_exact(module: nn.Module, use: Use, x: Tensor) -> None:
    """Compare plain training with training as an opaque block, kept and run again."""
    expected = training(copy.deepcopy(module), use, x)
    for variant in (0, 1):
        trained = copy.deepcopy(module)
        session = as_block(trained, variant)
        found = training(trained, use, x)
        assert len(found) == len(expected)
        assert all(map(same, expected, found)), f"variant {variant}"
        assert {*session.told} == {"begin forward", "end forward", "begin backward", "end backward"}


class Experts(nn.Module):
    """Sends every row to one expert: sizes depend on data."""

    def __init__(self, number: int = 3) -> None:
        super().__init__()
        self.router, self.dropout = nn.Linear(DIM, number), nn.Dropout(0.2)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM)) for _ in range(number)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        total = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(-1)
            if rows.numel():
                total = total.index_add(0, rows, (expert(x[rows]) * weights[rows, None]).to(total))
        return x + self.dropout(total)


class Various(nn.Module):
    """Takes and returns structures; counts; draws random numbers of all kinds; has statistics and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM)
        self.register_buffer("seen", torch.zeros(()))
        self.calls: list[int] = []

    def forward(self, x: Tensor, extra: Any = None, *, pair: tuple[Tensor, Tensor], scale: float = 1.0) -> Any:
        self.calls.append(len(self.calls))
        self.seen += 1
        if x.mean().item() > 100:
            raise ValueError("never")
        hidden = self.norm(self.linear(pair[0] + pair[1]).sin() * x) * (random.random() + float(np.random.rand()))
        hidden = F.dropout(hidden, 0.3, self.training) * scale
        return {"hidden": hidden, "twice": (hidden, [hidden.exp(), None]), "number": 3, "given": extra}


def use_various(module: nn.Module, x: Tensor) -> Tensor:
    result = module(x, None, pair=(x, x * 2), scale=0.5)
    assert result["twice"][0] is result["hidden"]
    assert (result["number"], result["given"], result["twice"][1][1]) == (3, None, None)
    return (result["hidden"] * result["twice"][1][0]).sum()


def packed(module: nn.Module, x: Tensor) -> Tensor:
    given = pack_padded_sequence(x, torch.tensor([5, 3, 2]), batch_first=True)
    out, (h, c) = module(given)
    assert isinstance(out, PackedSequence)
    return out.data.square().sum() + h.sum() + c.cos().sum()


def only_state(module: nn.Module, x: Tensor) -> Tensor:
    _, (h, _) = module(x)
    return h.square().sum()


def all_of_it(module: nn.Module, x: Tensor) -> Tensor:
    out, (h, c) = module(x)
    return out.square().sum() + h.sum() + c.cos().sum()


def begun(module: nn.Module, x: Tensor) -> Tensor:
    out, h = module(x, hx=x.new_ones(2, 3, DIM) * x.mean())
    return out.square().sum() + h.sum()


def autocast(module: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = module(x)
    return result.float().square().sum()


def retained(module: nn.Module, x: Tensor) -> Tensor:
    loss = module(x).square().sum()
    loss.backward(retain_graph=True)
    return loss


def used_twice(module: nn.Module, x: Tensor) -> Tensor:
    return module(module(x)).square().sum()


def recurrent_twice(module: nn.Module, x: Tensor) -> Tensor:
    return module(module(x)[0])[0].square().sum()


def squared(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).square().sum()


def sequence() -> Tensor:
    return torch.randn(3, 5, DIM, generator=torch.Generator().manual_seed(1))


def rows(number: int = 40) -> Tensor:
    return torch.randn(number, DIM, generator=torch.Generator().manual_seed(2))


CASES: dict[str, tuple[Callable[[], nn.Module], Use, Callable[[], Tensor]]] = {
    "LSTM": (lambda: nn.LSTM(DIM, DIM, num_layers=2, dropout=0.3, batch_first=True), all_of_it, sequence),
    "LSTM, gradient of one state": (lambda: nn.LSTM(DIM, DIM, batch_first=True), only_state, sequence),
    "LSTM of a packed sequence": (lambda: nn.LSTM(DIM, DIM, batch_first=True), packed, sequence),
    "GRU in both directions": (lambda: nn.GRU(DIM, DIM, bidirectional=True, batch_first=True), begun, sequence),
    "experts": (Experts, squared, rows),
    "experts with autocast": (Experts, autocast, rows),
    "experts, graph retained": (Experts, retained, rows),
    "linear, twice in a step": (lambda: nn.Linear(DIM, DIM), used_twice, rows),
    "LSTM, twice in a step": (lambda: nn.LSTM(DIM, DIM, batch_first=True), recurrent_twice, sequence),
    "structures and state": (Various, use_various, rows),
}


@pytest.mark.parametrize("name", CASES)
def test_bits_are_those_of_plain_training(name: str) -> None:
    make, use, inputs = CASES[name]
    torch.manual_seed(0)
    assert_exact(make(), use, inputs())


def test_python_state_and_hooks_are_those_of_one_run() -> None:
    module, hooks = Various(), []
    session = as_block(module, 1)
    module.register_forward_hook(lambda *_: hooks.append(1))
    training(module, use_various, rows())
    assert module.calls == [0, 1, 2]
    assert len(hooks) == 3
    assert len(session.menus) == 1


def test_a_run_without_gradients_is_no_block() -> None:
    module = Experts()
    session = as_block(module, 1)
    with torch.no_grad():
        module(rows())
    module.requires_grad_(requires_grad=False)(rows())
    assert not session.told


def test_new_shapes_modes_and_parameters_are_new_blocks() -> None:
    module = nn.LSTM(DIM, DIM, num_layers=2, dropout=0.3)
    session = as_block(module, 1)
    for x in (sequence(), sequence()[:2], sequence()):
        all_of_it(module, x).backward()
    assert len(session.menus) == 2
    module.eval()
    all_of_it(module, sequence()).backward()
    module.bias_hh_l0.requires_grad_(requires_grad=False)
    all_of_it(module, sequence()).backward()
    assert len(session.menus) == 4


def test_the_second_plan_keeps_less_and_costs_what_is_proved() -> None:
    module = Experts()
    session = as_block(module, 0)
    squared(module, rows()).backward()
    everything, again = session.menus[0]
    assert again.trace.saved_bytes < everything.trace.saved_bytes
    assert again.bound == pytest.approx(again.plan.overhead)
    assert again.kept_at_most is not None
    assert again.kept_at_most >= again.trace.saved_bytes


class Sized(nn.Module):
    """Keeps as much as the data say."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        number = int((x[:, 0] > 0).sum())
        return self.linear(x).repeat(number, 1).sin().sum()


@pytest.mark.parametrize("variant", [0, 1])
def test_plans_follow_sizes_that_depend_on_data(variant: int) -> None:
    module = Sized()
    session = as_block(module, variant)
    x = torch.full((10, DIM), -1.0)
    x[:2] = 1
    module(x).backward()
    before = [entry.trace for entry in session.menus[0]]
    x[:8] = 1
    module(x).backward()
    after = [entry.trace for entry in session.menus[0]]
    assert after[0].saved_bytes >= before[0].saved_bytes + 6 * 10 * DIM * 4
    assert after[1].peak_bytes >= before[1].peak_bytes + 6 * 10 * DIM * 4
    x[2:] = -1
    module(x).backward()
    assert [entry.trace for entry in session.menus[0]] == after


class Bad(nn.Module):
    """Does what cannot be repeated."""

    def __init__(self, what: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.linear, self.what = nn.Linear(DIM, DIM), what

    def forward(self, x: Tensor, given: Any = None) -> Any:
        return self.what(self.linear(x), given if given is not None else x)


class Box:
    """A result that is not known to PyTorch."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Cache:
    """Past keys and values, so to say."""

    def get_seq_length(self) -> int:
        return 0


REFUSED: dict[str, tuple[Callable[[Any, Any], Any], Any, str]] = {
    "an argument changed in place": (lambda y, x: x.add_(1) * y, None, "in place"),
    "a list changed": (lambda y, given: given.append(1) or y, [2], "argument"),
    "an unknown result": (lambda y, _: Box(y), None, "returned a Box"),
    "no result": (lambda _, __: None, None, "no tensor"),
    "a cache": (lambda y, _: y, Cache(), "use_cache=False"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_repeated_is_refused_with_the_reason(name: str) -> None:
    what, given, reason = REFUSED[name]
    module = Bad(what)
    as_block(module, 1)
    with pytest.raises(CannotBeOpaque, match=reason) as found:
        module(rows(), given)
    assert found.value.name == "part"


def test_a_module_whose_gradients_would_add_up_in_another_order_is_refused() -> None:
    module = nn.GRU(DIM, DIM, batch_first=True)
    as_block(module, 1)
    with pytest.raises(CannotBeOpaque, match="another order"):
        recurrent_twice(module, sequence())


def test_errors_of_the_module_are_its_own() -> None:
    module = Bad(lambda y, x: y @ x)
    as_block(module, 1)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        module(rows())


def test_profiling_leaves_nothing_behind() -> None:
    module = nn.LSTM(DIM, 17)
    as_block(module, 0)
    all_of_it(module, sequence()).backward()
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is Tensor and each.shape[-1:] == (17,)]


class Language(nn.Module):
    """An embedding, a recurrent body, a head and the loss."""

    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(50, 32), body, nn.Linear(width, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.body(self.embedding(tokens))
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        return F.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


def tokens(batch: int = 16) -> Tensor:
    return torch.randint(50, (batch, 24), generator=torch.Generator().manual_seed(3))


def recurrent() -> Language:
    torch.manual_seed(0)
    return Language(nn.LSTM(32, 40, num_layers=2, dropout=0.2, batch_first=True), 40)


def routed() -> Language:
    torch.manual_seed(0)
    return Language(nn.Sequential(*(Tokens() for _ in range(4))), 32)


class Tokens(nn.Module):
    """A layer of experts for every token."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.experts, self.leave = nn.Linear(32, DIM), Experts(), nn.Linear(DIM, 32)

    def forward(self, x: Tensor) -> Tensor:
        flat = self.enter(x).flatten(0, 1)
        return x + self.leave(self.experts(flat)).view_as(x)


def step_peak(model: nn.Module, x: Tensor) -> int:
    """Return the peak of a training step."""
    peak = lowtide.measure_peak(lambda: model(x).backward())
    model.zero_grad()
    return peak


def call(module: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = module(x)
    return loss


@pytest.mark.parametrize("make", [recurrent, routed])
def test_a_wrapped_model_trains_exactly_within_its_budget(make: Callable[[], Language]) -> None:
    x = tokens()
    expected = training(make(), call, x)
    eager = step_peak(make(), x)
    model = make()
    try:
        lowtide.wrap(model, budget=int(0.75 * eager))
        model(x).backward()
        budget = int(0.75 * eager)
    except errors.InfeasibleBudgetError as error:
        budget = error.least_bytes
        assert budget is not None
        assert budget < 1.1 * eager
    model = lowtide.wrap(make(), budget=budget)
    assert all(map(same, expected, training(model, call, x)))
    for _ in range(2):
        assert step_peak(model, x) <= budget


def test_repeated_layers_that_break_are_opaque() -> None:
    model = lowtide.wrap(routed(), budget="60%")
    model(tokens()).backward()
    session = wrapped_of(model).session
    assert [block.name for block in session.step.blocks if block.name.startswith("body.")] == [
        f"body.{number}" for number in range(4)
    ]


def test_unwrapping_copying_and_evaluation() -> None:
    model, x = recurrent(), tokens()
    plain = copy.deepcopy(model)
    lowtide.wrap(model, budget="100MB")
    model(x).backward()
    assert model.state_dict().keys() == plain.state_dict().keys()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other.body.forward).__name__ == "method"
        assert other.body.forward.__self__ is other.body
    assert torch.equal(model.eval()(x), plain.eval()(x))
    lowtide.unwrap(model)
    assert "forward" not in vars(model.body)


def test_a_recurrent_module_that_is_wrapped_by_itself_is_refused_as_before() -> None:
    model = lowtide.wrap(nn.LSTM(DIM, DIM), budget="50%")
    with pytest.raises(errors.CaptureError):
        model(sequence())


class Rows(nn.Module):
    """Selects rows, without a branch."""

    def forward(self, x: Tensor) -> Tensor:
        return x[x[:, 0] > 0].sum()


class Doubled(torch.autograd.Function):
    """Reads a value in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * (2.0 if x.sum().item() > -1e9 else 1.0)


class ReadsInBackward(nn.Module):
    """An op whose backward, and nothing else, depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Doubled.apply(self.enter(x))
        return found


def test_which_layers_are_captured() -> None:
    assert is_capturable(ReadsInBackward().forward, (rows(),), {}) is not None
    x = rows()
    assert is_capturable(nn.Linear(DIM, DIM).forward, (x,), {}) is None
    assert "depends on data" in str(is_capturable(Rows().forward, (x,), {}))
    assert "data-dependent" in str(is_capturable(Experts().forward, (x,), {}))
    assert is_capturable(nn.Sequential(nn.LSTM(DIM, DIM)).forward, (x,), {}) is not None


def test_repeated_layers_are_lists_of_one_class() -> None:
    model = nn.ModuleDict(
        {
            "anything": nn.ModuleList(Experts() for _ in range(3)),
            "mixed": nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)),
            "one": nn.ModuleList([Experts()]),
        }
    )
    assert [name for name, _ in repeated_layers(model)] == ["anything", "one.0.experts"]
