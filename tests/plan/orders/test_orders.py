"""Other orders of first runs: legal, with the same results, and where they help."""

import importlib
from dataclasses import replace

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from helpers.strategies import examples, graphs, schedules
from lowtide.graph.build import GraphBuilder
from lowtide.graph.verify import check_graph
from lowtide.plan.auto.planner import Auto
from lowtide.plan.core.problem import Problem
from lowtide.plan.core.result import Outcome
from lowtide.plan.orders.order_search import OrderSearch, first_runs
from lowtide.plan.orders.reordering import ReorderedProblem, delayed, releasing, without_redundant_runs
from lowtide.plan.planners.keep_all import KeepAll
from lowtide.plan.search.edited_schedule import EditedSchedule
from lowtide.plan.search.local_search import LocalSearch
from lowtide.plan.solve import solve
from lowtide.progress import silent
from lowtide.schedule.steps import Schedule
from lowtide.schedule.verify import verify

RELAXED = settings(max_examples=examples(300), deadline=None, suppress_health_check=list(HealthCheck))


@RELAXED
@given(graphs(max_ops=10), st.booleans(), st.booleans())
def test_other_orders_are_legal(drawn, outputs, last):
    graph, _ = drawn
    released = releasing(graph, last=last)
    for order in (delayed(graph, outputs=outputs), released, delayed(graph, outputs=outputs, begin=released)):
        assert sorted(order) == list(range(len(graph.ops)))
        boundary = graph.num_forward if graph.boundary is not None else len(order)
        verify(graph, Schedule(order[:boundary], order[boundary:]))
    assert released[: graph.num_forward] == tuple(graph.forward)


@RELAXED
@given(st.data())
def test_a_reordered_problem_prices_as_the_problem_does(data):
    graph, costs = data.draw(graphs(max_ops=8))
    problem = Problem(graph, costs, 100)
    reordered = ReorderedProblem.of(problem, delayed(graph, outputs=True))
    check_graph(reordered.problem.graph)
    schedule = data.draw(schedules(reordered.problem.graph))
    to_given = reordered.to_given(schedule)
    verify(graph, to_given)
    assert problem.price(to_given) == reordered.problem.price(schedule)
    assert reordered.from_given(to_given) == schedule
    ops = data.draw(st.sets(st.sampled_from(range(len(graph.ops)))))
    assert reordered.ops_to_given(reordered.ops_from_given(ops)) == ops


def early_bird():
    """Return a graph in which an op makes much long before it is read, beside another that needs the room."""
    builder = GraphBuilder()
    (x,) = builder.add_op("x", [], [("x", 10)])
    (early,) = builder.add_op("early", [x], [("early", 100)])
    (large,) = builder.add_op("large", [x], [("large", 100)])
    (small,) = builder.add_op("small", [large], [("small", 1)])
    (end,) = builder.add_op("end", [early, small], [("end", 1)])
    return builder.build(outputs=[end]), builder.costs()


def test_an_op_that_makes_much_waits_for_its_reader():
    graph, costs = early_bird()
    assert [graph.ops[op].name for op in delayed(graph, outputs=False)] == ["x", "large", "small", "early", "end"]
    problem = Problem(graph, costs, 1)
    assert ReorderedProblem.of(problem, delayed(graph, outputs=False)).problem.baseline.peak_bytes == 111
    assert problem.baseline.peak_bytes == 210


def test_random_ops_and_those_that_run_once_do_not_wait():
    graph, _ = early_bird()
    for mark in ({"random": True}, {"pinned": "it has an effect"}):
        marked = replace(graph, ops=tuple(replace(op, **mark) if op.name == "early" else op for op in graph.ops))
        assert delayed(marked, outputs=False) == tuple(range(5))


@RELAXED
@given(st.data())
def test_without_idle_runs_a_schedule_is_legal_and_no_dearer(data):
    graph, costs = data.draw(graphs(max_ops=8))
    problem = Problem(graph, costs, 100)
    schedule = data.draw(schedules(graph))
    shorter = without_redundant_runs(graph, schedule)
    verify(graph, shorter)
    before, after = problem.price(schedule), problem.price(shorter)
    assert after.peak_bytes <= before.peak_bytes
    assert after.seconds <= before.seconds + 1e-9
    assert set(shorter.forward) == set(schedule.forward)
    assert set(shorter.backward) == set(schedule.backward)
    assert without_redundant_runs(graph, shorter) == shorter


