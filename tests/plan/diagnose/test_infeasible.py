"""The message about budgets that cannot be met: it adds up, it names what works, and its advice fits the cause."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import lowtide
from helpers.strategies import examples, problems, schedules
from lowtide.cli import DOES_NOT_FIT, main
from lowtide.errors import InfeasibleBudgetError
from lowtide.graph import samples
from lowtide.graph.build import GraphBuilder
from lowtide.graph.costs import Costs
from lowtide.graph.ir import Graph
from lowtide.plan.core.account import MemoryAccount
from lowtide.plan.core.problem import Problem
from lowtide.plan.core.result import Plan
from lowtide.plan.diagnose.infeasible import AskedBudget, Situation, infeasible, infeasible_memory, least_share
from lowtide.plan.diagnose.peak_parts import Cause, Part, account_parts, graph_peak, peak_parts
from lowtide.plan.planners.greedy import Greedy
from lowtide.plan.solve import solve
from lowtide.schedule.steps import Schedule
from lowtide.units import parse_budget

# What each advice begins with.
ADVICE = {
    "gradients": "Train fewer parameters",
    "outputs": "Return only the loss",
    "op": "Split this op",
    "block": "Divide this block",
    "batch": "Make the batch smaller",
    "inputs": "Make the inputs smaller",
    "breaks": "Remove the graph breaks",
    "optimizer": "Use an optimizer that keeps less",
    "model": "Use a smaller model",
    "between": "Hold less between the blocks",
    "planner": 'Search longer: planner="auto_thorough"',
}


def given_advice(words: object) -> set[str]:
    return {name for name, start in ADVICE.items() if start in str(words)}


def check_widths(message: str, first: int = 80) -> None:
    lines = message.split("\n")
    assert max(map(len, lines)) <= 100, message
    assert len(lines[0]) <= first


def with_gradients(problem: Problem) -> Problem:
    """Return the same problem, in which what backward makes are gradients."""
    graph = problem.graph
    values = [
        value if value.producer is None or graph.is_forward(value.producer) else replace(value, kind="gradient")
        for value in graph.values
    ]
    return Problem(replace(graph, values=tuple(values)), problem.costs, problem.budget_bytes)


def least_plan(problem: Problem) -> Plan:
    return solve(replace(problem, budget_bytes=1), Greedy(effort=0), throw=False)


def any_plan(data: st.DataObject, problem: Problem) -> Plan:
    """Return the plan of any legal schedule, which repeats ops at random, for a budget of one byte."""
    return solve(replace(problem, budget_bytes=1), data.draw(schedules(problem.graph)), throw=False)


@settings(max_examples=examples(200), deadline=None)
@given(data=st.data(), problem=problems(), held=st.integers(0, 50))
def test_the_parts_add_up_to_the_least_peak(data: st.DataObject, problem: Problem, held: int) -> None:
    plan = any_plan(data, with_gradients(problem))
    parts = peak_parts(plan)
    assert sum(part.bytes for part in parts) == plan.peak_bytes
    assert [part.bytes for part in parts] == sorted((part.bytes for part in parts), reverse=True)
    if plan.fits:
        return
    error = infeasible(plan, AskedBudget("1 B", 1, held_bytes=held))
    assert (error.budget_bytes, error.least_bytes) == (1, held + plan.peak_bytes)
    assert f"is {error.least_bytes} bytes" in str(error)
    check_widths(str(error))


def test_generator_states_are_a_part_of_their_own() -> None:
    builder = GraphBuilder()
    x = builder.add_input("x", 10)
    (y,) = builder.add_op("dropout", [x], [("y", 10)], random=True, replay_bytes=50)
    builder.begin_backward()
    (end,) = builder.add_op("end", [y], [("end", 1)], kind="gradient")
    problem = Problem(builder.build(outputs=[end]), builder.costs(), 1)
    plan = solve(problem, Schedule((0,), (0, 1)), throw=False)
    # One state to repeat from, and the caller's, which is put aside meanwhile.
    assert [(part.cause, part.bytes) for part in peak_parts(plan)] == [(Cause.STATES, 100), (Cause.OP, 10)]


@settings(max_examples=examples(300), deadline=None)
@given(data=st.data(), problem=problems())
def test_no_schedule_goes_below_a_floor(data: st.DataObject, problem: Problem) -> None:
    problem = with_gradients(problem)
    parts = peak_parts(any_plan(data, problem))
    other = problem.price(data.draw(schedules(problem.graph)))
    assert all(part.floor_bytes <= other.peak_bytes for part in parts)
    # Copies of an output that backward makes for itself are not what the caller holds.
    stay = [part for part in parts if part.cause in (Cause.GRADIENTS, Cause.OUTPUTS)]
    assert all(part.bytes <= part.floor_bytes for part in stay)


@settings(max_examples=60, deadline=None)
@given(problem=problems(), resident=st.tuples(*[st.integers(0, 60)] * 6), other=st.integers(0, 9))
def test_the_parts_of_an_account_add_up_to_its_peak(
    problem: Problem, resident: tuple[int, int, int, int, int, int], other: int
) -> None:
    plan = least_plan(with_gradients(problem))
    *first, update = resident
    account = MemoryAccount(*first, step_bytes=plan.peak_bytes + other, update_bytes=update)
    assert sum(part.bytes for part in account_parts(account, graph_peak(plan))) == account.peak_bytes
    if plan.schedule.steps:
        error = infeasible_memory(account, graph_peak(plan), 1)
        assert error.least_bytes == account.peak_bytes
        check_widths(str(error))


@given(
    parts=st.lists(st.tuples(st.sampled_from(Cause), st.integers(1, 99)), min_size=1, unique_by=lambda each: each[0]),
    excess=st.integers(1, 99),
)
def test_advice_is_given_from_a_third_of_the_peak_on(parts: list[tuple[Cause, int]], excess: int) -> None:
    made = sorted((Part(cause, size, "words") for cause, size in parts), key=lambda part: -part.bytes)
    sizes = {part.cause: part.bytes for part in made}
    total = sum(sizes.values())

    def share(*causes: Cause) -> float:
        return sum(sizes.get(cause, 0) for cause in causes) / total

    def weighs(cause: Cause) -> bool:
        return cause is made[0].cause or share(cause) >= 1 / 3

    expected = {
        "gradients": weighs(Cause.GRADIENTS),
        "outputs": weighs(Cause.OUTPUTS),
        "op": weighs(Cause.OP),
        "breaks": weighs(Cause.EARLIER),
        "between": weighs(Cause.BETWEEN),
        "batch": share(Cause.OP, Cause.KEPT, Cause.PASSING, Cause.OUTPUTS, Cause.BATCH, Cause.BLOCKS, Cause.BETWEEN)
        >= 1 / 3,
        "optimizer": share(Cause.OPTIMIZER, Cause.UPDATE) >= 1 / 3,
        "model": share(Cause.PARAMETERS, Cause.OPTIMIZER, Cause.UPDATE) >= 1 / 3,
        "planner": share(Cause.KEPT, Cause.PASSING, Cause.STATES, Cause.EARLIER, Cause.BLOCKS) * total > excess - 0.5,
    }
    advice = Situation(made, total - excess, excess, "greedy", "an op").advice()
    assert given_advice(advice) == {name for name, is_given in expected.items() if is_given}
    assert not any("no planner can help" in each for each in advice)


@pytest.mark.parametrize(
    ("change", "is_given"),
    [
        ({}, True),
        ({"planner": "auto_thorough"}, False),
        ({"planner": "brute_force"}, False),
        ({"proved": True}, False),
        ({"left_bytes": 2}, False),
        ({"excess_bytes": 6}, True),
        ({"excess_bytes": 7}, False),
        ({"parts": [Part(Cause.OP, 9, "an op", 9)]}, False),
    ],
)
def test_another_planner_is_named_where_it_may_help(change: dict[str, object], is_given: bool) -> None:
    parts = [Part(Cause.KEPT, 6, "kept"), Part(Cause.OP, 3, "an op", 3)]
    situation = replace(Situation(parts, 8, 1, "auto", "an op"), **change)  # type: ignore[arg-type]
    assert ("planner" in given_advice(situation.advice())) == is_given


def test_what_alone_is_too_much_is_said_to_be() -> None:
    parts = [Part(Cause.GRADIENTS, 6, "gradients", 7), Part(Cause.OP, 3, "an op", 3)]
    assert "no planner can help" in Situation(parts, 6, 3, "auto", "an op").advice()[0]
    assert "no planner can help" not in Situation(parts, 7, 2, "auto", "an op").advice()[0]


def test_blocks_and_batches_of_one_have_words_of_their_own() -> None:
    parts = [Part(Cause.OP, 6, "a block", 6)]
    assert given_advice(Situation(parts, 9, 1, "auto", "Linear", "block").advice()) == {"block", "batch"}
    assert given_advice(Situation(parts, 9, 1, "auto", "mm", least_batch=True).advice()) == {"op", "inputs"}


@given(whole=st.integers(1, 2**45), share=st.floats(0, 1))
def test_the_least_percentage_works_and_a_tenth_less_does_not(whole: int, share: float) -> None:
    least = max(1, min(whole, int(share * whole)))
    text = least_share(least, whole)
    assert text is not None
    assert parse_budget(text).resolve(whole) >= least
    less = float(text.removesuffix("%")) - 0.1
    # Where the tenths are finer than a byte, rounding down may cost one of them.
    assert less < 0.05 or parse_budget(f"{less - 0.1 / 8:.4f}%").resolve(whole) < least


def test_more_than_all_has_no_percentage() -> None:
    assert least_share(101, 100) is None
    assert least_share(100, 100) == "100%"
    plan = least_plan(chain_problem())
    words = str(infeasible(plan, AskedBudget("50%", 100, held_bytes=500, whole_bytes=200)))
    assert 'budget="' not in words
    assert f"Raise the budget to {500 + plan.peak_bytes} bytes or more." in words


def chain_problem() -> Problem:
    """Return a chain whose peak is one op's: 300 of 500 bytes."""
    return Problem(*samples.training_chain(4), 1)


