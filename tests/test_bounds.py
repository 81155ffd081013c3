"""Bounds against the true optimum, which brute force finds on tiny graphs."""

import random
from pathlib import Path

import numpy as np
import pytest

from lowtide.graph import samples
from lowtide.graph.build import GraphBuilder
from lowtide.plan.bounds import refine
from lowtide.plan.bounds.hints import schedule_of
from lowtide.plan.bounds.least_peak import least_peak_bytes
from lowtide.plan.bounds.overhead import overhead_bound
from lowtide.plan.bounds.program import Limits, Program, Row
from lowtide.plan.bounds.relaxation import Relaxation
from lowtide.plan.planners.brute_force import BruteForce
from lowtide.plan.problem import Problem
from lowtide.schedule.verify import verify

SHARED = Path(__file__).parents[2] / "shared" / "graphs"
# What a bound may exceed the optimum by: the sum of seconds is rounded.
ROUNDING = 1e-9


def random_graph(seed):
    """Return a tiny graph with costs; a third of them have phases, two thirds pinned, random and other marked ops."""
    rng = random.Random(seed)
    n = rng.randint(4, 9)
    boundary = rng.choice([None, None, n // 2, n // 2, rng.randint(0, n)])
    builder = GraphBuilder()
    values = [builder.add_input("x", rng.randint(0, 40))]
    for k in range(n):
        if k == boundary:
            builder.begin_backward()
        near = values[-rng.choice([3, 5, 8]) :]
        if boundary and k >= boundary and rng.random() < 0.7:
            near = values
        inputs = rng.sample(near, min(len(near), rng.choice([1, 1, 2, 2, 3])))
        outputs = [(f"v{k}_{j}", rng.randint(0, 40)) for j in range(rng.choice((1, 1, 1, 2)))]
        values += builder.add_op(
            f"op{k}",
            inputs,
            outputs,
            seconds=float(rng.randint(0, 9)),
            workspace_bytes=rng.choice((0, 0, 0, 7, 30)),
            **(marks(rng, outputs) if seed % 3 else {}),
        )
    if boundary == n:
        builder.begin_backward()
    graph = builder.build()
    outputs = rng.sample(values, min(len(values), rng.choice([0, 1, 1, 2, 3])))
    forward = [value for op in graph.forward for value in graph.ops[op].outputs]
    handovers = rng.sample(forward, 1) if forward and rng.random() < 0.2 else []
    return builder.build(outputs=outputs, handovers=handovers), builder.costs()


def marks(rng, outputs):
    kind = rng.choice(["plain"] * 8 + ["pinned", "random", "once"])
    if kind == "pinned":
        return {"pinned": "it has an effect"}
    if kind == "random":
        return {"random": True, "replay_bytes": rng.choice((0, 3, 16))}
    if kind == "once":
        return {"once": [outputs[-1][0]]}
    return {}


def least_peak(graph, costs):
    problem = Problem(graph, costs, 1)
    return problem.price(BruteForce().propose(problem).schedule).peak_bytes


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


def optimum_of(problem):
    proposal = BruteForce().propose(problem)
    trace = problem.price(proposal.schedule)
    return problem.overhead(trace) if problem.fits(trace) else None


def cases(seeds):
    """Yield problems whose budgets lie between the least peak, less a little, and the peak of plain training."""
    for seed in seeds:
        graph, costs = random_graph(seed)
        peak = Problem(graph, costs, 1).baseline.peak_bytes
        if peak <= 1:
            continue
        least = least_peak(graph, costs)
        if least < peak:
            yield seed, least, Problem(graph, costs, random.Random(seed).randint(max(1, least - 2), peak - 1))


@pytest.mark.parametrize("start", range(0, 2000, 250))
def test_no_bound_exceeds_the_optimum(start):
    tried = close = 0
    for seed, least, problem in cases(range(start, start + 250)):
        assert least_peak_bytes(problem) <= least, seed
        bound = overhead_bound(problem)
        optimum = optimum_of(problem)
        assert not breaches(problem, bound, optimum), seed
        tried += 1
        close += bound.infeasible if optimum is None else bound.overhead > optimum - 1e-3
        for hint in bound.hints:
            verify(problem.graph, schedule_of(problem.graph, hint))
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


def test_moments_together_prove_no_more_than_is_true(monkeypatch):
    """On tiny graphs all first runs are neighbours, and few are needy: both limits are lifted."""
    monkeypatch.setattr(refine, "_DISTANCE", 1)
    monkeypatch.setattr(refine, "_APART", 0.0)
    monkeypatch.setattr(refine, "_NEEDY", 0.1)
    used = 0
    for seed, _, problem in cases(range(500)):
        optimum = optimum_of(problem)
        if optimum is None or least_peak_bytes(problem) > problem.budget_bytes:
            continue
        refiner = refine.Refiner(problem)
        for _ in range(3):
            untried = bool(refiner._needy)
            refiner.advance(Limits(work=1.0, enough=optimum + 1.0))
            assert refiner.proof.bound <= optimum + ROUNDING, seed
            used += untried and not refiner._needy
            if refiner.done:
                break
    assert used >= 20


def test_moments_together_prove_more_where_memory_is_scarce():
    graph, costs = samples.transformer(4)
    problem = Problem(graph, costs, Problem(graph, costs, 1).baseline.peak_bytes // 4)
    bounds = []
    for needy in (True, False):
        refiner = refine.Refiner(problem)
        refiner._needy = refiner._needy if needy else []
        for _ in range(3):
            refiner.advance(Limits(work=0.5, enough=3.0))
        bounds.append(refiner.proof.bound)
    assert bounds[0] > bounds[1] + 0.05


def random_program(rng):
    """Return a program whose rows hold where all variables are 1."""
    program = Program()
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
    program = Program()
    program.variable(1.0)
    relaxation = Relaxation(program)
    relaxation.add([Row([0], [1.0], 2.0, float("inf"))])
    assert relaxation.solve().infeasible
