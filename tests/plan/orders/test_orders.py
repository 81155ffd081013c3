"""Other orders of first runs: legal, with the same results, and where they help."""

import importlib
from dataclasses import replace

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from helpers.strategies import examples, graphs, schedules
from lowtide.graph.build import GraphBuilder, check_graph
from lowtide.plan.auto.planner import Auto
from lowtide.plan.core.problem import Problem
from lowtide.plan.core.result import Outcome
from lowtide.plan.orders.order_search import Sides, first_runs
from lowtide.plan.orders.reordered_problem import View
from lowtide.plan.orders.reorderings import delayed, releasing, without_idle_runs
from lowtide.plan.planners.keep_all import KeepAll
from lowtide.plan.search.edited_schedule import Timeline
from lowtide.plan.search.local_search import Climb
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
def test_a_view_prices_as_the_problem_does(data):
    graph, costs = data.draw(graphs(max_ops=8))
    problem = Problem(graph, costs, 100)
    view = View.of(problem, delayed(graph, outputs=True))
    check_graph(view.problem.graph)
    schedule = data.draw(schedules(view.problem.graph))
    outward = view.outward(schedule)
    verify(graph, outward)
    assert problem.price(outward) == view.problem.price(schedule)
    assert view.inward(outward) == schedule
    ops = data.draw(st.sets(st.sampled_from(range(len(graph.ops)))))
    assert view.ops_outward(view.ops_inward(ops)) == ops


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
    assert View.of(problem, delayed(graph, outputs=False)).problem.baseline.peak_bytes == 111
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
    shorter = without_idle_runs(graph, schedule)
    verify(graph, shorter)
    before, after = problem.price(schedule), problem.price(shorter)
    assert after.peak_bytes <= before.peak_bytes
    assert after.seconds <= before.seconds + 1e-9
    assert set(shorter.forward) == set(schedule.forward)
    assert set(shorter.backward) == set(schedule.backward)
    assert without_idle_runs(graph, shorter) == shorter


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
    shorter = without_idle_runs(graph, schedule)
    assert [graph.ops[op].name for op in shorter.backward] == ["grad", "active", "of_weight", "of_wide", "of_x"]
    assert shorter.forward == schedule.forward
    # What somebody reads meanwhile stays, and so does what must run once or draws random numbers.
    read = Schedule(schedule.forward, (*schedule.backward[:2], ops["of_x"], *schedule.backward[2:-1]))
    verify(graph, read)
    assert without_idle_runs(graph, read) == read
    for mark in ({"random": True}, {"first_run_only": frozenset(graph.ops[ops["of_wide"]].outputs)}):
        marked = replace(graph, ops=tuple(replace(op, **mark) if op.name == "of_wide" else op for op in graph.ops))
        assert without_idle_runs(marked, schedule) == schedule


def test_backward_lets_gradients_go_early():
    graph, costs = two_readers()
    released = [graph.ops[op].name for op in releasing(graph)]
    assert released == ["x", "wide", "active", "loss", "grad", "of_weight", "of_wide", "of_x"]
    view = View.of(Problem(graph, costs, 1), releasing(graph))
    # Beside what is kept of forward, one large value less is alive at the worst moment.
    assert (Problem(graph, costs, 1).baseline.peak_bytes, view.problem.baseline.peak_bytes) == (311, 212)
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
    sides = Sides(problem, seed=0)
    offered = data.draw(schedules(graph))
    sides.offer(offered)
    sides.look_around(given=False, until=float("inf"), progress=silent)
    late = data.draw(schedules(graph))
    sides.offer(late)
    for schedule in (offered, late):
        trace = problem.price(schedule)
        assert sides.fits or sides.peak_bytes <= trace.peak_bytes
        if problem.fits(trace):
            assert sides.fits
            assert sides.overhead <= problem.overhead(trace) + 1e-9
    best = None
    for anew in (False, True, False, False):
        sides.improve(2_000, anew=anew, until=float("inf"))
        verify(graph, sides.schedule)
        trace = problem.price(sides.schedule)
        assert (sides.fits, sides.peak_bytes) == (problem.fits(trace), trace.peak_bytes)
        key = (not sides.fits, problem.overhead(trace) if sides.fits else trace.peak_bytes)
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
    monkeypatch.setattr(module, "descents", lambda facts, limit, first: [])
    monkeypatch.setattr(module, "go_low", lambda facts, limit: (Timeline(facts), False))
    sides = Sides(problem, seed=0)
    sides.look_around(given=False, until=float("inf"), progress=silent)
    assert (sides.fits, sides.is_given, sides.peak_bytes) == (False, False, 211)
    late = Schedule((0, 1, 2, 3, 4, 2, 1, 5), ())
    verify(problem.graph, late)
    sides.offer(late)
    assert (sides.fits, sides.is_given, sides.schedule) == (True, True, late)


def test_a_side_that_is_far_behind_gets_no_work(monkeypatch):
    graph, costs = early_bird()
    problem = Problem(graph, costs, 120)
    sides = Sides(problem, seed=0)
    sides.look_around(given=False, until=float("inf"), progress=silent)
    assert sides.fits
    assert not sides.is_given
    assert list(first_runs(sides.schedule)) != sorted(first_runs(sides.schedule))
    assert first_runs(Schedule.keep_all(graph)) == tuple(range(len(graph.ops)))
    searched = []
    monkeypatch.setattr(Climb, "improve", lambda climb, *_, **__: searched.append(climb))
    for _ in range(4):
        sides.improve(1_000, until=float("inf"))
    assert len(set(map(id, searched))) == 1


def test_known_schedules_in_another_order_get_a_side_of_it():
    graph, costs = early_bird()
    problem = Problem(graph, costs, 120)
    order = delayed(graph, outputs=True)
    known = Schedule(order, ())
    verify(graph, known)
    assert problem.fits(problem.price(known))
    sides = Sides(problem, seed=0)
    for _ in range(2):
        sides.take(known)
        assert (sides.fits, sides.is_given, sides.schedule) == (True, False, known)
        assert sides.view.order == order
        assert len(sides._sides) == 2