def test_the_users_own_budget_is_named() -> None:
    plan = least_plan(chain_problem())
    assert plan.peak_bytes == 300
    error = infeasible(plan, AskedBudget("50%", 350, held_bytes=200, whole_bytes=700))
    words = str(error)
    assert (error.budget_bytes, error.least_bytes) == (350, 500)
    assert "within the budget of 50% (350 bytes, 350 B) was found" in words
    assert "is 500 bytes, or 71.5%." in words
    assert "71.4 % of the unplanned step, which takes 700 bytes" in words
    assert "200 B   40.0 %  kept for backward by other graphs of this call" in words
    assert 'Raise the budget to 500 bytes or more (budget="71.5%").' in words
    assert parse_budget("71.5%").resolve(700) >= 500
    size = infeasible(plan, AskedBudget.of(parse_budget("2KiB"), 2048, held_bytes=2000))
    assert "within the budget of 2048 bytes (2.00 KiB) was found" in str(size)
    assert '%")' not in str(size)


def test_solve_takes_the_users_budget() -> None:
    problem = replace(chain_problem(), budget_bytes=150)
    with pytest.raises(InfeasibleBudgetError, match=r"budget of 25% \(250 bytes") as caught:
        solve(problem, "greedy", asked=AskedBudget("25%", 250, held_bytes=100))
    assert caught.value.budget_bytes == 250
    assert caught.value.least_bytes == 100 + caught.value.plan.peak_bytes
    # What was raised without it can be worded again.
    with pytest.raises(InfeasibleBudgetError, match=r"budget of 150 bytes") as plain:
        solve(problem, "greedy")
    again = infeasible(plain.value.plan, AskedBudget("25%", 250, held_bytes=100))
    assert str(again) == str(caught.value)


