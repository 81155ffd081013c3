"""Bounds against the true optimum, which brute force finds on tiny graphs."""

import random
from dataclasses import replace
from itertools import islice, pairwise

import numpy as np
import pytest

from helpers.tiny_problems import cases, least_peak, optimum_of, random_graph
from lowtide.graph import samples
from lowtide.graph.build import GraphBuilder
from lowtide.plan.bounds import moment_selection, row_generation
from lowtide.plan.bounds.integer_program import IntegerProgram, Limits, Relaxation, Row
from lowtide.plan.bounds.least_peak import least_peak_bytes
from lowtide.plan.bounds.lifetimes import Lifetimes
from lowtide.plan.bounds.moment_program import MomentProgram, RepeatedRunRows
from lowtide.plan.bounds.overhead_bound import overhead_bound
from lowtide.plan.bounds.policy import CANDIDATES, GROWTH, INTEGERS, ROWS
from lowtide.plan.bounds.relaxed_solution import schedule_of
from lowtide.plan.bounds.row_generation import RowGenerator
from lowtide.plan.core.problem import Problem
from lowtide.plan.planners.greedy import Greedy
from lowtide.schedule.steps import Schedule
from lowtide.schedule.verify import verify

# What a bound may exceed the optimum by: the sum of seconds is rounded.
ROUNDING = 1e-9
SLOW = pytest.mark.slow


def breaches(problem, bound, optimum):
    """Return what `bound` claims wrongly, given the least overhead there is, or None if nothing fits."""
    if optimum is None:
        return []
    wrong = []
    if bound.infeasible:
        wrong.append("it says that nothing fits")
    if bound.overhead > optimum + ROUNDING:
        wrong.append(f"it says {bound.overhead}, and {optimum} is reached")
    return wrong


@pytest.mark.parametrize(
    "start", [0, *(pytest.param(start, marks=pytest.mark.slow) for start in range(250, 2000, 250))]
)
def test_no_bound_exceeds_the_optimum(start):
    tried = close = 0
    for seed, least, problem in cases(range(start, start + 250)):
        assert least_peak_bytes(problem) <= least, seed
        bound = overhead_bound(problem)
        optimum = optimum_of(problem)
        assert not breaches(problem, bound, optimum), seed
        tried += 1
        close += bound.infeasible if optimum is None else bound.overhead > optimum - 1e-3
        for solution in bound.solutions:
            verify(problem.graph, schedule_of(problem.graph, solution))
    assert tried >= 80
    assert close >= 0.8 * tried


def test_a_wrong_bound_is_caught():
    """A bound that forgets that inputs can be made again as well, and one that rounds up, exceed the optimum."""
    caught = 0
    for _, _, problem in cases(range(40)):
        optimum = optimum_of(problem)
        bound = overhead_bound(problem)
        wrong = type(bound)(1.01 * bound.overhead + 0.01, False, bound.moments, bound.certificate)
        caught += bool(breaches(problem, wrong, optimum))
    assert caught > 5


def lift_limits(monkeypatch):
    """On tiny graphs all first runs are neighbours, and few are needy."""
    near = replace(CANDIDATES, min_distance=1, new_distance_share=0.0, needy_share=0.1, needy_distance=1)
    monkeypatch.setattr(moment_selection, "CANDIDATES", near)


def refined(problem, optimum, rounds=3):
    """Return the selector after some rounds, none of which may prove more than there is."""
    selector = moment_selection.MomentSelector(problem)
    assert selector.quick_bound(seconds=60.0).bound <= optimum + 1e-5
    known = Greedy().propose(problem).schedule
    for _ in range(rounds):
        selector.advance(Limits(work=1.0, enough=optimum + 1.0), known)
        assert selector.proof.bound <= optimum + ROUNDING
        if selector.done:
            break
    return selector


def feasible_cases(number):
    for seed, _, problem in cases(range(number)):
        optimum = optimum_of(problem)
        if optimum is not None and least_peak_bytes(problem) <= problem.budget_bytes:
            yield seed, problem, optimum


@pytest.mark.parametrize("number", [250, pytest.param(500, marks=SLOW)])
def test_refined_bounds_never_exceed_the_optimum(monkeypatch, number):
    lift_limits(monkeypatch)
    several = sum(len(refined(problem, optimum).proof.moments) > 1 for _, problem, optimum in feasible_cases(number))
    assert several >= 1


