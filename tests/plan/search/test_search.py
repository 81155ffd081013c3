"""The search behind `greedy` and `auto`: exact prices after every change, and moves that keep their promises."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.strategies import examples, graphs, schedules
from lowtide.graph import samples
from lowtide.graph.build import GraphBuilder
from lowtide.plan.core.problem import Problem
from lowtide.plan.search.descent import descend
from lowtide.plan.search.drop_choice import Taste
from lowtide.plan.search.edited_schedule import Timeline, timeline_of
from lowtide.plan.search.local_search import Climb
from lowtide.plan.search.problem_arrays import Facts
from lowtide.schedule.expand import expand
from lowtide.schedule.simulate import simulate
from lowtide.schedule.steps import Schedule
from lowtide.schedule.verify import verify

RELAXED = settings(max_examples=examples(400), deadline=None, suppress_health_check=list(HealthCheck))


def check_price(graph, costs, timeline):
    """Check that the timeline's figures are the simulator's."""
    schedule = timeline.schedule()
    verify(graph, schedule)
    trace = simulate(graph, costs, schedule)
    ends = [sum(map(len, timeline.rows[: k + 1])) for k in range(len(graph.ops))]
    starts = [0, *ends[:-1]]
    expected = [max(trace.bytes_during[a:b]) for a, b in zip(starts, ends, strict=True)]
    assert timeline.peaks().tolist() == expected
    assert timeline.peak() == trace.peak_bytes
    assert abs(timeline.seconds - trace.seconds) < 1e-6
    for stage, row in enumerate(timeline.rows):
        for place, run in enumerate(row):
            step = starts[stage] + place
            assert timeline.alive_in(stage)[run] == (trace.bytes_after[step - 1] if step else 0)
        assert trace.bytes_during[starts[stage] + row.index(timeline.worst_run(stage))] == expected[stage]
    check_gaps(graph, timeline)


def check_gaps(graph, timeline):
    """Check that the table of gaps holds every stretch between an event of a value and the next if that is a read."""
    last, expected = {}, []
    for row in timeline.rows:
        for run in row:
            op, time = timeline.op[run], timeline.time[run]
            for value in dict.fromkeys(graph.ops[op].inputs):
                if graph.values[value].producer is not None:
                    expected.append((value, last[value], time))
                    last[value] = time
            for value in graph.rewrites[op] if run >= len(graph.ops) else graph.ops[op].outputs:
                last[value] = time
    rows = zip(
        timeline.ledger.gap_value.tolist(),
        timeline.ledger.gap_start.tolist(),
        timeline.ledger.gap_end.tolist(),
        strict=True,
    )
    readable = {value for op in graph.ops for value in op.inputs} - {*graph.handovers, *graph.outputs}
    found = [row for row in rows if row[2] >= 0 and row[0] in readable]
    assert sorted(found) == sorted(row for row in expected if row[0] in readable)


@RELAXED
@given(st.data())
def test_timelines_price_as_the_simulator_does(data):
    graph, costs = data.draw(graphs(max_ops=8))
    timeline = Timeline(Facts(graph, costs))
    check_price(graph, costs, timeline)
    for _ in range(data.draw(st.integers(0, 8))):
        change(data, graph, timeline)
        check_price(graph, costs, timeline)


def change(data, graph, timeline):
    """Put in or take out a run."""
    repeats = timeline.repeats()
    if repeats and data.draw(st.booleans()):
        timeline.delete(data.draw(st.sampled_from(repeats)))
        return
    before = data.draw(st.sampled_from([run for row in timeline.rows for run in row]))
    free = [op for op in range(timeline.stage[before]) if not graph.ops[op].pinned]
    if free:
        timeline.insert(data.draw(st.sampled_from(free)), before)


@RELAXED
@given(st.data())
def test_undoing_brings_everything_back(data):
    graph, costs = data.draw(graphs(max_ops=8))
    timeline = Timeline(Facts(graph, costs))
    for _ in range(data.draw(st.integers(0, 4))):
        change(data, graph, timeline)
    if data.draw(st.booleans()):
        timeline.commit()
    mark, before, seconds = len(timeline.journal), timeline.schedule(), timeline.seconds
    for _ in range(data.draw(st.integers(1, 6))):
        change(data, graph, timeline)
    if data.draw(st.booleans()):
        timeline.prune()
    timeline.undo(mark)
    assert timeline.schedule() == before
    assert abs(timeline.seconds - seconds) < 1e-6
    check_price(graph, costs, timeline)


@RELAXED
@given(st.data())
def test_pruning_leaves_no_idle_run_behind_and_costs_no_bytes(data):
    graph, costs = data.draw(graphs(max_ops=8, marks=False))
    timeline = Timeline(Facts(graph, costs))
    for _ in range(data.draw(st.integers(0, 8))):
        change(data, graph, timeline)
        peak = timeline.peak()
        timeline.prune()
        assert timeline.peak() <= peak
        check_price(graph, costs, timeline)


@RELAXED
@given(st.data())
def test_timelines_of_schedules(data):
    graph, costs = data.draw(graphs(max_ops=8))
    schedule = data.draw(schedules(graph))
    timeline = timeline_of(Facts(graph, costs), schedule)
    check_price(graph, costs, timeline)
    again = timeline_of(Facts(graph, costs), timeline.schedule())
    assert again.schedule() == timeline.schedule()


def test_many_runs_before_one_op_keep_their_order():
    graph, costs = samples.training_chain(6)
    timeline = Timeline(Facts(graph, costs))
    before = 9
    for round_ in range(40):
        before = timeline.insert(round_ % 6, before)
    for round_ in range(40):
        timeline.insert(round_ % 6, 9)
    check_price(graph, costs, timeline)
    assert [timeline.op[run] for run in timeline.rows[9]][:3] == [3, 2, 1]


@pytest.mark.parametrize("area", [True, False])
def test_values_are_made_again_early_while_what_they_need_is_there(area):
    """At its last use `w` would need `x`, which is dear and cannot stay that long."""
    builder = GraphBuilder()
    (x,) = builder.add_op("x", [], [("x", 10)], seconds=10.0)
    (w,) = builder.add_op("w", [x], [("w", 10)], seconds=1.0)
    builder.add_op("wide", [], [], seconds=1.0, workspace_bytes=85)
    (y,) = builder.add_op("y", [x], [("y", 5)], seconds=1.0)
    builder.add_op("wide_again", [y], [], seconds=1.0, workspace_bytes=85)
    builder.add_op("end", [w], [], seconds=1.0)
    graph, costs = builder.build(), builder.costs()
    timeline = Timeline(Facts(graph, costs))
    assert descend(timeline, 100, Taste(area=area)) == 100
    assert timeline.schedule().steps == (0, 1, 2, 1, 3, 4, 5)
    check_price(graph, costs, timeline)


@RELAXED
@given(st.data())
def test_mended_schedules_fit_or_change_nothing(data):
    graph, costs = data.draw(graphs(max_ops=8))
    budget = data.draw(st.integers(1, max(1, simulate(graph, costs, Schedule.keep_all(graph)).peak_bytes)))
    problem = Problem(graph, costs, budget)
    climb = Climb(problem, seed=0)
    climb.mend(data.draw(schedules(graph)))
    verify(graph, climb.schedule)
    trace = problem.price(climb.schedule)
    assert (climb.fits, climb.peak_bytes) == (problem.fits(trace), trace.peak_bytes)
    assert climb.fits or climb.schedule == Schedule.keep_all(graph)


def test_mending_takes_out_what_is_not_needed():
    graph, costs = samples.training_chain(12)
    plain = simulate(graph, costs, Schedule.keep_all(graph))
    problem = Problem(graph, costs, plain.peak_bytes - 1)
    wasteful = expand(graph, [])
    climb = Climb(problem, seed=0)
    climb.mend(wasteful)
    assert climb.fits
    assert climb.overhead < problem.overhead(problem.price(wasteful))
