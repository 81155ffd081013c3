"""`auto` against brute force on tiny graphs, and what it promises about its options."""

from dataclasses import replace
from itertools import pairwise

import pytest

from helpers.tiny_problems import cases, optimum_of
from lowtide.analysis.planner_comparison import compare_planners
from lowtide.errors import InvalidOptionError
from lowtide.graph import samples
from lowtide.plan import registry
from lowtide.plan.auto.planner import Auto
from lowtide.plan.core.problem import Problem
from lowtide.plan.core.result import Outcome
from lowtide.plan.planners.brute_force import BruteForce
from lowtide.plan.planners.greedy import Greedy
from lowtide.plan.planners.keep_all import KeepAll
from lowtide.plan.solve import solve
from lowtide.schedule.steps import Schedule

AUTO = registry.get("auto")
SMALL = Auto(planners={"keep_all": KeepAll(), "greedy": Greedy(effort=0)}, gap=0.0)
# What overheads of different schedules of these tiny graphs differ by at least is far more.
EQUAL = 1e-4


def wrong_claims(plan, optimum):
    """Return what `plan` claims that the least overhead there is, None if nothing fits, disproves."""
    keeps_order = (first := list(dict.fromkeys(plan.schedule.steps))) == sorted(first)
    if optimum is None:
        return ["it fits"] if plan.fits and keeps_order else []
    found = []
    if plan.outcome is Outcome.IMPOSSIBLE:
        found.append("it says that nothing fits")
    for bound in (plan.bound, plan.given_bound):
        if bound is not None and bound > optimum + 1e-9:
            found.append(f"the bound {bound} exceeds the optimum {optimum}")
    least = optimum if keeps_order else 0.0
    if plan.outcome is Outcome.OPTIMAL and abs(plan.overhead - least) > EQUAL:
        found.append(f"{plan.overhead} is not optimal: {optimum} is")
    return found


@pytest.mark.parametrize("last", [5200, pytest.param(6900, marks=pytest.mark.slow)])
def test_claims_hold_against_brute_force(last):
    optimal = impossible = 0
    for seed, _, problem in cases(range(5000, last)):
        plan = solve(problem, SMALL, throw=False)
        assert not wrong_claims(plan, optimum_of(problem)), seed
        optimal += plan.outcome is Outcome.OPTIMAL
        impossible += plan.outcome is Outcome.IMPOSSIBLE
    assert optimal >= (last - 5000) // 4
    assert impossible >= (last - 5000) // 200


def test_a_wrong_claim_is_caught():
    caught = 0
    for _, _, problem in cases(range(60)):
        optimum = optimum_of(problem)
        plan = solve(problem, "keep_all", throw=False)
        lies = (replace(plan, outcome=Outcome.IMPOSSIBLE), replace(plan, bound=1e3), replace(plan, given_bound=1e3))
        caught += all(wrong_claims(lie, optimum) for lie in lies)
    assert caught > 10


def test_a_plan_tells_what_is_proved_about_the_given_order():
    graph, costs = samples.training_chain(3)
    problem = Problem(graph, costs, Problem(graph, costs, 1).baseline.peak_bytes * 3 // 4)
    plan = solve(problem, replace(AUTO, gap=0.0))
    assert plan.given_bound == pytest.approx(plan.overhead, abs=1e-5)
    assert "recorded" not in str(plan)
    faster = replace(plan, given_bound=plan.overhead + 0.01)
    assert f"in the recorded one, at least {100 * plan.overhead + 1:.2f} % is needed" in str(faster)


def test_a_tight_gap_finds_the_optimum_of_small_training_graphs():
    graph, costs = samples.training_chain(3)
    peak = Problem(graph, costs, 1).baseline.peak_bytes
    for share in (90, 75, 60):
        problem = Problem(graph, costs, peak * share // 100)
        best = problem.price(BruteForce().propose(problem).schedule)
        plan = solve(problem, replace(AUTO, gap=0.0), throw=False)
        if problem.fits(best):
            assert plan.overhead == pytest.approx(problem.overhead(best))


@pytest.fixture(scope="module")
def plans_of_auto():
    graphs = samples.unet(4), samples.training_chain(8), samples.skip_chain(14)
    peaks = [Problem(*graph, 1).baseline.peak_bytes for graph in graphs]
    problems = [
        Problem(*graph, peak * share // 100) for graph, peak in zip(graphs, peaks, strict=True) for share in (80, 55)
    ]
    return [solve(problem, AUTO, throw=False) for problem in problems]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "auto_thorough" else ())
        for name in registry.names()
        if name not in ("brute_force", "auto")
    ],
)
def test_never_worse_than_another_planner(name, plans_of_auto):
    for ours in plans_of_auto:
        if registry.get(name).supports(ours.problem) is None:
            other = solve(ours.problem, name, throw=False)
            assert ours.fits or not other.fits
            if other.fits:
                assert ours.overhead <= other.overhead + 1e-9


def test_the_same_answer_every_time():
    graph, costs = samples.random_dag(3, n=24)
    problem = Problem(graph, costs, int(0.6 * Problem(graph, costs, 1).baseline.peak_bytes))
    first, second = (solve(problem, AUTO, throw=False) for _ in range(2))
    assert first.schedule == second.schedule
    assert first.bound == second.bound


def test_known_schedules_are_never_lost():
    graph, costs = samples.unet(4)
    peak = Problem(graph, costs, 1).baseline.peak_bytes
    tight = solve(Problem(graph, costs, int(0.55 * peak)), AUTO, throw=False)
    without_search = replace(AUTO, planners={"keep_all": KeepAll()}, effort=0.0, starts=(tight.schedule,))
    roomy = solve(Problem(graph, costs, int(0.6 * peak)), without_search)
    assert roomy.overhead <= tight.overhead


