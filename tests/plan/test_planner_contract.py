"""What every planner promises, tried on all of them; and greedy against the exact oracle."""

import itertools

import pytest
from hypothesis import HealthCheck, given, settings

from helpers.strategies import examples, problems
from lowtide.errors import InfeasibleBudgetError, InvalidOptionError, PlannerRefusedError
from lowtide.graph import samples
from lowtide.plan import registry
from lowtide.plan.auto.planner import Auto
from lowtide.plan.core.problem import Problem
from lowtide.plan.core.result import Outcome
from lowtide.plan.planners.brute_force import BruteForce
from lowtide.plan.planners.chen_sqrt import ChenSqrt
from lowtide.plan.planners.drop_cheap import DropCheap, is_cheap
from lowtide.plan.planners.greedy import Greedy
from lowtide.plan.planners.keep_all import KeepAll
from lowtide.plan.solve import solve
from lowtide.schedule.verify import verify

QUICK = Greedy(effort=0.02)
PLANNERS = {name: registry.get(name) for name in registry.names()} | {
    "greedy": QUICK,
    "auto": Auto(planners={"keep_all": KeepAll(), "drop_cheap": DropCheap(), "chen": ChenSqrt(), "greedy": QUICK}),
}
CASES = {
    "training_chain": samples.training_chain(6),
    "uneven_chain": samples.training_chain(5, sizes=[50, 300, 20, 200, 80], seconds=[3, 1, 2, 5, 1]),
    "skip_chain": samples.skip_chain(8),
    "unet": samples.unet(2),
    "random": samples.random_dag(5, n=7),
    "random_without_phases": samples.random_dag(6, n=8, phases=False),
    "chain": samples.chain(4),
}


def check_contract(problem, planner):
    """Solve, and check all that must hold whether or not the budget is met; return the plan, or None if refused."""
    reason = planner.supports(problem)
    if reason is not None:
        with pytest.raises(PlannerRefusedError, match="cannot serve"):
            solve(problem, planner)
        return None
    plan = solve(problem, planner, throw=False)
    if not plan.fits:
        assert plan.outcome in (Outcome.OVER_BUDGET, Outcome.IMPOSSIBLE)
        with pytest.raises(
            InfeasibleBudgetError, match=f"known to work with planner .* is {plan.peak_bytes} "
        ) as caught:
            solve(problem, planner)
        least = caught.value.least_bytes
        assert caught.value.budget_bytes == problem.budget_bytes < least
        plan = solve(Problem(problem.graph, problem.costs, least), planner)
        assert plan.peak_bytes <= least
        return plan
    verify(problem.graph, plan.schedule)
    assert plan.peak_bytes <= problem.budget_bytes
    assert plan.overhead >= -1e-12
    if plan.bound is not None:
        assert plan.overhead >= plan.bound - 1e-12
    return plan


def is_slow(name, case, share):
    """Return whether the planners that ask all others take seconds for this."""
    tight = {"unet": 50, "skip_chain": 50, "training_chain": 20}
    return name in ("auto", "auto_thorough") and share <= tight.get(case, 0)


