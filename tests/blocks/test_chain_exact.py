"""A chain gives the bits of a plain loop over its blocks: outputs, gradients, buffers, optimizer and random state."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowtide
from helpers.chain_cases import (
    BATCH,
    DIM,
    PLANNERS,
    Counting,
    Pair,
    Residual,
    WithExtra,
    assert_chain_exact,
    random_batches,
)
from helpers.exactness import DropEverything, assert_same, train

DROP = DropEverything()


@pytest.mark.parametrize("name", PLANNERS)
def test_normalisation_and_dropout(name: str) -> None:
    budget = "1TiB" if name.startswith("drop") else "88%"
    plan = assert_chain_exact([Residual() for _ in range(9)], random_batches(), planner=PLANNERS[name], budget=budget)
    assert plan.num_recomputed


def test_gradients_pile_up_over_calls() -> None:
    assert_chain_exact([Residual() for _ in range(5)], random_batches(steps=6), zero_every=3)


def test_gradients_are_set_to_zero_instead_of_none() -> None:
    assert_chain_exact([Residual() for _ in range(5)], random_batches(), set_to_none=False)


def test_input_without_gradient() -> None:
    assert_chain_exact([Residual() for _ in range(5)], random_batches(needs=False))


@pytest.mark.parametrize("frozen", [(0, 1), (2,), (3, 4), (0, 1, 2, 4)])
@pytest.mark.parametrize("needs", [True, False])
def test_frozen_blocks(frozen: tuple[int, ...], needs: bool) -> None:
    blocks = [Residual() for _ in range(5)]
    for number in frozen:
        blocks[number].requires_grad_(False)
    plan = assert_chain_exact(blocks, random_batches(needs=needs))
    forward = [op.name for op in plan.problem.graph.ops if op.name.endswith("forward")]
    assert len(forward) == 5


def test_a_frozen_parameter_inside_a_block() -> None:
    blocks = [Residual() for _ in range(4)]
    for block in blocks:
        block.up.weight.requires_grad_(False)
    assert_chain_exact(blocks, random_batches())


def test_blocks_that_change_and_read_buffers() -> None:
    assert_chain_exact([Counting() for _ in range(5)], random_batches())


def test_one_block_many_times() -> None:
    """Contributions to the shared weights are added in the order of plain training."""
    block = Counting()
    assert_chain_exact([block] * 7, random_batches())
    block = Residual()
    assert_chain_exact([block] * 6, random_batches(), zero_every=3)


def test_weights_used_twice_in_each_of_several_blocks() -> None:
    linear = nn.Linear(DIM, DIM)

    def twice(x: Tensor) -> Tensor:
        return torch.sin(linear(torch.tanh(linear(x))))

    x = torch.randn(BATCH, DIM)
    expected = x
    for _ in range(5):
        expected = twice(expected)
    gradient = torch.randn(BATCH, DIM)
    wanted = torch.autograd.grad(expected, list(linear.parameters()), gradient)
    found = lowtide.chain([twice] * 5, budget="1TiB", planner=DROP)(x)
    assert torch.equal(found, expected)
    for one, other in zip(torch.autograd.grad(found, list(linear.parameters()), gradient), wanted, strict=True):
        assert torch.equal(one, other)


def test_tuples_of_tensors() -> None:
    assert_chain_exact([Pair() for _ in range(6)], random_batches(tensors=2))


def test_extra_arguments_and_keywords() -> None:
    generator = torch.Generator().manual_seed(1)

    def tensor(needs: bool) -> Tensor:
        return torch.randn(BATCH, DIM, generator=generator).requires_grad_(needs)

    shared = tensor(True)
    batches = []
    for _ in range(3):
        extras = [tensor(True), tensor(False), (tensor(True),), shared, shared, tensor(True)]
        batches.append(((tensor(True),), {"extras": extras, "scale": tensor(True)}))
    assert_chain_exact([WithExtra() for _ in range(6)], batches)


def test_keywords_that_are_nested() -> None:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)

        def forward(self, x: Tensor, *, position: tuple[Tensor, Tensor], factor: float) -> Tensor:
            return torch.tanh(self.linear(x) * position[0] + position[1]) * factor

    position = (torch.randn(DIM, requires_grad=True), torch.randn(DIM, requires_grad=True))
    batches = [(args, {"position": position, "factor": 1.5}) for args, _ in random_batches()]
    assert_chain_exact([Rotary() for _ in range(5)], batches)


def test_autocast() -> None:
    blocks = [Residual() for _ in range(5)]
    plain = copy.deepcopy(blocks)
    chained = lowtide.chain(blocks, budget="1TiB", planner=DROP)

    def loop(x: Tensor) -> Tensor:
        for block in plain:
            x = block(x)
        return x

    def called(model: Any) -> Any:
        def call(x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return model(x)

        return call

    batches = random_batches()
    expected = train(nn.ModuleList(plain), called(loop), batches)
    found = train(nn.ModuleList(blocks), called(chained), batches)
    assert_same(expected, found)
    assert chained.plans[0].num_recomputed


def test_autocast_only_around_backward_does_not_matter() -> None:
    blocks = [Residual() for _ in range(3)]
    chained = lowtide.chain(copy.deepcopy(blocks), budget="1TiB", planner=DROP)
    ((x,), _) = random_batches()[0]
    torch.manual_seed(2)
    expected = nn.Sequential(*blocks)(x)
    torch.manual_seed(2)
    found = chained(x)
    (one,) = torch.autograd.grad(expected.sum(), x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (other,) = torch.autograd.grad(found.sum(), x)
    assert torch.equal(one, other)


def test_double_precision_and_other_shapes_are_planned_anew() -> None:
    chained = lowtide.chain([nn.Linear(DIM, DIM) for _ in range(4)], budget="1TiB", planner=DROP)
    for shape in ((3, DIM), (5, DIM), (3, DIM), (2, 3, DIM)):
        chained(torch.randn(shape)).sum().backward()
    assert len(chained.plans) == 3


def test_blocks_that_write_over_their_input_join_the_one_before() -> None:
    blocks: list[nn.Module] = []
    for _ in range(4):
        blocks += [nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM), nn.ReLU(inplace=True)]
    plan = assert_chain_exact(blocks, random_batches())
    names = [op.name for op in plan.problem.graph.ops if op.name.endswith("forward")]
    assert names[:3] == ["0 forward", "1-2 forward", "3 forward"]


def test_views_and_states_that_pass_through() -> None:
    class Through(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)

        def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
            return torch.tanh(self.linear(x) * memory), memory

    def flat(x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        return x.view(-1, DIM), memory

    assert_chain_exact([Through(), flat, Through(), Through(), flat, Through()], random_batches(tensors=2))
    assert_chain_exact([Through() for _ in range(5)], random_batches(tensors=2), planner="greedy", budget="80%")


def test_results_that_need_no_gradient() -> None:
    class Numbered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)

        def forward(self, x: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
            return torch.tanh(self.linear(x)) * count, count + 1

    batches = [((x, torch.tensor(3)), {}) for (x,), _ in random_batches()]
    assert_chain_exact([Numbered() for _ in range(4)], batches)


def test_blocks_that_cut_the_gradient() -> None:
    class Cut(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.detach() * 2

    blocks: list[nn.Module] = [Residual(), Residual(), Cut(), Residual(), Residual()]
    assert_chain_exact(blocks, random_batches())


def test_unused_parameters_get_no_gradient() -> None:
    class Spare(Residual):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(3, 3)

    assert_chain_exact([Spare() for _ in range(4)], random_batches())


def test_emitted_tensors() -> None:
    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            after = torch.tanh(self.linear(x))
            return after, after.exp(), (after * 2).detach()

    steps = [Step() for _ in range(5)]
    plain = copy.deepcopy(steps)

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps = nn.ModuleList(plain)

        def forward(self, x: Tensor) -> Any:
            rows = []
            for step in self.steps:
                x, *row = step(x)
                rows.append(tuple(row))
            return x, rows

    chained = lowtide.chain(steps, budget="1TiB", planner=DROP, emits=2)
    loop = Plain()
    batches = random_batches()
    assert_same(_renamed(train(loop, loop, batches)), _renamed(train(chained, chained, batches)))
    assert chained.plans[0].num_recomputed


def _renamed(records: list[Any]) -> list[Any]:
    for record in records:
        record.results = {key.replace("steps.", ""): value for key, value in record.results.items()}
    return records


def test_hooks_on_parameters_see_whole_gradients_once() -> None:
    block = nn.Linear(DIM, DIM)
    chained = lowtide.chain([block] * 4, budget="1TiB", planner=DROP)
    plain = copy.deepcopy(block)
    seen: list[Tensor] = []
    block.weight.register_hook(lambda gradient: seen.append(gradient) or gradient * 2)
    x = torch.randn(BATCH, DIM)
    chained(x).sum().backward()
    plain(plain(plain(plain(x)))).sum().backward()
    assert len(seen) == 1
    assert torch.equal(seen[0], plain.weight.grad)
    assert torch.equal(block.weight.grad, plain.weight.grad * 2)


def test_forward_hooks_leave_what_one_run_leaves() -> None:
    blocks = [nn.Linear(DIM, DIM) for _ in range(4)]
    chained = lowtide.chain(blocks, budget="1TiB", planner=DROP)
    chained(torch.randn(BATCH, DIM)).sum().backward()
    calls: list[str] = []
    blocks[0].register_forward_hook(lambda *_: calls.append("forward"))
    blocks[0].register_full_backward_hook(lambda *_: calls.append("backward"))
    chained(torch.randn(BATCH, DIM, requires_grad=True)).sum().backward()
    calls.clear()
    chained(torch.randn(BATCH, DIM, requires_grad=True)).sum().backward()
    assert calls == ["forward", "backward"]


def test_retain_graph() -> None:
    blocks = [Residual() for _ in range(5)]
    plain = nn.Sequential(*copy.deepcopy(blocks))
    chained = lowtide.chain(blocks, budget="88%", planner="rotor")
    ((x,), _) = random_batches()[0]
    results = []
    for model in (plain, chained):
        torch.manual_seed(4)
        y = model(x)
        parameters = list(model.parameters())
        first = torch.autograd.grad(y.sum(), [x, *parameters], retain_graph=True)
        second = torch.autograd.grad((y * y).sum(), [x, *parameters])
        results.append([*first, *second])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_two_calls_before_backward() -> None:
    blocks = [Residual() for _ in range(5)]
    plain = nn.Sequential(*copy.deepcopy(blocks))
    chained = lowtide.chain(blocks, budget="1TiB", planner=DROP)
    (first, _), (second, _) = random_batches(steps=2)
    results = []
    for model in (plain, chained):
        torch.manual_seed(4)
        losses = [model(*first).sum(), model(*second).sum()]
        losses[1].backward()
        losses[0].backward()
        results.append([parameter.grad for parameter in model.parameters()] + list(model.buffers()))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_freezing_between_steps_is_noticed() -> None:
    blocks = [nn.Linear(DIM, DIM) for _ in range(4)]
    chained = lowtide.chain(blocks, budget="1TiB", planner=DROP)
    x = torch.randn(BATCH, DIM)
    chained(x).sum().backward()
    blocks[1].requires_grad_(False)
    chained.zero_grad(set_to_none=True)
    chained(x).sum().backward()
    assert blocks[1].weight.grad is None
    blocks[1].requires_grad_(True)
    blocks[2].extra = nn.Parameter(torch.ones(DIM))
    blocks[2].register_forward_hook(lambda module, args, result: result * module.extra)
    chained(x).sum().backward()
    assert blocks[1].weight.grad is not None
    assert blocks[2].extra.grad is not None


def test_functions_that_refer_to_parameters() -> None:
    weights = [nn.Parameter(torch.randn(DIM, DIM) / 4) for _ in range(5)]
    blocks = [lambda x, w=w: torch.tanh(x @ w) for w in weights]
    x = torch.randn(BATCH, DIM, requires_grad=True)
    expected = x
    for block in blocks:
        expected = block(expected)
    found = lowtide.chain(blocks, budget="1TiB", planner=DROP)(x)
    wanted = torch.autograd.grad(expected.sum(), [x, *weights])
    for one, other in zip(torch.autograd.grad(found.sum(), [x, *weights]), wanted, strict=True):
        assert torch.equal(one, other)


def test_random_state_goes_on_as_in_plain_training() -> None:
    blocks = [Residual() for _ in range(4)]
    plain = nn.Sequential(*copy.deepcopy(blocks))
    chained = lowtide.chain(blocks, budget="1TiB", planner=DROP)
    states = []
    for model in (plain, chained):
        torch.manual_seed(9)
        model(torch.randn(BATCH, DIM)).sum().backward()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_random_numbers_that_begin_later() -> None:
    """A block that drew nothing when it was looked at may draw later."""
    blocks = [Residual() for _ in range(4)]
    plain, rate = copy.deepcopy(blocks), 0.0

    def noisy(block: nn.Module) -> Any:
        return lambda x: F.dropout(block.down(torch.tanh(block.up(x))), rate, rate > 0)

    chained = lowtide.chain([noisy(block) for block in blocks], budget="1TiB", planner=DROP)
    x = torch.randn(BATCH, DIM)
    chained(x).sum().backward()
    assert not any(op.random for op in chained.plans[0].problem.graph.ops)
    rate = 0.4
    results = []
    for call, owner in ((chained, blocks), (nn.Sequential(*map(_Called, map(noisy, plain))), plain)):
        for parameter in nn.ModuleList(owner).parameters():
            parameter.grad = None
        torch.manual_seed(8)
        y = call(x)
        y.sum().backward()
        results.append([y, torch.get_rng_state(), *(block.up.weight.grad for block in owner)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


class _Called(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def test_convolutions() -> None:
    blocks = [
        nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.GELU(), nn.Dropout2d(0.2)) for _ in range(5)
    ]
    batches = [((torch.randn(2, 4, 9, 9, requires_grad=True),), {}) for _ in range(3)]
    assert_chain_exact(blocks, batches)
    wide = [((args[0].detach().to(memory_format=torch.channels_last),), {}) for args, _ in batches]
    assert_chain_exact(blocks, wide)


def test_a_very_deep_chain() -> None:
    weight = nn.Parameter(torch.full((), 1.0001))
    x = torch.ones(8)
    chained = lowtide.chain([lambda x: torch.sin(x * weight)] * 1500, budget="30%", planner="chen_sqrt")
    found = torch.autograd.grad(chained(x).sum(), weight)
    expected = x
    for _ in range(1500):
        expected = torch.sin(expected * weight)
    assert torch.equal(found[0], torch.autograd.grad(expected.sum(), weight)[0])
    assert chained.plans[0].num_recomputed > 1000


def test_eval_and_no_grad_go_straight_through() -> None:
    blocks = [Residual() for _ in range(3)]
    chained = lowtide.chain(blocks, budget="1TiB", planner=DROP)
    x = torch.randn(BATCH, DIM)
    with torch.no_grad():
        torch.manual_seed(0)
        found = chained(x)
        torch.manual_seed(0)
        assert torch.equal(found, nn.Sequential(*copy.deepcopy(blocks))(x))
    chained.eval()
    y = chained(x)
    assert y.grad_fn is not None
    assert "_Chain" not in y.grad_fn.name()
    chained.train().requires_grad_(False)
    assert chained(x).grad_fn is None
    assert not chained.plans


def test_what_fits_runs_plainly() -> None:
    chained = lowtide.chain([Residual() for _ in range(3)], budget="100%")
    y = chained(torch.randn(BATCH, DIM))
    assert "_Chain" not in y.grad_fn.name()
    assert chained.plans[0].num_recomputed == 0


def test_the_comparison_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowtide.blocks.execute import call_state as executor

    monkeypatch.setattr(executor, "restore_random_states", lambda places, states: None)
    with pytest.raises(AssertionError, match="differs"):
        assert_chain_exact([Residual() for _ in range(4)], random_batches())
    monkeypatch.undo()
    monkeypatch.setattr("lowtide.blocks.block.position.track_statistics", lambda norms, on: None)
    with pytest.raises(AssertionError, match=r"running_mean|num_batches"):
        assert_chain_exact([Residual() for _ in range(4)], random_batches())


def test_losses_inside_the_state() -> None:
    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.GRUCell(DIM, DIM), nn.Linear(DIM, 5)

        def forward(self, hidden: Tensor, loss: Tensor, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.cell(x, hidden)
            return hidden, loss + F.cross_entropy(self.head(hidden), target)

    step = Step()
    generator = torch.Generator().manual_seed(3)
    batches = []
    for _ in range(3):
        rows = [
            (torch.randn(BATCH, DIM, generator=generator), torch.randint(5, (BATCH,), generator=generator))
            for _ in range(8)
        ]
        batches.append(((torch.zeros(BATCH, DIM), torch.zeros(())), {"extras": rows}))
    assert_chain_exact([step] * 8, batches, loss=lambda result: result[1])