def test_an_illegal_start_is_refused():
    graph, costs = samples.unet(3)
    peak = Problem(graph, costs, 1).baseline.peak_bytes
    with pytest.raises(Exception, match="before"):
        solve(Problem(graph, costs, peak // 2), replace(AUTO, starts=(Schedule((1,), ()),)))


def test_more_memory_is_never_slower_in_a_comparison():
    graph, costs = samples.random_dag(11, n=30)
    budgets = ["55%", "90%", "60%", "75%"]
    rows = [row for row in compare_planners(graph, costs, budgets=budgets, planners=["auto"]).rows if row.fits]
    assert [row.budget for row in rows] == [budget for budget in budgets if budget in {row.budget for row in rows}]
    rows.sort(key=lambda row: row.budget_bytes)
    assert all(more.overhead <= less.overhead + 1e-12 for less, more in pairwise(rows))


@pytest.mark.parametrize(
    "option", [{"effort": -1}, {"gap": -0.1}, {"gap": float("nan")}, {"time_limit": 0}, {"effort": float("inf")}]
)
def test_bad_options_are_refused(option):
    with pytest.raises(InvalidOptionError, match="must be"):
        replace(AUTO, **option)


def test_a_time_limit_ends_the_search():
    graph, costs = samples.random_dag(3, n=80)
    problem = Problem(graph, costs, int(0.5 * Problem(graph, costs, 1).baseline.peak_bytes))
    # Without the limit this would go on for longer than a test may take.
    quick = solve(problem, replace(AUTO, effort=1000.0, gap=0.0, time_limit=0.2), throw=False)
    assert quick.outcome is not Outcome.OPTIMAL


def test_progress_says_how_it_stands():
    graph, costs = samples.unet(4)
    problem = Problem(graph, costs, int(0.6 * Problem(graph, costs, 1).baseline.peak_bytes))
    lines = []
    solve(problem, replace(AUTO, gap=0.0), lines.append, throw=False)
    assert any("best overhead" in line and "gap" in line for line in lines)


def test_a_little_effort_proves_something():
    graph, costs = samples.transformer(8)
    problem = Problem(graph, costs, Problem(graph, costs, 1).baseline.peak_bytes // 2)
    proposal = replace(AUTO, effort=0.3, gap=0.0).propose(problem)
    assert proposal.bound > 0


def small_overhead():
    """Return a problem whose least overhead is a fraction of the usual gap."""
    graph, costs = samples.transformer(8)
    return Problem(graph, costs, Problem(graph, costs, 1).baseline.peak_bytes * 97 // 100)


def test_a_small_overhead_is_not_accepted_without_a_proof():
    plan = solve(small_overhead(), AUTO)
    assert 0 < plan.overhead < AUTO.gap
    assert plan.bound >= 0.85 * plan.overhead


def test_the_choice_is_what_is_done():
    graph, costs = samples.transformer(10)
    problem = Problem(graph, costs, Problem(graph, costs, 1).baseline.peak_bytes // 2)
    lines = []
    auto = replace(AUTO, effort=0.1)
    auto.propose(problem, lines.append)
    choice = auto.choose(problem)
    asked = [line.removeprefix("auto: asking ") for line in lines if line.startswith("auto: asking ")]
    assert tuple(asked) == choice.asked
    assert dict(choice.left_out)["greedy"] == "its descents are tried in all orders instead"
    assert choice.asked_if_nothing_fits == ("dtr",)
    assert set(choice.asked) | set(choice.asked_if_nothing_fits) | set(dict(choice.left_out)) == set(AUTO.planners)


def sized(num_ops, **options):
    """Return the choice for a graph of about so many ops."""
    graph, costs = samples.training_chain(num_ops // 2)
    return replace(AUTO, **options).choose(Problem(graph, costs, Problem(graph, costs, 1).baseline.peak_bytes - 1))


def test_the_choice_depends_on_size_effort_and_time():
    small, medium, large, huge, beyond = (sized(n) for n in (100, 400, 1_500, 5_000, 7_000))
    assert (small.own_process, medium.own_process, beyond.own_process) == (False, True, False)
    assert (huge.proves, beyond.proves) == (True, False)
    assert (large.other_orders, huge.other_orders) == (True, False)
    assert small.num_rounds(1.0) > small.num_rounds(0.0) == 3 > huge.num_rounds(0.0) == 1
    assert small.gap == medium.gap == AUTO.gap < large.gap
    assert medium.stop_gap(1.0) == AUTO.gap > medium.stop_gap(0.001) > 0
    assert "chen_greedy" in large.asked
    assert "chen_greedy" in dict(huge.left_out)
    assert not sized(400, time_limit=1.0).own_process
    assert not sized(400, effort=0).proves
    assert sized(1_500, effort=10).num_polishes > large.num_polishes


def test_a_choice_can_be_printed():
    assert "process of its own" in str(sized(400))
    assert "not chen_greedy: too slow above 4,000 ops" in str(sized(5_000))
    assert "none: the effort is 0" in str(sized(100, effort=0))
    graph, costs = samples.chain(10)
    assert "nothing to do" in str(AUTO.choose(Problem(graph, costs, 10**9)))
    assert "only another order may fit" in str(AUTO.choose(Problem(graph, costs, 1)))


def test_effort_and_starts_are_for_planners_that_know_them():
    schedule = Schedule.keep_all(samples.chain(3)[0])
    assert AUTO.with_effort(2.0) == replace(AUTO, effort=2.0)
    assert AUTO.with_starts([schedule]) == replace(AUTO, starts=(schedule,))
    other = KeepAll()
    assert other.with_effort(2.0) is other.with_starts([schedule]) is other.choose(small_overhead()) is other