def step(*, gradient: int, inside: int, output: int, kept: int) -> Graph:
    """Return a step with an op that uses `inside`, while a gradient, an output and an activation are held."""
    builder = GraphBuilder()
    x = builder.add_input("x", 10)
    builder.add_input("w", gradient, kind="parameter")
    (saved,) = builder.add_op("save", [x], [("saved", kept)], pinned="it has an effect", module="encoder")
    (out,) = builder.add_op("out", [x], [("out", output)])
    builder.begin_backward()
    (dw,) = builder.add_op("dw", [x], [("dw", gradient)], kind="gradient", pinned="it has an effect")
    builder.add_op("wide", [x], [("y", inside)], kind="gradient", source="a/b/net.py:7", module="body", pinned="once")
    (end,) = builder.add_op("end", [saved], [("end", 0)], kind="gradient")
    return builder.build(outputs=[out, dw, end])


@pytest.mark.parametrize(
    ("sizes", "cause", "advice"),
    [
        ({"gradient": 90}, Cause.GRADIENTS, {"gradients"}),
        ({"inside": 90}, Cause.OP, {"op", "batch"}),
        ({"output": 90}, Cause.OUTPUTS, {"outputs", "batch"}),
        ({"kept": 90}, Cause.KEPT, {"batch", "planner"}),
        ({"gradient": 90, "inside": 80}, Cause.GRADIENTS, {"gradients", "op", "batch"}),
    ],
    ids=["gradients", "op", "outputs", "kept", "two"],
)
def test_what_is_in_the_way_is_named_first(sizes: dict[str, int], cause: Cause, advice: set[str]) -> None:
    graph = step(**{"gradient": 2, "inside": 2, "output": 2, "kept": 0} | sizes)
    costs = Costs((1.0,) * len(graph.ops), (0,) * len(graph.ops), "given")
    problem = Problem(graph, costs, 1)
    peak = solve(problem, "keep_all", throw=False).peak_bytes
    with pytest.raises(InfeasibleBudgetError) as caught:
        solve(replace(problem, budget_bytes=peak - 1), "keep_all")
    assert peak_parts(caught.value.plan)[0].cause is cause
    assert given_advice(caught.value) == advice
    if "op" in advice:
        assert "wide in body (b/net.py:7)" in str(caught.value)
    if cause is Cause.KEPT:
        assert "the largest is 90 B, save in encoder" in str(caught.value)
    if cause is Cause.GRADIENTS:
        assert "parameter gradients" in str(caught.value)