def two_readers():
    """Return a graph in which a large gradient is made before what only another reader needs is gone."""
    builder = GraphBuilder()
    (x,) = builder.add_op("x", [], [("x", 10)])
    (wide,) = builder.add_op("wide", [x], [("wide", 100)])
    (active,) = builder.add_op("active", [wide], [("active", 100)])
    (loss,) = builder.add_op("loss", [active], [("loss", 1)])
    builder.begin_backward()
    (grad,) = builder.add_op("grad", [loss], [("grad", 10)])
    (of_wide,) = builder.add_op("of_wide", [grad, wide], [("of_wide", 100)])
    (of_weight,) = builder.add_op("of_weight", [grad, active], [("of_weight", 1)])
    (of_x,) = builder.add_op("of_x", [of_wide], [("of_x", 1)])
    return builder.build(outputs=[loss, of_weight, of_x]), builder.costs()


def test_an_op_waits_whose_result_nobody_reads_before_it_is_made_again():
    graph, _ = two_readers()
    ops = {op.name: number for number, op in enumerate(graph.ops)}
    steps = ["grad", "of_wide", "active", "of_weight", "of_wide", "of_x"]
    schedule = Schedule(tuple(graph.forward), tuple(ops[name] for name in steps))
    verify(graph, schedule)
    shorter = without_redundant_runs(graph, schedule)
    assert [graph.ops[op].name for op in shorter.backward] == ["grad", "active", "of_weight", "of_wide", "of_x"]
    assert shorter.forward == schedule.forward
    # What somebody reads meanwhile stays, and so does what must run once or draws random numbers.
    read = Schedule(schedule.forward, (*schedule.backward[:2], ops["of_x"], *schedule.backward[2:-1]))
    verify(graph, read)
    assert without_redundant_runs(graph, read) == read
    for mark in ({"random": True}, {"first_run_only": frozenset(graph.ops[ops["of_wide"]].outputs)}):
        marked = replace(graph, ops=tuple(replace(op, **mark) if op.name == "of_wide" else op for op in graph.ops))
        assert without_redundant_runs(marked, schedule) == schedule


def test_backward_lets_gradients_go_early():
    graph, costs = two_readers()
    released = [graph.ops[op].name for op in releasing(graph)]
    assert released == ["x", "wide", "active", "loss", "grad", "of_weight", "of_wide", "of_x"]
    reordered = ReorderedProblem.of(Problem(graph, costs, 1), releasing(graph))
    # Beside what is kept of forward, one large value less is alive at the worst moment.
    assert (Problem(graph, costs, 1).baseline.peak_bytes, reordered.problem.baseline.peak_bytes) == (311, 212)
    # Ops that must run once stay in their order.
    fixed = tuple(replace(op, pinned="it has an effect") if op.name.startswith("of_w") else op for op in graph.ops)
    order = [graph.ops[op].name for op in releasing(replace(graph, ops=fixed))]
    assert order.index("of_wide") < order.index("of_weight")


def test_of_two_branches_one_ends_before_the_other_begins():
    builder = GraphBuilder()
    (x,) = builder.add_op("x", [], [("x", 10)])
    builder.begin_backward()
    (grad,) = builder.add_op("grad", [x], [("grad", 1)])
    (left,) = builder.add_op("left", [grad], [("left", 50)])
    (right,) = builder.add_op("right", [grad], [("right", 40)])
    (less,) = builder.add_op("less", [left], [("less", 1)])
    (little,) = builder.add_op("little", [right], [("little", 1)])
    graph = builder.build(outputs=[less, little])
    names = [graph.ops[op].name for op in releasing(graph)]
    assert names == ["x", "grad", "right", "little", "left", "less"]
    # Of two that are equally good, either may be the first.
    even = replace(graph, values=tuple(replace(v, bytes=40) if v.name == "left" else v for v in graph.values))
    orders = {last: [even.ops[op].name for op in releasing(even, last=last)] for last in (False, True)}
    assert orders == {False: ["x", "grad", "left", "less", "right", "little"], True: names}


def test_auto_lets_a_large_gradient_wait_for_a_gradient_of_a_weight():
    graph, costs = two_readers()
    # Both large activations and the gradient of one of them do not fit; of the three, any two do.
    problem = Problem(graph, costs, 250)
    plan = solve(problem, Auto(planners={"keep_all": KeepAll()}))
    assert plan.fits
    assert [graph.ops[op].name for op in plan.schedule.backward][-2:] == ["of_wide", "of_x"]
    assert (plan.overhead, plan.num_recomputed) == (0.0, 0)


