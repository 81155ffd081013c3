"""The search behind `greedy` and `auto`: exact prices after every change, and moves that keep their promises."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.strategies import examples, graphs, schedules
from lowtide.graph import samples
from lowtide.graph.build import GraphBuilder
from lowtide.plan.core.problem import Problem
from lowtide.plan.search.descent import descend
from lowtide.plan.search.drop_choice import DropPolicy
from lowtide.plan.search.edited_schedule import EditedSchedule, edit_schedule
from lowtide.plan.search.local_search import LocalSearch
from lowtide.plan.search.problem_arrays import ProblemArrays
from lowtide.schedule.expand import expand
from lowtide.schedule.simulate import simulate
from lowtide.schedule.steps import Schedule
from lowtide.schedule.verify import verify

RELAXED = settings(max_examples=examples(400), deadline=None, suppress_health_check=list(HealthCheck))


def check_price(graph, costs, edited):
    """Check that the figures of the edited schedule are the simulator's."""
    schedule = edited.schedule()
    verify(graph, schedule)
    trace = simulate(graph, costs, schedule)
    ends = [sum(map(len, edited.rows[: k + 1])) for k in range(len(graph.ops))]
    starts = [0, *ends[:-1]]
    expected = [max(trace.bytes_during[a:b]) for a, b in zip(starts, ends, strict=True)]
    assert edited.peaks().tolist() == expected
    assert edited.peak() == trace.peak_bytes
    assert abs(edited.seconds - trace.seconds) < 1e-6
    for stage, row in enumerate(edited.rows):
        for place, run in enumerate(row):
            step = starts[stage] + place
            assert edited.alive_in(stage)[run] == (trace.bytes_after[step - 1] if step else 0)
        assert trace.bytes_during[starts[stage] + row.index(edited.worst_run(stage))] == expected[stage]
    check_gaps(graph, edited)


def check_gaps(graph, edited):
    """Check that the table of gaps holds every stretch between an event of a value and the next if that is a read."""
    last, expected = {}, []
    for row in edited.rows:
        for run in row:
            op, time = edited.op[run], edited.time[run]
            for value in dict.fromkeys(graph.ops[op].inputs):
                if graph.values[value].producer is not None:
                    expected.append((value, last[value], time))
                    last[value] = time
            for value in graph.rewrites[op] if run >= len(graph.ops) else graph.ops[op].outputs:
                last[value] = time
    rows = zip(
        edited.ledger.gap_value.tolist(),
        edited.ledger.gap_start.tolist(),
        edited.ledger.gap_end.tolist(),
        strict=True,
    )
    readable = {value for op in graph.ops for value in op.inputs} - {*graph.handovers, *graph.outputs}
    found = [row for row in rows if row[2] >= 0 and row[0] in readable]
    assert sorted(found) == sorted(row for row in expected if row[0] in readable)


@RELAXED
@given(st.data())
def test_timelines_price_as_the_simulator_does(data):
    graph, costs = data.draw(graphs(max_ops=8))
    edited = EditedSchedule(ProblemArrays(graph, costs))
    check_price(graph, costs, edited)
    for _ in range(data.draw(st.integers(0, 8))):
        change(data, graph, edited)
        check_price(graph, costs, edited)


def change(data, graph, edited):
    """Put in or take out a run."""
    repeats = edited.repeats()
    if repeats and data.draw(st.booleans()):
        edited.delete(data.draw(st.sampled_from(repeats)))
        return
    before = data.draw(st.sampled_from([run for row in edited.rows for run in row]))
    free = [op for op in range(edited.stage[before]) if not graph.ops[op].pinned]
    if free:
        edited.insert(data.draw(st.sampled_from(free)), before)