def test_moments_with_which_fractions_say_no_more_help_whole_numbers(monkeypatch):
    lift_limits(monkeypatch)
    monkeypatch.setattr(moment_selection, "INTEGERS", replace(INTEGERS, much_gain=-1.0, repeat_min_gap=0.0))
    better = worse = 0
    for _, problem, optimum in feasible_cases(200):
        found = []
        for unseen in (0, 2):
            monkeypatch.setattr(moment_selection, "GROWTH", replace(GROWTH, unseen_moments=unseen))
            found.append(refined(problem, optimum, rounds=5).proof.bound)
        better += found[1] > found[0] + ROUNDING
        worse += found[1] < found[0] - ROUNDING
    assert worse == 0
    assert better >= 1


def test_moments_are_looked_for_where_a_schedule_has_nothing_to_spare():
    builder = GraphBuilder()
    (x,) = builder.add_op("x", [], [("x", 10)])
    (wide,) = builder.add_op("wide", [x], [("wide", 80)])
    (small,) = builder.add_op("small", [wide], [("small", 5)])
    rest = [small]
    for k in range(8):
        rest += builder.add_op(f"rest{k}", [rest[-1]], [(f"rest{k}", 1)])
    (end,) = builder.add_op("end", [wide, rest[-1]], [("end", 10)])
    graph, costs = builder.build(outputs=[end]), builder.costs()
    schedule = Schedule((*range(11), 0, 1, 11))
    verify(graph, schedule)
    tight = Problem(graph, costs, Problem(graph, costs, 1).price(schedule).peak_bytes)
    assert tight.budget_bytes == 91
    # The repeated run of `wide`, which needs as much as `end` itself, counts for `end`; the first is for itself.
    assert moment_selection._highest(tight, schedule).tolist()[:3] == [10, 90, 85]
    assert moment_selection._highest(tight, schedule)[11] == 91
    assert moment_selection._scarce(tight, schedule) == [11, 1]
    assert moment_selection._scarce(Problem(graph, costs, 93), schedule) == [11]
    assert moment_selection._scarce(Problem(graph, costs, 96), schedule) == []


def scarce_graph(seed):
    """Return a tiny graph whose second phase reads what the first made in any order; some ops need much themselves."""
    rng = random.Random(seed)
    depth = rng.randint(4, 5)
    builder = GraphBuilder()
    values = [builder.add_input("x", 10)]
    for k in range(depth):
        values += builder.add_op(f"f{k}", rng.sample(values[-2:], 1), [(f"y{k}", rng.randint(10, 30))], **scarce(rng))
    builder.begin_backward()
    reads = rng.sample(values[1:], depth)
    last = values[-1]
    for k, value in enumerate(reads):
        (last,) = builder.add_op(f"b{k}", list(dict.fromkeys((last, value))), [(f"d{k}", 4)], seconds=1.0)
    return builder.build(outputs=[last]), builder.costs()


def scarce(rng):
    return {"seconds": float(rng.randint(1, 9)), "workspace_bytes": rng.choice((0, 0, 20, 40))}


