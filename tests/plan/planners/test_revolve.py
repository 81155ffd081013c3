"""Binomial checkpointing against its closed form, a dynamic program, and the order known for ten layers."""

from collections import Counter
from functools import cache
from math import comb

import pytest

from lowtide.errors import InvalidOptionError, PlannerRefusedError
from lowtide.graph import samples
from lowtide.plan.core.problem import Problem
from lowtide.plan.planners import revolve
from lowtide.plan.planners.chain_dp.operations import Action
from lowtide.plan.planners.revolve import (
    Revolve,
    best_split,
    checkpoint_numbers,
    recomputations,
    repetitions,
    revolve_operations,
)
from lowtide.plan.solve import solve

MOST_LAYERS, MOST_CHECKPOINTS = 200, 20
PAIRS = [(n, s) for n in range(1, MOST_LAYERS + 1) for s in range(1, MOST_CHECKPOINTS + 1)]


@cache
def least(n, s):
    """Return the fewest runs by trying every place of the next checkpoint, and the fewest checkpoints written then.

    A checkpoint before a single layer need not be written, for that layer's turn is next.
    """
    if n == 1:
        return 0, 0
    if s == 1:
        return n * (n - 1) // 2, 0
    return min(
        (
            k + least(n - k, s - 1)[0] + least(k, s)[0],
            (n - k > 1) + least(n - k, s - 1)[1] + least(k, s)[1],
        )
        for k in range(1, n)
    )


def run(n, s):
    """Carry out the operations with at most `s` inputs held; return runs before each layer's turn, and inputs taken."""
    held, head, turn, runs, taken = {0}, 0, n, Counter(), 0
    for action, layer in revolve_operations(n, s):
        if action is Action.BACKWARD:
            assert layer == turn - 1
            assert head == ("all", layer)
            held.discard(layer)
            turn, head = layer, None
            continue
        assert layer in held or head == layer, "the input is not there"
        if action is Action.KEEP_INPUT and layer not in held:
            held.add(layer)
            taken += 1
        assert len(held) <= s
        if action is Action.KEEP_ALL:
            # The layer's own turn: its input is read there and then, and needs no checkpoint.
            head = ("all", layer)
        else:
            runs[layer] += 1
            head = layer + 1
    assert turn == 0
    return runs, taken


def test_closed_form_equals_the_dynamic_program():
    for n, s in PAIRS:
        assert recomputations(n, s) == least(n, s)[0], (n, s)


def test_closed_form_is_the_binomial_formula():
    for n, s in PAIRS:
        r = repetitions(n, s)
        assert comb(s + r, s) >= n
        assert not r or comb(s + r - 1, s) < n
        assert recomputations(n, s) == r * n - (comb(s + r, s + 1) if r else 0)


def test_operations_run_as_few_layers_as_promised_with_the_checkpoints_given():
    for n, s in PAIRS:
        if n > 50 and n not in (77, 120, 200):
            continue
        runs, taken = run(n, s)
        assert sum(runs.values()) == recomputations(n, s), (n, s)
        assert max(runs.values(), default=0) == repetitions(n, s)
        assert taken == least(n, s)[1], (n, s)


def test_the_comparison_can_fail(monkeypatch):
    monkeypatch.setattr(revolve, "best_split", lambda layers, checkpoints: layers // 2)
    assert sum(run(10, 3)[0].values()) > recomputations(10, 3)
    with pytest.raises(AssertionError):
        test_operations_run_as_few_layers_as_promised_with_the_checkpoints_given()


def test_every_split_is_optimal():
    for n, s in PAIRS:
        if n > 1 and s > 1:
            k = best_split(n, s)
            assert 1 <= k < n
            assert k + least(n - k, s - 1)[0] + least(k, s)[0] == least(n, s)[0]


def test_ten_layers_with_three_checkpoints_go_in_the_known_order():
    # Ten is b(3, 2), so there is only one optimal order: checkpoints at 0, 4 and 7, then 4 and 5, then 0, 1 and 2.
    short = {Action.PASS: "f", Action.KEEP_INPUT: "c", Action.KEEP_ALL: "t", Action.BACKWARD: "b"}
    trace = " ".join(f"{short[action]}{layer}" for action, layer in revolve_operations(10, 3))
    assert trace == (
        "c0 f1 f2 f3 c4 f5 f6 c7 f8 t9 b9 c7 t8 b8 t7 b7 c4 c5 t6 b6 t5 b5 t4 b4 c0 c1 c2 t3 b3 t2 b2 t1 b1 t0 b0"
    )
    assert recomputations(10, 3) == 15


@pytest.mark.parametrize(
    ("n", "s", "runs"), [(1, 1, 0), (2, 1, 1), (5, 1, 10), (4, 4, 3), (56, 5, 140), (1000, 10, 3636)]
)
def test_known_numbers_of_runs(n, s, runs):
    assert recomputations(n, s) == runs


def test_memory_grows_with_the_logarithm():
    for s in range(1, 12):
        assert repetitions(comb(2 * s, s), s) == s


def test_planner_trades_checkpoints_for_time():
    graph, costs = samples.training_chain(40)
    problem = Problem(graph, costs, 10**9)
    traces = [problem.price(Revolve(checkpoints=s).propose(problem).schedule) for s in (1, 2, 4, 8, 20, 41)]
    assert [trace.peak_bytes for trace in traces] == sorted(trace.peak_bytes for trace in traces)
    assert [trace.seconds for trace in traces] == sorted((trace.seconds for trace in traces), reverse=True)


def test_planner_runs_what_the_formula_says():
    graph, costs = samples.training_chain(30)
    problem = Problem(graph, costs, 10**9)
    for s in (2, 3, 5, 9):
        steps = Revolve(checkpoints=s).propose(problem).schedule.steps
        # A layer's own turn takes no run here, for its backward reads nothing but its input. The first pass counts for
        # all layers but the last, whose own turn it is.
        assert sum(step < graph.num_forward for step in steps) == recomputations(30, s) + 1


def test_planner_takes_the_fastest_that_fits():
    graph, costs = samples.training_chain(40)
    peak = Problem(graph, costs, 1).baseline.peak_bytes
    seconds = [solve(Problem(graph, costs, peak * share // 100), Revolve()).trace.seconds for share in (90, 50, 25, 12)]
    assert seconds == sorted(seconds)


def test_numbers_to_try():
    assert checkpoint_numbers(3) == [1, 2, 3]
    many = checkpoint_numbers(5000)
    assert len(many) <= 40
    assert many[-1] == 5000
    assert repetitions(5000, many[0]) <= 30


@pytest.mark.parametrize(
    "call",
    [
        lambda: Revolve(checkpoints=-1),
        lambda: Revolve(max_pieces=1),
        lambda: recomputations(0, 3),
        lambda: revolve_operations(3, 0),
    ],
)
def test_bad_options(call):
    with pytest.raises(InvalidOptionError, match="there must be at least"):
        call()


def test_refusals():
    for graph, costs in (samples.chain(5), samples.training_chain(1)):
        with pytest.raises(PlannerRefusedError, match="it needs"):
            solve(Problem(graph, costs, 10**6), Revolve())