@RELAXED
@given(st.data())
def test_undoing_brings_everything_back(data):
    graph, costs = data.draw(graphs(max_ops=8))
    edited = EditedSchedule(ProblemArrays(graph, costs))
    for _ in range(data.draw(st.integers(0, 4))):
        change(data, graph, edited)
    if data.draw(st.booleans()):
        edited.commit()
    mark, before, seconds = len(edited.journal), edited.schedule(), edited.seconds
    for _ in range(data.draw(st.integers(1, 6))):
        change(data, graph, edited)
    if data.draw(st.booleans()):
        edited.prune()
    edited.undo(mark)
    assert edited.schedule() == before
    assert abs(edited.seconds - seconds) < 1e-6
    check_price(graph, costs, edited)


@RELAXED
@given(st.data())
def test_pruning_leaves_no_idle_run_behind_and_costs_no_bytes(data):
    graph, costs = data.draw(graphs(max_ops=8, marks=False))
    edited = EditedSchedule(ProblemArrays(graph, costs))
    for _ in range(data.draw(st.integers(0, 8))):
        change(data, graph, edited)
        peak = edited.peak()
        edited.prune()
        assert edited.peak() <= peak
        check_price(graph, costs, edited)


@RELAXED
@given(st.data())
def test_timelines_of_schedules(data):
    graph, costs = data.draw(graphs(max_ops=8))
    schedule = data.draw(schedules(graph))
    edited = edit_schedule(ProblemArrays(graph, costs), schedule)
    check_price(graph, costs, edited)
    again = edit_schedule(ProblemArrays(graph, costs), edited.schedule())
    assert again.schedule() == edited.schedule()


def test_many_runs_before_one_op_keep_their_order():
    graph, costs = samples.training_chain(6)
    edited = EditedSchedule(ProblemArrays(graph, costs))
    before = 9
    for round_ in range(40):
        before = edited.insert(round_ % 6, before)
    for round_ in range(40):
        edited.insert(round_ % 6, 9)
    check_price(graph, costs, edited)
    assert [edited.op[run] for run in edited.rows[9]][:3] == [3, 2, 1]


@pytest.mark.parametrize("area", [True, False])
def test_values_are_made_again_early_while_what_they_need_is_there(area):
    """At its last use `w` would need `x`, which is expensive and cannot stay that long."""
    builder = GraphBuilder()
    (x,) = builder.add_op("x", [], [("x", 10)], seconds=10.0)
    (w,) = builder.add_op("w", [x], [("w", 10)], seconds=1.0)
    builder.add_op("wide", [], [], seconds=1.0, workspace_bytes=85)
    (y,) = builder.add_op("y", [x], [("y", 5)], seconds=1.0)
    builder.add_op("wide_again", [y], [], seconds=1.0, workspace_bytes=85)
    builder.add_op("end", [w], [], seconds=1.0)
    graph, costs = builder.build(), builder.costs()
    edited = EditedSchedule(ProblemArrays(graph, costs))
    assert descend(edited, 100, DropPolicy(area=area)) == 100
    assert edited.schedule().steps == (0, 1, 2, 1, 3, 4, 5)
    check_price(graph, costs, edited)


@RELAXED
@given(st.data())
def test_repaired_schedules_fit_or_change_nothing(data):
    graph, costs = data.draw(graphs(max_ops=8))
    budget = data.draw(st.integers(1, max(1, simulate(graph, costs, Schedule.keep_all(graph)).peak_bytes)))
    problem = Problem(graph, costs, budget)
    search = LocalSearch(problem, seed=0)
    search.repair(data.draw(schedules(graph)))
    verify(graph, search.schedule)
    trace = problem.price(search.schedule)
    assert (search.fits, search.peak_bytes) == (problem.fits(trace), trace.peak_bytes)
    assert search.fits or search.schedule == Schedule.keep_all(graph)


def test_repairing_takes_out_what_is_not_needed():
    graph, costs = samples.training_chain(12)
    plain = simulate(graph, costs, Schedule.keep_all(graph))
    problem = Problem(graph, costs, plain.peak_bytes - 1)
    wasteful = expand(graph, [])
    search = LocalSearch(problem, seed=0)
    search.repair(wasteful)
    assert search.fits
    assert search.overhead < problem.overhead(problem.price(wasteful))
