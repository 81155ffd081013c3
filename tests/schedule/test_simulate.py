"""The simulator against a recount that keeps explicit books of every allocation."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.strategies import examples, graphs, schedules
from lowtide.graph import samples
from lowtide.graph.build import GraphBuilder
from lowtide.graph.costs import Costs
from lowtide.schedule.simulate import instances, simulate
from lowtide.schedule.steps import Schedule
from lowtide.schedule.verify import verify


def recount(graph, costs, schedule, *, forget_workspace=False):
    """Return the bytes during every step by asking, for each allocation ever made, whether it is still needed."""
    steps = schedule.steps
    boundary = len(schedule.forward)
    allocations = []  # (value, step of birth)
    for step, op in enumerate(steps):
        first = op not in steps[:step]
        for value in graph.ops[op].outputs:
            if first or value not in graph.ops[op].first_run_only:
                allocations.append((value, step))

    def current(value, step):
        """The allocation of `value` that a read at `step` finds."""
        return max(birth for made, birth in allocations if made == value and birth < step)

    def needed(value, birth, step):
        """Whether the allocation must exist while `step` runs."""
        if step < birth:
            return False
        if step == birth:
            return True
        for later in range(step, len(steps)):
            if value in graph.ops[steps[later]].inputs and current(value, later) == birth:
                return True
        producer = graph.values[value].producer
        in_forward = producer < graph.num_forward
        phase = [b for made, b in allocations if made == value and (b < boundary or not in_forward)]
        if not phase or max(phase) != birth:
            return False
        return value in graph.outputs or (value in graph.handovers and step < boundary)

    during = []
    for step, op in enumerate(steps):
        total = sum(graph.values[value].bytes for value, birth in allocations if needed(value, birth, step))
        total += 0 if forget_workspace else costs.workspace_bytes[op]
        total += graph.ops[op].replay_bytes if op in steps[:step] else 0
        for other in set(steps):
            runs = [index for index, ran in enumerate(steps) if ran == other]
            if len(runs) > 1 and runs[0] <= step <= runs[-1]:
                total += graph.ops[other].replay_bytes
        during.append(total)
    return tuple(during)


@settings(max_examples=examples(2000), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_simulator_agrees_with_the_recount(data):
    graph, costs = data.draw(graphs())
    schedule = data.draw(schedules(graph))
    verify(graph, schedule)
    trace = simulate(graph, costs, schedule)
    expected = recount(graph, costs, schedule)
    assert trace.bytes_during == expected
    assert trace.peak_bytes == max(expected)
    assert trace.peak_step == expected.index(max(expected))
    assert trace.seconds == sum(costs.seconds[op] for op in schedule.steps)


def test_a_wrong_recount_is_detected():
    graph, costs = samples.random_dag(3)
    schedule = Schedule.keep_all(graph)
    assert any(costs.workspace_bytes)
    assert recount(graph, costs, schedule, forget_workspace=True) != simulate(graph, costs, schedule).bytes_during


def test_figures_of_a_chain_by_hand():
    graph, costs = samples.training_chain(3)
    trace = simulate(graph, costs, Schedule.keep_all(graph))
    # v0; v0 v1; v0 v1 v2; then g beside all three, each gradient frees what it read last.
    assert trace.bytes_during == (100, 200, 300, 400, 400, 300, 101)
    assert trace.saved_bytes == 300
    assert trace.seconds == 3 + 1 + 6


def test_recomputation_frees_the_gap():
    graph, costs = samples.training_chain(3)
    schedule = Schedule((0, 1, 2), (3, 1, 4, 5, 6))
    trace = simulate(graph, costs, schedule)
    # v1 is not there while forward ends; it comes back for the gradient that reads it.
    assert trace.bytes_during == (100, 200, 300, 300, 300, 400, 300, 101)
    assert trace.seconds == 11
    assert [(made.birth, made.death) for made in instances(graph, schedule) if made.value == 2] == [(1, 2), (4, 5)]


def test_generator_state_counts_from_first_to_last_run():
    builder = GraphBuilder()
    x = builder.add_input("x", 8)
    (y,) = builder.add_op("drop", [x], [("y", 10)], random=True, replay_bytes=5)
    (z,) = builder.add_op("f", [x], [("z", 1)])
    (out,) = builder.add_op("g", [y, z], [("out", 1)])
    graph = builder.build(outputs=[out])
    costs = builder.costs()
    assert simulate(graph, costs, Schedule((0, 1, 2))).bytes_during == (10, 11, 12)
    # The state exists twice while it is replayed: the kept one, and the caller's to be put back.
    assert simulate(graph, costs, Schedule((0, 1, 0, 2))).bytes_during == (15, 6, 21, 12)


def test_empty_graph():
    graph = GraphBuilder().build()
    trace = simulate(graph, Costs((), ()), Schedule(()))
    assert (trace.peak_bytes, trace.seconds, trace.saved_bytes) == (0, 0, 0)