class Plain(nn.Module):
    """Returns all that its layers give."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Loss(Plain):
    """Reduces what its layers give to one number."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


class Similarity(nn.Module):
    """Makes one matrix that is far larger than all else."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return torch.softmax(h @ h.t(), -1).square().mean()


def gradients() -> tuple[nn.Module, Tensor]:
    return Loss(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)), torch.randn(4, 64)


def one_op() -> tuple[nn.Module, Tensor]:
    return Similarity(), torch.randn(256, 8)


def outputs() -> tuple[nn.Module, Tensor]:
    return Plain(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 512)), torch.randn(128, 8)


def deep() -> tuple[nn.Module, Tensor]:
    layers = [layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())]
    return Loss(*layers), torch.randn(256, 16)


CASES: list[tuple[Callable[[], tuple[nn.Module, Tensor]], Cause, str]] = [
    (gradients, Cause.GRADIENTS, "gradients"),
    (one_op, Cause.OP, "op"),
    (outputs, Cause.OUTPUTS, "outputs"),
    (deep, Cause.OP, "batch"),
]


@pytest.mark.parametrize(
    ("planner", "make", "cause", "advice"),
    [
        pytest.param(
            planner,
            *case,
            marks=pytest.mark.slow if planner == "auto" and case[0] is deep else (),
            id=f"{planner}-{case[0].__name__}",
        )
        for planner, case in itertools.product(["auto", "greedy"], CASES)
    ],
)
def test_the_least_budget_of_the_message_works(
    make: Callable[[], tuple[nn.Module, Tensor]], cause: Cause, advice: str, planner: str
) -> None:
    model, x = make()
    how = {"planner": planner, "costs": "analytic"}
    with pytest.raises(InfeasibleBudgetError) as caught:
        lowtide.plan(model, (x,), budget=1000, **how)
    error = caught.value
    assert error.budget_bytes == 1000
    assert peak_parts(error.plan)[0].cause is cause
    assert advice in given_advice(error)
    assert "test_infeasible.py:" in str(error)
    check_widths(str(error))
    assert lowtide.plan(model, (x,), budget=error.least_bytes, **how).peak_bytes <= error.least_bytes
    share = least_share(error.least_bytes, error.plan.baseline_peak_bytes)
    assert lowtide.plan(model, (x,), budget=share, **how).fits
    wrapped = lowtide.wrap(model, budget=error.least_bytes, **how)
    wrapped(x).sum().backward()
    assert lowtide.plans(wrapped)[0].peak_bytes <= error.least_bytes


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("make", [gradients, deep])
def test_the_least_memory_of_the_message_works(make: Callable[[], tuple[nn.Module, Tensor]], optimizer: str) -> None:
    model, x = make()
    how = {"planner": "greedy", "costs": "analytic", "optimizer": optimizer}
    with pytest.raises(InfeasibleBudgetError) as caught:
        lowtide.plan(model, (x,), memory=2000, **how)
    error = caught.value
    check_widths(str(error))
    assert error.budget_bytes == 2000
    assert lowtide.plan(model, (x,), memory=error.least_bytes, **how).account.peak_bytes <= error.least_bytes
    with pytest.raises(InfeasibleBudgetError):
        lowtide.plan(model, (x,), memory=error.least_bytes - 1, **how)
    if make is gradients and optimizer == "adam":
        assert {"optimizer", "model"} <= given_advice(error)


def test_the_command_line_prints_short_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a_model_of_the_users.py"
    file.write_text(
        "import torch\n"
        "from torch import nn\n"
        "def make():\n"
        "    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1)), (torch.randn(4, 64),)\n"
    )
    code = main(["plan", f"{file}:make", "--budget", "1%", "--planner", "greedy", "--costs", "analytic"])
    printed = capsys.readouterr().err.strip()
    assert code == DOES_NOT_FIT
    assert printed.startswith("lowtide plan: No schedule within the budget of ")
    assert "Traceback" not in printed
    check_widths(printed, first=100)
    assert "gradients" in given_advice(printed)
