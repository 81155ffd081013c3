"""The verifier accepts what may run and refuses each thing that may not."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.strategies import examples, graphs, schedules
from lowtide.errors import InvalidScheduleError
from lowtide.graph import samples
from lowtide.graph.build import GraphBuilder
from lowtide.schedule.expand import expand
from lowtide.schedule.steps import Schedule
from lowtide.schedule.verify import verify


def marked():
    """x -> a (random) -> b (pinned) -> c | da, db (random); c and da are outputs, s is handed over."""
    builder = GraphBuilder()
    x = builder.add_input("x", 4)
    (a,) = builder.add_op("a", [x], [("a", 4)], random=True)
    b, s = builder.add_op("b", [a], [("b", 4), ("s", 4)], pinned="it prints", once=["s"])
    (c,) = builder.add_op("c", [b], [("c", 4)])
    builder.begin_backward()
    (da,) = builder.add_op("da", [c, a], [("da", 4)])
    builder.add_op("db", [da], [("db", 4)], random=True)
    return builder.build(outputs=[c, da], handovers=[s])


LEGAL = Schedule((0, 1, 2), (3, 4))


def test_plain_training_and_recomputation_are_legal():
    verify(marked(), LEGAL)
    verify(marked(), Schedule((0, 1, 2), (0, 3, 4, 3)))
    verify(marked(), Schedule((0, 0, 1, 2, 2), (2, 3, 3, 4)))


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (Schedule((0, 1, 9), (3, 4)), "runs op 9"),
        (Schedule((0, 1, -1), (3, 4)), "runs op -1"),
        (Schedule((0, 1, True), (3, 4)), "runs op True"),
        (Schedule((0, 1, 2, 3), (4,)), "backward op 'da' in forward"),
        (Schedule((1, 0, 2), (3, 4)), "reads 'a' before"),
        (Schedule((0, 1, 2), (4, 3)), "reads 'da' before"),
        (Schedule((0, 1), (2, 3, 4)), "'c' is due in forward"),
        (Schedule((0, 1, 2), (4,)), "before"),
        (Schedule((0, 2), (1, 3, 4)), "before"),
        (Schedule((0, 1, 1, 2), (3, 4)), "exactly once: it prints"),
        (Schedule((0, 1, 2), (1, 3, 4)), "exactly once: it prints"),
        (Schedule((0, 1, 2), (3,)), "random op 'db' never runs"),
        (Schedule((), ()), "due in forward"),
    ],
)
def test_each_rule_has_a_breach(schedule, message):
    with pytest.raises(InvalidScheduleError, match=message):
        verify(marked(), schedule)


def unrelated(**marks):
    builder = GraphBuilder()
    x = builder.add_input("x", 4)
    builder.add_op("a", [x], [("a", 4)], **marks)
    builder.add_op("b", [x], [("b", 4)], **marks)
    builder.begin_backward()
    builder.add_op("c", [x], [("c", 4)])
    return builder.build()


@pytest.mark.parametrize("marks", [{"random": True}, {"pinned": "it prints"}])
def test_marked_ops_keep_their_order_and_phase(marks):
    graph = unrelated(**marks)
    verify(graph, Schedule((0, 1), (2,)))
    with pytest.raises(InvalidScheduleError, match="order must be kept"):
        verify(graph, Schedule((1, 0), (2,)))
    with pytest.raises(InvalidScheduleError, match="must first run in forward"):
        verify(graph, Schedule((0,), (1, 2)))
    with pytest.raises(InvalidScheduleError, match="never runs"):
        verify(graph, Schedule((0,), (2,)))


def test_unmarked_ops_may_move_or_be_left_out():
    graph = unrelated()
    verify(graph, Schedule((1, 0), (2,)))
    verify(graph, Schedule((0,), (1, 2)))
    verify(graph, Schedule((), ()))


def test_a_handover_must_be_made_in_forward():
    builder = GraphBuilder()
    x = builder.add_input("x", 4)
    (s,) = builder.add_op("s", [x], [("s", 4)])
    builder.begin_backward()
    graph = builder.build(handovers=[s])
    with pytest.raises(InvalidScheduleError, match="handover 's' is due in forward"):
        verify(graph, Schedule((), (0,)))


def test_first_run_only_values_outlive_a_second_run():
    builder = GraphBuilder()
    x = builder.add_input("x", 4)
    y, s = builder.add_op("norm", [x], [("y", 4), ("s", 4)], once=["s"])
    builder.add_op("use", [y, s], [("z", 4)])
    verify(builder.build(), Schedule((0, 0, 1)))


def test_a_graph_without_phases_has_no_backward():
    graph, _ = samples.chain(3)
    verify(graph, Schedule((0, 1, 2)))
    with pytest.raises(InvalidScheduleError, match="no phases"):
        verify(graph, Schedule((0, 1), (2,)))


@settings(max_examples=examples(300), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_legal_schedules_are_accepted(data):
    graph, _ = data.draw(graphs())
    verify(graph, data.draw(schedules(graph)))


def is_legal(graph, forward, backward):
    try:
        verify(graph, Schedule(tuple(forward), tuple(backward)))
    except InvalidScheduleError:
        return False
    return True


def runs(graph, steps):
    """Whether the steps can be carried out on a store that really drops what is overwritten."""
    store = {value for value, fact in enumerate(graph.values) if fact.producer is None}
    for op in steps:
        if not store.issuperset(graph.ops[op].inputs):
            return False
        store.update(graph.ops[op].outputs)
    return all(value in store for value in graph.outputs)


@pytest.mark.parametrize("seed", range(40))
def test_removed_and_swapped_steps_are_refused_when_they_matter(seed):
    graph, _ = samples.random_dag(seed, n=10)
    schedule = expand(graph, kept=())
    forward, backward = list(schedule.forward), list(schedule.backward)
    assert is_legal(graph, forward, backward)
    refused = 0
    for index in range(len(backward)):
        fewer = backward[:index] + backward[index + 1 :]
        legal = is_legal(graph, forward, fewer)
        assert legal <= runs(graph, forward + fewer)
        refused += not legal
    for index in range(len(backward) - 1):
        swapped = list(backward)
        swapped[index : index + 2] = reversed(swapped[index : index + 2])
        legal = is_legal(graph, forward, swapped)
        assert legal <= runs(graph, forward + swapped)
        refused += not legal
    assert refused
