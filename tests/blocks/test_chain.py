"""Chains: the peak they predict is the one that is measured, looking at blocks leaves no traces, and bad input."""

from __future__ import annotations

import copy
from itertools import pairwise
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from helpers.chain_cases import BATCH, DIM, Counting, Pair, Residual, WithExtra, random_batches
from helpers.exactness import DropEverything
from lowtide import errors
from lowtide.plan.registry import get
from lowtide.schedule.verify import verify

DROP = DropEverything()


def mlp(width: int = 64) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())


def measured_peak(chained: nn.Module, args: tuple[Any, ...], gradient: Tensor, **keywords: Any) -> int:
    """Return the peak of a step that begins without gradients."""
    for tensor in (*chained.parameters(), *args):
        tensor.grad = None
    return lowtide.measure_peak(lambda: chained(*args, **keywords).backward(gradient))


@pytest.mark.parametrize(
    ("planner", "budget"),
    [
        ("keep_all", "100%"),
        ("rotor", "60%"),
        ("rotor", "52%"),
        ("revolve", "50%"),
        ("chen_sqrt", "70%"),
        ("chen_greedy", "70%"),
        ("chen_recursive", "60%"),
        ("hong_cubic", "60%"),
        ("hong_linear", "60%"),
        ("feng_chain", "60%"),
        ("greedy", "50%"),
    ],
)
def test_predicted_peak_is_the_measured_one(planner: Any, budget: str) -> None:
    """To the byte, for every planner."""
    torch.manual_seed(0)
    chained = lowtide.chain([mlp() for _ in range(12)], budget=budget, planner=planner)
    x, gradient = torch.randn(256, 64, requires_grad=True), torch.randn(256, 64)
    chained(x).backward(gradient)
    (plan,) = chained.plans
    assert plan.peak_bytes <= plan.budget_bytes
    assert measured_peak(chained, (x,), gradient) == plan.peak_bytes


def test_predicted_peak_is_an_upper_bound_for_silly_schedules() -> None:
    """A run that keeps nothing is priced as one that keeps all; here such a run has the peak."""
    chained = lowtide.chain([mlp() for _ in range(12)], budget="1TiB", planner=DROP)
    x, gradient = torch.randn(256, 64, requires_grad=True), torch.randn(256, 64)
    chained(x).backward(gradient)
    predicted = chained.plans[0].peak_bytes
    assert predicted - x.numel() * 4 <= measured_peak(chained, (x,), gradient) <= predicted


def test_unplanned_peak_is_that_of_plain_training() -> None:
    blocks = [mlp() for _ in range(6)]
    chained = lowtide.chain(copy.deepcopy(blocks), budget="90%", planner="rotor")
    x, gradient = torch.randn(256, 64), torch.randn(256, 64)
    chained(x).backward(gradient)
    assert measured_peak(nn.Sequential(*blocks), (x,), gradient) == chained.plans[0].baseline_peak_bytes


@pytest.mark.parametrize("make", [Residual, Counting, lambda: nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, DIM))])
def test_peak_with_random_numbers_and_buffers(make: Any) -> None:
    chained = lowtide.chain([make() for _ in range(8)], budget="1TiB", planner=DROP)
    x, gradient = torch.randn(800, DIM), torch.randn(800, DIM)
    chained(x).backward(gradient)
    predicted = chained.plans[0].peak_bytes
    # Small tensors of normalisations and copies of states of generators are within the tolerance.
    assert measured_peak(chained, (x,), gradient) == pytest.approx(predicted, rel=0.01, abs=1024)


def test_peak_of_one_block_many_times() -> None:
    """The sum of the gradients of shared weights is there once; adding to it takes a copy at first, and none later."""
    block = mlp(128)
    x, gradient = torch.randn(64, 128), torch.randn(64, 128)
    plain = measured_peak(nn.Sequential(*[block] * 10), (x,), gradient)
    for budget in ("80%", "55%"):
        chained = lowtide.chain([block] * 10, budget=budget, planner="rotor")
        chained(x).backward(gradient)
        (plan,) = chained.plans
        assert plan.baseline_peak_bytes == plain
        measured = measured_peak(chained, (x,), gradient)
        assert plan.peak_bytes - x.numel() * 4 <= measured <= plan.peak_bytes


