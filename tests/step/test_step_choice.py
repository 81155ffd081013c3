"""Choosing variants: against brute force on tiny steps, and on steps of the size of real ones."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.errors import InvalidInputError, InvalidScheduleError
from lowtide.step import choose
from lowtide.step.choose import NothingFits, choose_variants, least_peak, relax
from lowtide.step.integer_program import least_cost
from lowtide.step.problem import Block, Gap, StepProblem, Variant
from lowtide.step.rows import rows_of
from lowtide.step.simulate import Moment, simulate_step
from lowtide.step.verify import verify_step


@st.composite
def variants(draw, net=None):
    floor, after, peak, back = (draw(st.integers(0, 20)) for _ in range(4))
    after += floor
    left = -after + (draw(st.integers(-3, 40)) if net is None else net)
    bound = draw(st.integers(0, 9)) / 7
    return Variant(after + peak, after, max(0, left) + back, left, bound + draw(st.integers(0, 9)) / 7, bound, floor)


@st.composite
def blocks(draw):
    net = draw(st.none() | st.integers(0, 4))
    return Block("b", tuple(draw(st.lists(variants(net), min_size=1, max_size=3))))


@st.composite
def gaps(draw):
    after = draw(st.integers(-4, 5))
    return Gap(max(0, after) + draw(st.integers(0, 6)), after)


@st.composite
def problems(draw):
    menu = draw(st.lists(blocks(), min_size=1, max_size=2))
    instances = tuple(draw(st.lists(st.integers(0, len(menu) - 1), min_size=1, max_size=4)))
    around = [tuple(draw(gaps()) for _ in range(len(instances) + 1)) for _ in range(2)]
    fixed = [draw(st.none() | st.integers(0, len(menu[b].variants) - 1)) for b in instances]
    some = draw(st.sampled_from([(), tuple(fixed)]))
    return StepProblem(tuple(menu), instances, around[0], around[1], draw(st.integers(0, 150)), some)


def brute_force(problem):
    """Return the traces of all choices."""
    return [simulate_step(problem, c) for c in product(*(problem.allowed(k) for k in range(len(problem.instances))))]


def check(problem):
    traces = brute_force(problem)
    fitting = [trace.seconds for trace in traces if trace.peak_bytes <= problem.budget_bytes]
    if not fitting:
        with pytest.raises(NothingFits) as failed:
            choose_variants(problem)
        assert failed.value.least_peak_bytes == min(trace.peak_bytes for trace in traces)
        assert simulate_step(problem, failed.value.choice).peak_moment == failed.value.moment
        return
    found = choose_variants(problem)
    verify_step(problem, found.choice, found.peak_bytes)
    assert found.proved
    assert found.seconds == pytest.approx(min(fitting), abs=1e-9)
    assert found.bound_seconds <= min(fitting) + 1e-12
    relaxed = [trace.seconds for trace in brute_force(relax(problem)) if trace.peak_bytes <= problem.budget_bytes]
    assert found.bound_seconds == pytest.approx(min(relaxed), abs=1e-9)


@settings(max_examples=150, deadline=None)
@given(problems())
def test_the_choice_is_that_of_brute_force(problem):
    check(problem)


@settings(max_examples=30, deadline=None)
@given(problems())
def test_the_integer_program_is_that_of_brute_force(problem):
    fitting = [trace.seconds for trace in brute_force(problem) if trace.peak_bytes <= problem.budget_bytes]
    rows = rows_of(problem)
    solved = least_cost(rows, None, 2.0)
    assert solved.optimal
    assert (solved.choice is None) == (not fitting)
    if solved.choice:
        assert simulate_step(problem, solved.choice).peak_bytes <= problem.budget_bytes
        assert solved.bound * rows.unit_seconds == pytest.approx(min(fitting), abs=1e-9)


@settings(max_examples=100, deadline=None)
@given(problems())
def test_the_least_peak_is_that_of_brute_force(problem):
    found = least_peak(problem)
    assert found.proved
    assert found.peak_bytes == min(trace.peak_bytes for trace in brute_force(problem))
    verify_step(replace(problem, budget_bytes=found.peak_bytes), found.choice, found.peak_bytes)


@settings(max_examples=100, deadline=None)
@given(problems())
def test_the_verifier_agrees_with_the_simulator(problem):
    roomy = replace(problem, budget_bytes=10**6)
    for choice in product(*map(problem.allowed, range(len(problem.instances)))):
        trace = simulate_step(problem, choice)
        verify_step(roomy, choice, trace.peak_bytes)
        with pytest.raises(InvalidScheduleError, match="not at"):
            verify_step(roomy, choice, trace.peak_bytes + 1)


def test_what_is_left_behind_counts_in_later_backwards(monkeypatch):
    light, heavy = Variant(10, 10, 0, -10, 1.0, 0.5, 10), Variant(10, 10, 20, 20, 0.0, 0.0, 10)
    asked = []
    program = choose._by_program
    monkeypatch.setattr(choose, "_by_program", lambda *given: asked.append(given) or program(*given))
    none = (Gap(0, 0),) * 3
    first = Block("first", (Variant(5, 5, 30, -5, 0.0, 0.0, 5),))
    problem = StepProblem((first, Block("second", (heavy, light))), (0, 1), none, none, 40)
    check(problem)
    assert asked
    assert choose_variants(problem).choice == (0, 1)


def chain(count, budget, *, scale=1, fixed=(), odd=0):
    """Return a step of equal blocks whose variants keep less and less."""
    kept = [1000, 871, 743, 622, 487, 351, 228, 101]
    slow = [0.0, 0.011, 0.025, 0.042, 0.064, 0.093, 0.131, 0.19]
    menu = [
        Variant(
            (k + 90) * scale, k * scale, (1100 - k) * scale, (10 + odd * (k % 3) - k) * scale, s, 0.9 * s, f * scale
        )
        for k, s, f in zip(kept, slow, [*(k + 1 for k in kept[1:]), 50], strict=True)
    ]
    gap = (Gap(0, 0),) * (count + 1)
    return StepProblem((Block("layer", tuple(menu)),), (0,) * count, gap, gap, budget * scale, fixed)


@pytest.mark.parametrize("share", [0.15, 0.3, 0.5, 0.8])
def test_a_hundred_equal_blocks_are_solved(share):
    problem = chain(100, int(100_000 * share) + 1100)
    found = choose_variants(problem)
    verify_step(problem, found.choice, found.peak_bytes)
    assert found.proved
    assert 0 < found.bound_seconds <= found.seconds


def test_blocks_that_leave_different_bytes_are_solved_nearly():
    problem = chain(60, 31_000, odd=3)
    found = choose_variants(problem, seconds=1.0)
    verify_step(problem, found.choice, found.peak_bytes)
    whole = replace(problem, blocks=tuple(_without_slack(block) for block in problem.blocks))
    exact = choose_variants(whole, seconds=1.0)
    assert exact.seconds <= 1.01 * exact.bound_seconds


def _without_slack(block):
    tight = [replace(v, bound_seconds=v.seconds, floor_bytes=v.forward_after) for v in block.variants]
    return Block(block.name, tuple(tight))


def test_huge_figures_do_not_overflow():
    for scale in (2**30 + 7, 2**45 + 1):
        problem = chain(12, 6000, scale=scale)
        uneven = replace(problem, forward_gaps=(Gap(3, 1), *problem.forward_gaps[1:]))
        found = choose_variants(uneven)
        verify_step(uneven, found.choice, found.peak_bytes)
        assert found.proved
        assert found.seconds == pytest.approx(choose_variants(chain(12, 6000)).seconds)


def test_figures_too_large_for_the_solver_are_rounded_the_safe_way():
    base = chain(12, 6000, scale=2**45)
    shifted = tuple(replace(v, forward_peak=v.forward_peak + 1 + k) for k, v in enumerate(base.blocks[0].variants))
    problem = replace(base, blocks=(Block("layer", shifted),))
    assert not rows_of(problem).exact
    found = choose_variants(problem)
    verify_step(problem, found.choice, found.peak_bytes)
    assert found.seconds == pytest.approx(choose_variants(chain(12, 6000)).seconds)


def test_what_is_fixed_stays():
    fixed = (7, 0, 3, *(None,) * 17)
    problem = chain(20, 11_000, fixed=fixed)
    found = choose_variants(problem)
    assert found.choice[:3] == (7, 0, 3)
    assert found.proved
    assert found.seconds > choose_variants(replace(problem, fixed=())).seconds
    with pytest.raises(InvalidScheduleError, match="fixed"):
        verify_step(problem, (0, *found.choice[1:]), found.peak_bytes)


def test_with_no_time_a_choice_that_fits_is_returned():
    problem = chain(200, 90_000)
    found = choose_variants(problem, seconds=0.0)
    verify_step(problem, found.choice, found.peak_bytes)
    assert found.bound_seconds <= found.seconds


def test_the_verifier_rejects_what_is_wrong():
    problem = chain(3, 2500)
    found = choose_variants(problem)
    with pytest.raises(InvalidScheduleError, match="the budget is"):
        verify_step(problem, (0, 0, 0), simulate_step(problem, (0, 0, 0)).peak_bytes)
    with pytest.raises(InvalidScheduleError, match="not at"):
        verify_step(problem, found.choice, found.peak_bytes - 1)
    with pytest.raises(InvalidScheduleError, match="3 instances"):
        verify_step(problem, found.choice[1:], found.peak_bytes)
    with pytest.raises(InvalidScheduleError, match="0 to 7"):
        verify_step(problem, (8, *found.choice[1:]), found.peak_bytes)


def test_brute_force_notices_a_worse_choice(monkeypatch):
    problem = chain(3, 2500)
    worst = tuple(7 for _ in problem.instances)
    monkeypatch.setattr(choose, "_search", lambda *_: (worst, True))
    with pytest.raises(AssertionError):
        check(problem)


def test_the_walk_of_a_small_step():
    variant = Variant(5, 3, 4, -2, 0.5, 0.5, 3)
    problem = StepProblem((Block("b", (variant,)),), (0,), (Gap(1, 1), Gap(2, 0)), (Gap(0, 0), Gap(9, 1)), 20)
    trace = simulate_step(problem, (0,))
    assert trace.peaks == (1, 6, 6, 4, 8, 11)
    assert trace.levels == (1, 4, 4, 4, 2, 3)
    assert (trace.peak_bytes, trace.peak_moment, trace.seconds) == (11, Moment("gap", 3), 0.5)


GOOD = chain(2, 100)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Variant(1, 2, 3, 0, 0.0, 0.0, 0),
        lambda: Variant(3, 2, 1, 2, 0.0, 0.0, 0),
        lambda: Variant(3, 2, 1, 0, 0.0, 1.0, 0),
        lambda: Variant(3, 2, 1, 0, float("nan"), 0.0, 0),
        lambda: Gap(0, 1),
        lambda: Block("b", ()),
        lambda: replace(GOOD, instances=(0, 1)),
        lambda: replace(GOOD, instances=()),
        lambda: replace(GOOD, forward_gaps=GOOD.forward_gaps[1:]),
        lambda: replace(GOOD, fixed=(0,)),
        lambda: replace(GOOD, fixed=(8, None)),
    ],
)
def test_what_cannot_be_a_step_is_refused(wrong):
    with pytest.raises(InvalidInputError):
        wrong()