def test_auto_takes_an_order_that_needs_no_recomputation():
    graph, costs = early_bird()
    auto = Auto(planners={"keep_all": KeepAll()})
    plan = solve(Problem(graph, costs, 111), auto)
    assert plan.fits
    assert plan.outcome is Outcome.OPTIMAL
    assert (plan.overhead, plan.num_recomputed) == (0.0, 0)


def test_auto_says_when_no_order_helps():
    graph, costs = early_bird()
    plan = solve(Problem(graph, costs, 100), Auto(planners={"keep_all": KeepAll()}), throw=False)
    assert not plan.fits
    assert plan.outcome is Outcome.IMPOSSIBLE


@RELAXED
@given(st.data())
def test_both_sides_keep_the_best_of_what_they_were_offered(data):
    graph, costs = data.draw(graphs(max_ops=8))
    peak = Problem(graph, costs, 1).baseline.peak_bytes
    assume(peak > 1)
    problem = Problem(graph, costs, data.draw(st.integers(1, peak - 1)))
    search = OrderSearch(problem, seed=0)
    offered = data.draw(schedules(graph))
    search.offer(offered)
    search.explore(descend_in_given=False, deadline=float("inf"), progress=silent)
    late = data.draw(schedules(graph))
    search.offer(late)
    for schedule in (offered, late):
        trace = problem.price(schedule)
        assert search.fits or search.peak_bytes <= trace.peak_bytes
        if problem.fits(trace):
            assert search.fits
            assert search.overhead <= problem.overhead(trace) + 1e-9
    best = None
    for restart in (False, True, False, False):
        search.improve(2_000, restart=restart, deadline=float("inf"))
        verify(graph, search.schedule)
        trace = problem.price(search.schedule)
        assert (search.fits, search.peak_bytes) == (problem.fits(trace), trace.peak_bytes)
        key = (not search.fits, problem.overhead(trace) if search.fits else trace.peak_bytes)
        assert best is None or key <= (best[0], best[1] + 1e-9)
        best = key


def test_a_schedule_that_comes_late_counts_at_once(monkeypatch):
    """Another order has less memory, but nothing fits; then a planner in the given order has something that does."""
    builder = GraphBuilder()
    (x,) = builder.add_op("x", [], [("x", 10)])
    (y,) = builder.add_op("y", [x], [("y", 50)], random=True)
    (early,) = builder.add_op("early", [x], [("early", 100)])
    (large,) = builder.add_op("large", [x], [("large", 150)])
    (small,) = builder.add_op("small", [large], [("small", 1)])
    (end,) = builder.add_op("end", [early, small, y], [("end", 1)])
    problem = Problem(builder.build(outputs=[end]), builder.costs(), 170)
    module = importlib.import_module("lowtide.plan.orders.order_search")
    monkeypatch.setattr(module, "descents", lambda arrays, limit, first: [])
    monkeypatch.setattr(module, "descend_low", lambda arrays, limit: (EditedSchedule(arrays), False))
    search = OrderSearch(problem, seed=0)
    search.explore(descend_in_given=False, deadline=float("inf"), progress=silent)
    assert (search.fits, search.is_given, search.peak_bytes) == (False, False, 211)
    late = Schedule((0, 1, 2, 3, 4, 2, 1, 5), ())
    verify(problem.graph, late)
    search.offer(late)
    assert (search.fits, search.is_given, search.schedule) == (True, True, late)


def test_a_side_that_is_far_behind_gets_no_work(monkeypatch):
    graph, costs = early_bird()
    problem = Problem(graph, costs, 120)
    search = OrderSearch(problem, seed=0)
    search.explore(descend_in_given=False, deadline=float("inf"), progress=silent)
    assert search.fits
    assert not search.is_given
    assert list(first_runs(search.schedule)) != sorted(first_runs(search.schedule))
    assert first_runs(Schedule.keep_all(graph)) == tuple(range(len(graph.ops)))
    searched = []
    monkeypatch.setattr(LocalSearch, "improve", lambda search, *_, **__: searched.append(search))
    for _ in range(4):
        search.improve(1_000, deadline=float("inf"))
    assert len(set(map(id, searched))) == 1


def test_known_schedules_in_another_order_get_a_side_of_it():
    graph, costs = early_bird()
    problem = Problem(graph, costs, 120)
    order = delayed(graph, outputs=True)
    known = Schedule(order, ())
    verify(graph, known)
    assert problem.fits(problem.price(known))
    search = OrderSearch(problem, seed=0)
    for _ in range(2):
        search.offer_in_own_order(known)
        assert (search.fits, search.is_given, search.schedule) == (True, False, known)
        assert search.reordered.order == order
        assert len(search._orders) == 2