def test_peak_of_uneven_blocks() -> None:
    widths = [32, 128, 16, 64, 64, 256, 32, 96, 32]
    blocks = [nn.Sequential(nn.Linear(a, b), nn.GELU()) for a, b in pairwise(widths)]
    chained = lowtide.chain(blocks, budget="70%", planner="rotor")
    x, gradient = torch.randn(300, 32), torch.randn(300, 32)
    chained(x).backward(gradient)
    assert measured_peak(chained, (x,), gradient) == pytest.approx(chained.plans[0].peak_bytes, rel=0.01)


def test_the_graph_of_a_chain_is_a_chain() -> None:
    chained = lowtide.chain([mlp() for _ in range(5)], budget="1TiB", planner=DROP)
    chained(torch.randn(8, 64)).sum().backward()
    (plan,) = chained.plans
    graph = plan.problem.graph
    assert [op.name for op in graph.ops[:2]] == ["0 forward", "1 forward"]
    assert [op.name for op in graph.ops[5:7]] == ["4 backward", "4 gradients"]
    assert get("rotor").supports(plan.problem) is None
    verify(graph, plan.schedule)
    assert "block by block" in plan.problem.costs.source
    assert str(plan)


def test_looking_at_blocks_leaves_no_traces() -> None:
    blocks: list[nn.Module] = [Residual(), Counting(), nn.BatchNorm1d(DIM), nn.Dropout(0.5), nn.Linear(DIM, DIM)]
    for block in blocks:
        for parameter in block.parameters():
            parameter.grad = torch.ones_like(parameter)
    chained = lowtide.chain(blocks, budget=1, planner="rotor")
    x = torch.randn(BATCH, DIM, requires_grad=True)
    before = {name: (tensor.clone(), tensor._version) for name, tensor in chained.state_dict().items()}
    state = torch.get_rng_state()
    with pytest.raises(errors.InfeasibleBudgetError):
        chained(x)
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in chained.state_dict().items():
        assert torch.equal(tensor, before[name][0]), name
        assert tensor._version == before[name][1], name
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in chained.parameters())
    assert x.grad is None
    assert x._version == 0


def test_equal_blocks_are_looked_at_once() -> None:
    # Not a list or a counter: what blocks leave there when they are looked at is taken away.
    calls: SimpleQueue[int] = SimpleQueue()

    class Noted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            calls.put(1)
            return super().forward(x)

    counts = []
    for number in (4, 40):
        before = calls.qsize()
        chained = lowtide.chain([Noted(DIM, DIM) for _ in range(number)], budget="1TiB", planner="keep_all")
        chained(torch.randn(BATCH, DIM))
        counts.append(calls.qsize() - before - number)
    # Timing repeats runs until they take long enough, so the numbers vary; but not with the length of the chain.
    assert counts[1] < 3 * counts[0]


def test_planning_inside_a_measurement() -> None:
    chained = lowtide.chain([mlp() for _ in range(4)], budget="1TiB", planner=DROP)
    x = torch.randn(64, 64)
    assert lowtide.measure_peak(lambda: chained(x).sum().backward()) > 0
    assert chained.plans


def test_names_are_those_of_the_container() -> None:
    blocks = nn.Sequential()
    blocks.add_module("stem", nn.Linear(DIM, DIM))
    blocks.add_module("body", nn.Linear(DIM, DIM))
    for container in (blocks, nn.ModuleList([nn.Linear(DIM, DIM)])):
        chained = lowtide.chain(container, budget="1TiB")
        assert list(chained.state_dict()) == list(container.state_dict())
        chained.load_state_dict(container.state_dict())