@pytest.mark.parametrize(
    ("name", "case", "share"),
    [
        pytest.param(*each, marks=pytest.mark.slow if is_slow(*each) else ())
        for each in itertools.product(PLANNERS, CASES, [100, 75, 50, 20])
    ],
)
def test_contract(name, case, share):
    graph, costs = CASES[case]
    peak = Problem(graph, costs, 1).baseline.peak_bytes
    problem = Problem(graph, costs, peak * share // 100)
    plan = check_contract(problem, PLANNERS[name])
    if plan is not None and plan.problem == problem:
        assert solve(problem, PLANNERS[name]).schedule == plan.schedule


@settings(max_examples=examples(400), deadline=None, suppress_health_check=list(HealthCheck))
@given(problems(max_ops=6))
def test_contract_on_marked_graphs(problem):
    for planner in PLANNERS.values():
        check_contract(problem, planner)


def check_against_oracle(problem):
    """Check that greedy does not beat `brute_force`; return whether it equals it, or None if nothing fits."""
    oracle = BruteForce(max_ops=12, max_values=20).propose(problem)
    best = problem.price(oracle.schedule)
    if not oracle.optimal:
        assert best.peak_bytes > problem.budget_bytes
        return None
    assert best.peak_bytes <= problem.budget_bytes
    trace = problem.price(QUICK.propose(problem).schedule)
    if not problem.fits(trace):
        return False
    assert trace.seconds >= best.seconds - 1e-9
    return trace.seconds <= best.seconds + 1e-9


@pytest.mark.parametrize("seed", range(60))
def test_greedy_never_goes_below_the_least_peak(seed):
    graph, costs = samples.random_dag(seed, n=7, phases=seed % 2 == 0)
    hopeless = Problem(graph, costs, 1)
    least = hopeless.price(BruteForce().propose(hopeless).schedule).peak_bytes
    assert hopeless.price(QUICK.propose(hopeless).schedule).peak_bytes >= least


@pytest.mark.parametrize("number", [250, pytest.param(800, marks=pytest.mark.slow)])
def test_greedy_never_beats_the_oracle_and_often_equals_it(number):
    results = []
    for seed in range(number):
        graph, costs = samples.random_dag(seed, n=5 + seed % 3, phases=seed % 2 == 0)
        peak = Problem(graph, costs, 1).baseline.peak_bytes
        results.append(check_against_oracle(Problem(graph, costs, peak * (82 + 6 * (seed % 3)) // 100)))
    solvable = [result for result in results if result is not None]
    assert len(solvable) > number / 4
    assert sum(solvable) > 0.9 * len(solvable)


@settings(max_examples=examples(500), deadline=None, suppress_health_check=list(HealthCheck))
@given(problems(max_ops=6))
def test_greedy_never_beats_the_oracle_on_marked_graphs(problem):
    check_against_oracle(problem)


def test_the_oracle_comparison_can_fail():
    graph, costs = samples.training_chain(4)
    problem = Problem(graph, costs, 10**6)
    slower = BruteForce().propose(Problem(graph, costs, 400)).schedule
    assert problem.price(slower).seconds > problem.price(BruteForce().propose(problem).schedule).seconds


def test_oracle_on_a_chain_by_hand():
    graph, costs = samples.training_chain(4)
    assert Problem(graph, costs, 1).baseline.peak_bytes == 500
    for budget, extra in ((500, 0), (400, 1), (300, 3)):
        plan = solve(Problem(graph, costs, budget), "brute_force")
        assert plan.trace.seconds - plan.problem.baseline.seconds == extra
        assert plan.gap == 0
    with pytest.raises(InfeasibleBudgetError) as caught:
        solve(Problem(graph, costs, 299), "brute_force")
    assert caught.value.least_bytes == 300


@pytest.mark.parametrize("case", ["training_chain", "skip_chain", "unet"])
def test_greedy_is_no_slower_than_the_rules_of_chen_at_their_peaks(case):
    graph, costs = CASES[case]
    for rule in (ChenSqrt(), DropCheap()):
        problem = Problem(graph, costs, 10**9)
        trace = problem.price(rule.propose(problem).schedule)
        plan = solve(Problem(graph, costs, trace.peak_bytes), QUICK)
        assert plan.trace.seconds <= trace.seconds + 1e-9


def test_greedy_goes_below_one_copy_per_op():
    graph, costs = samples.training_chain(60)
    peak = Problem(graph, costs, 1).baseline.peak_bytes
    plan = solve(Problem(graph, costs, peak // 8), QUICK)
    runs = [plan.schedule.steps.count(op) for op in graph.forward]
    assert max(runs) > 2
    assert plan.peak_bytes <= peak // 8


def test_more_effort_is_never_slower():
    graph, costs = samples.unet(4)
    problem = Problem(graph, costs, Problem(graph, costs, 1).baseline.peak_bytes * 6 // 10)
    seconds = [solve(problem, Greedy(effort=effort)).trace.seconds for effort in (0, 0.05, 0.3)]
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize("effort", [-1, float("nan"), float("inf")])
def test_greedy_refuses_nonsense(effort):
    with pytest.raises(InvalidOptionError):
        Greedy(effort=effort)


def test_chen_keeps_borders_only():
    graph, costs = samples.training_chain(16)
    plan = solve(Problem(graph, costs, 10**9), "chen_sqrt")
    assert plan.outcome is Outcome.FITS
    # Three borders, and the four values of the last segment, which backward needs at once.
    assert plan.saved_bytes == 700
    assert plan.num_recomputed == 9


@pytest.mark.parametrize(
    ("target", "cheap"),
    [
        ("aten.relu.default", True),
        ("aten._native_batch_norm_legit_functional.default", True),
        ("aten.native_layer_norm.default", True),
        ("aten.gelu.default", True),
        ("aten.silu.default", True),
        ("aten.max_pool2d_with_indices.default", True),
        ("aten.mul.Tensor", True),
        ("aten.add.Tensor", True),
        ("aten.native_dropout.default", True),
        ("aten._softmax.default", True),
        ("aten.convolution.default", False),
        ("aten.mm.default", False),
        ("aten.addmm.default", False),
        ("aten.bmm.default", False),
        ("aten._scaled_dot_product_flash_attention.default", False),
        ("mylib.relu.default", False),
        ("something", False),
    ],
)
def test_what_is_cheap(target, cheap):
    assert is_cheap(target) is cheap