def moment_programs(seeds):
    """Yield moment programs of tiny problems, with moments chosen at random in any order, and the optimum."""
    for seed in seeds:
        graph, costs = (random_graph if seed % 4 == 0 else scarce_graph)(seed)
        peak = Problem(graph, costs, 1).baseline.peak_bytes
        least = least_peak(graph, costs) if peak > 1 else peak
        if least == peak:
            continue
        rng = random.Random(seed)
        problem = Problem(graph, costs, rng.randint(least, least + (peak - least) // 2))
        optimum = optimum_of(problem)
        moments = rng.sample(range(len(graph.ops)), rng.randint(1, len(graph.ops)))
        yield seed, Lifetimes.of(problem), moments, optimum


@pytest.mark.parametrize("number", [120, pytest.param(400, marks=SLOW)])
@pytest.mark.parametrize("again", [0, 12])
def test_programs_of_many_moments_prove_no_more_than_is_true(monkeypatch, again, number):
    monkeypatch.setattr(row_generation, "ROWS", replace(ROWS, repeated_runs_per_round=again))
    ranged = runs = 0
    for seed, lifetimes, moments, optimum in moment_programs(range(number)):
        generator = RowGenerator(MomentProgram(lifetimes, moments))
        assert generator.relax().bound <= optimum + 1e-5, seed
        assert generator.solve(Limits(work=1.0)).bound <= optimum + ROUNDING, seed
        ranged += len(generator.moment_program._ranges()) > 1
        runs += bool(generator.again)
    assert ranged > number // 8
    assert (runs > number // 80) == bool(again)


def relaxed_bounds(lifetimes, moments):
    """Return the bounds of relaxations with ever more of the moments."""
    return [
        RowGenerator(MomentProgram(lifetimes, moments[:count])).relax().bound for count in range(1, len(moments) + 1)
    ]


def test_a_further_moment_never_weakens_a_relaxation(monkeypatch):
    """Of the rows of repeated runs this is not true: the time in which one happens is divided, too."""
    monkeypatch.setattr(row_generation, "ROWS", replace(ROWS, repeated_runs_per_round=0))
    for seed, lifetimes, moments, _ in moment_programs(range(60)):
        bounds = relaxed_bounds(lifetimes, moments)
        assert all(after >= before - 1e-5 for before, after in pairwise(bounds)), seed


def test_ranges_of_intervals_make_relaxations_stronger(monkeypatch):
    monkeypatch.setattr(row_generation, "ROWS", replace(ROWS, repeated_runs_per_round=0))
    graph, costs = samples.transformer(4)
    problem = Problem(graph, costs, Problem(graph, costs, 1).baseline.peak_bytes // 4)
    moments = random.Random(0).sample(range(graph.num_forward, len(graph.ops)), 6)
    strong = relaxed_bounds(Lifetimes.of(problem), moments)[-1]
    monkeypatch.setattr(MomentProgram, "_ranges", lambda moment_program: [])
    assert strong > relaxed_bounds(Lifetimes.of(problem), moments)[-1] + 0.02


def needy_run():
    """Return a problem in which running the quick op again needs more than there is, and the moment that decides."""
    builder = GraphBuilder()
    x = builder.add_input("x", 1)
    (quick,) = builder.add_op("quick", [x], [("a", 30)], seconds=1.0, workspace_bytes=45)
    (slow,) = builder.add_op("slow", [x], [("b", 30)], seconds=9.0)
    (small,) = builder.add_op("use", [quick], [("c", 4)])
    (tight,) = builder.add_op("tight", [small], [("d", 4)], workspace_bytes=50)
    (end,) = builder.add_op("first", [tight, quick], [("e", 4)])
    (end,) = builder.add_op("second", [end, slow], [("f", 4)])
    return Problem(builder.build(outputs=[end]), builder.costs(), 100), 3


def test_rows_of_repeated_runs_prove_more_where_an_op_needs_much(monkeypatch):
    problem, moment = needy_run()
    bounds = []
    for again in (0, 12):
        monkeypatch.setattr(row_generation, "ROWS", replace(ROWS, repeated_runs_per_round=again))
        bounds.append(RowGenerator(MomentProgram(Lifetimes.of(problem), [moment])).solve(Limits()).bound)
    assert bounds == pytest.approx([1 / 14, 9 / 14], abs=1e-5)
    assert optimum_of(problem) == pytest.approx(9 / 14)


def test_a_wrong_row_of_repeated_runs_is_caught(monkeypatch):
    """Rows that also count what is alive at some time only exceed the optimum."""
    monkeypatch.setattr(RepeatedRunRows, "_through", lambda rows, run: np.ones(len(rows._value), dtype=bool))
    wrong = (
        seed
        for seed, lifetimes, moments, optimum in moment_programs(range(300))
        if RowGenerator(MomentProgram(lifetimes, moments)).solve(Limits(work=1.0)).bound > optimum + 1e-3
    )
    assert len(list(islice(wrong, 4))) == 4


def random_program(rng):
    """Return a program whose rows hold where all variables are 1."""
    program = IntegerProgram()
    for _ in range(8):
        program.variable(rng.random())
    for _ in range(5):
        chosen = rng.sample(range(8), 3)
        program.at_least(rng.uniform(0.0, 3.0), *((variable, 1.0) for variable in chosen))
    return program


def test_a_relaxation_with_rows_added_is_that_of_all_rows():
    rng = random.Random(5)
    for _ in range(50):
        program = random_program(rng)
        *first, last = program.rows
        whole = Relaxation(program).solve()
        program.rows = first
        relaxation = Relaxation(program)
        before = relaxation.solve()
        relaxation.add([last])
        after = relaxation.solve()
        assert after.bound == pytest.approx(whole.bound, abs=1e-6)
        assert before.bound <= after.bound + 1e-9
        assert after.bound <= sum(program.cost)
        assert after.value == pytest.approx(float(np.dot(after.point, program.cost)))


def test_any_multipliers_prove_a_bound_of_a_relaxation():
    rng = random.Random(6)
    for _ in range(50):
        program = random_program(rng)
        relaxation = Relaxation(program)
        answer = relaxation.solve()
        for _ in range(5):
            duals = np.array([rng.uniform(-0.5, 1.0) for _ in program.rows])
            assert relaxation._certify(duals) <= answer.value + 1e-9


def test_a_relaxation_without_a_solution_says_so():
    program = IntegerProgram()
    program.variable(1.0)
    relaxation = Relaxation(program)
    relaxation.add([Row([0], [1.0], 2.0, float("inf"))])
    assert relaxation.solve().infeasible