def test_copies_are_chains_of_their_own() -> None:
    chained = lowtide.chain([mlp() for _ in range(4)], budget="1TiB", planner=DROP)
    x = torch.randn(64, 64)
    chained(x).sum().backward()
    other = copy.deepcopy(chained)
    assert not other.plans
    other.zero_grad()
    other(x).sum().backward()
    for one, two in zip(chained.parameters(), other.parameters(), strict=True):
        assert one is not two
        assert torch.equal(one.grad, two.grad)


def test_copies_keep_modes_hooks_and_attributes() -> None:
    chained = lowtide.chain([mlp(), torch.tanh, mlp()], budget="1TiB", planner=DROP)
    chained[0].eval()
    chained.note, seen = ["mine"], []
    chained.register_forward_hook(lambda module, args, result: seen.append(module))
    other = copy.deepcopy(chained)
    assert [module.training for module in other.modules()] == [module.training for module in chained.modules()]
    assert other.note == ["mine"]
    assert other.note is not chained.note
    other(torch.randn(64, 64)).sum().backward()
    assert seen == [other]
    assert other.plans
    assert not chained.plans
    assert other[0] is other.get_submodule("0")
    assert all(parameter.grad is None for parameter in chained.parameters())


def test_plans_are_found_in_a_model() -> None:
    model = nn.Sequential(nn.Linear(DIM, DIM), lowtide.chain([nn.Linear(DIM, DIM)] * 3, budget="1TiB"))
    model(torch.randn(BATCH, DIM)).sum().backward()
    assert len(lowtide.plans(model)) == 1


def linear(*sizes: int) -> list[nn.Module]:
    return [nn.Linear(a, b) for a, b in pairwise(sizes)]


def call(blocks: Any, *args: Any, budget: Any = "1TiB", planner: Any = DROP, emits: int = 0, **keywords: Any) -> Any:
    args = args or (torch.randn(BATCH, DIM),)
    return lowtide.chain(blocks, budget=budget, planner=planner, emits=emits)(*args, **keywords)


CASES: list[tuple[str, type[Exception], Any]] = [
    (r"empty", errors.InvalidModelError, lambda: call([])),
    (r"empty", errors.InvalidModelError, lambda: call(nn.Sequential())),
    (r"Linear is not a chain", errors.InvalidModelError, lambda: call(nn.Linear(2, 2))),
    (r"Block 1 .* cannot be called", errors.InvalidModelError, lambda: call([nn.Linear(DIM, DIM), 3])),
    (
        r"mat1 and mat2 shapes cannot be multiplied \(24x7 and 12x12\)",
        RuntimeError,
        lambda: call([*linear(DIM, DIM, 7), nn.Linear(DIM, DIM)]),
    ),
    (
        r"mat1 and mat2 shapes cannot be multiplied \(3x5 and 12x12\)",
        RuntimeError,
        lambda: call(linear(DIM, DIM), torch.randn(3, 5)),
    ),
    (r"Block 1 .* returned a dict", errors.InvalidModelError, lambda: call([nn.Linear(DIM, DIM), lambda x: {"y": x}])),
    (r"Block 0 .* returned None", errors.InvalidModelError, lambda: call([lambda x: None])),
    (r"entry 1 is a float", errors.InvalidModelError, lambda: call([lambda x: (x, 1.0)])),
    (r"entry 1 is a list", errors.InvalidModelError, lambda: call([lambda x: (x, [x])])),
    (r"an empty tuple", errors.InvalidModelError, lambda: call([lambda x: ()])),
    (
        r"(?s)least budget known to work with planner 'rotor' is \d+ bytes.*Linear.* of block \d",
        errors.InfeasibleBudgetError,
        lambda: call(linear(*[DIM] * 6), budget=100, planner="rotor"),
    ),
    (r"is a list; all must be tensors", errors.InvalidInputError, lambda: call(linear(DIM, DIM), [1])),
    (r"without an input", errors.InvalidInputError, lambda: lowtide.chain(linear(DIM, DIM), budget="1TiB")()),
    (
        r"extras has 1 entries and the chain has 2 blocks",
        errors.InvalidInputError,
        lambda: call([WithExtra(), WithExtra()], extras=[torch.ones(DIM)]),
    ),
    (r"emits=-1", errors.InvalidOptionError, lambda: call(linear(DIM, DIM), emits=-1)),
    (r"none is left", errors.InvalidModelError, lambda: call(linear(DIM, DIM), emits=1)),
    (r"Block 0 .*in place", errors.InvalidInputError, lambda: call([nn.ReLU(inplace=True), nn.Linear(DIM, DIM)])),
    (r"No planner is called", errors.UnknownPlannerError, lambda: call(linear(DIM, DIM), planner="no such")),
    (r"not understood", errors.InvalidBudgetError, lambda: call(linear(DIM, DIM), budget="much")),
]


@pytest.mark.parametrize(("message", "error", "act"), CASES, ids=[case[0][:40] for case in CASES])
def test_bad_input(message: str, error: type[Exception], act: Any) -> None:
    with pytest.raises(error, match=message):
        act()


def test_the_least_budget_of_the_error_works() -> None:
    blocks = [mlp() for _ in range(10)]
    with pytest.raises(errors.InfeasibleBudgetError) as caught:
        call(blocks, torch.randn(64, 64), budget=1, planner="rotor")
    call(blocks, torch.randn(64, 64), budget=caught.value.least_bytes, planner="rotor").sum().backward()


def test_a_plan_far_over_a_small_budget_is_infeasible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks run whole, so a plan may need more than the planner found; here it needs more than twice as much."""
    from lowtide.blocks import chain
    from lowtide.plan.solve import solve

    monkeypatch.setattr(chain, "_as_run", lambda made, problem, plan: solve(problem, "keep_all", throw=False))
    with pytest.raises(errors.InfeasibleBudgetError, match="least budget known to work"):
        call([mlp() for _ in range(24)], torch.randn(512, 64), budget="45%", planner="rotor")


def test_tensors_from_outside_must_be_arguments() -> None:
    outside = torch.randn(DIM, requires_grad=True).exp()
    with pytest.raises(errors.InvalidModelError, match=r"Block 1 .*computed outside.*extra argument"):
        call([nn.Linear(DIM, DIM), lambda x: x * outside])


def test_second_derivatives_are_refused() -> None:
    x = torch.randn(BATCH, DIM, requires_grad=True)
    y = call([Residual() for _ in range(3)], x)
    with pytest.raises(errors.UnsupportedBackwardError, match="Second derivatives"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_a_second_backward_needs_retain_graph() -> None:
    y = call([Residual() for _ in range(3)])
    y.sum().backward()
    with pytest.raises((errors.UnsupportedBackwardError, RuntimeError), match="second time"):
        y.sum().backward()


@pytest.mark.parametrize("what", ["parameter", "input", "extra"])
def test_changes_between_forward_and_backward_are_noticed(what: str) -> None:
    blocks = [WithExtra() for _ in range(3)]
    x, extra = torch.randn(BATCH, DIM), torch.randn(BATCH, DIM)
    chained = lowtide.chain(blocks, budget="1TiB", planner=DROP)
    y = chained(x, extras=[extra.requires_grad_()] * 3)
    changed = {"parameter": blocks[1].linear.weight, "input": x, "extra": extra}[what]
    with torch.no_grad():
        changed.add_(1)
    with pytest.raises(errors.UnsupportedBackwardError, match="changed in place"):
        y.sum().backward()


def test_a_block_that_returns_less_later() -> None:
    short = False

    def block(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return (a * 2,) if short else (a * 2, b * 3)

    chained = lowtide.chain([Pair(), block], budget="1TiB", planner=DROP)
    (args, _) = random_batches(tensors=2)[0]
    chained(*args)
    short = True
    with pytest.raises(errors.InvalidModelError, match="returned 1 tensors"):
        chained(*args)
