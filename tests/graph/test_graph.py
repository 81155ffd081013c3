"""Building, checking, saving and viewing graphs."""

import dataclasses
import json

import pytest
from hypothesis import given, settings

from helpers.strategies import graphs
from lowtide.errors import InvalidGraphError
from lowtide.graph import samples
from lowtide.graph.analysis import cut_points, values_for_backward
from lowtide.graph.build import GraphBuilder
from lowtide.graph.costs import Costs, check_costs
from lowtide.graph.io import costs_from_dict, costs_to_dict, graph_from_dict, graph_to_dict
from lowtide.graph.ir import Graph, Op, Value
from lowtide.graph.verify import check_graph

SAMPLES = {
    "chain": samples.chain(5),
    "training_chain": samples.training_chain(5),
    "skip_chain": samples.skip_chain(9),
    "unet": samples.unet(3),
    "random": samples.random_dag(1),
    "random_without_phases": samples.random_dag(1, phases=False),
}


def one_op(**changes):
    op = dataclasses.replace(Op("f", "f", (0,), (1,)), **changes)
    return Graph((op,), (Value("x", 4), Value("y", 4, 0)), outputs=(1,))


def test_builder_gives_ids_and_costs():
    builder = GraphBuilder()
    x = builder.add_input("x", 400)
    y, s = builder.add_op("norm", [x], [("y", 400), ("s", 4)], seconds=2.0, workspace_bytes=7, once=["s"])
    builder.begin_backward()
    (g,) = builder.add_op("grad", [y], [("g", 400)], kind="gradient")
    graph = builder.build(outputs=[g], handovers=[s])
    assert (x, y, s, g) == (0, 1, 2, 3)
    assert graph.boundary == 1
    assert graph.ops[0].first_run_only == (s,)
    assert list(graph.rewrites[0]) == [y]
    assert graph.values[g].kind == "gradient"
    assert builder.costs() == Costs((2.0, 1.0), (7, 0), "given")


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_keep_the_rules(name):
    graph, costs = SAMPLES[name]
    check_graph(graph)
    check_costs(graph, costs)


def test_samples_are_the_same_every_time():
    assert samples.random_dag(7) == samples.random_dag(7)
    assert samples.random_dag(7) != samples.random_dag(8)
    assert samples.unet(2)[0].fingerprint == samples.unet(2)[0].fingerprint


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (one_op(inputs=(5,)), "names value 5"),
        (one_op(inputs=(-1,)), "names value -1"),
        (one_op(inputs=(1,)), "produces later"),
        (one_op(outputs=()), "not among that op's outputs"),
        (one_op(outputs=(0, 1)), "whose producer is None"),
        (one_op(outputs=(1, 1)), "lists an output twice"),
        (one_op(first_run_only=(0,)), "first_run_only"),
        (one_op(replay_bytes=-1), "replay"),
        (dataclasses.replace(one_op(), boundary=2), "boundary is 2"),
        (dataclasses.replace(one_op(), boundary=-1), "boundary is -1"),
        (dataclasses.replace(one_op(), outputs=(9,)), "list of outputs names value 9"),
        (dataclasses.replace(one_op(), outputs=(1, 1)), "twice"),
        (dataclasses.replace(one_op(), handovers=(9,)), "list of handovers names value 9"),
        (dataclasses.replace(one_op(), handovers=(1,), boundary=0), "handed over"),
        (dataclasses.replace(one_op(), values=(Value("x", 4), Value("y", -4, 0))), "-4 bytes"),
        (dataclasses.replace(one_op(), values=(Value("x", 4), Value("y", 4, 3))), "produced by op 3"),
        (Graph((Op("f", "f", (), ()), Op("f", "f", (), ())), ()), "Two ops are named 'f'"),
    ],
)
def test_broken_graphs_are_refused(graph, message):
    with pytest.raises(InvalidGraphError, match=message):
        check_graph(graph)


@pytest.mark.parametrize(
    "costs",
    [
        Costs((1.0,), ()),
        Costs((), ()),
        Costs((-1.0,), (0,)),
        Costs((float("nan"),), (0,)),
        Costs((float("inf"),), (0,)),
        Costs((1.0,), (-1,)),
    ],
)
def test_broken_costs_are_refused(costs):
    with pytest.raises(InvalidGraphError):
        check_costs(one_op(), costs)


@settings(max_examples=100, deadline=None)
@given(graphs())
def test_json_round_trip(sample):
    graph, costs = sample
    text = json.dumps([graph_to_dict(graph), costs_to_dict(costs)])
    graph_data, costs_data = json.loads(text)
    again = graph_from_dict(graph_data)
    assert again == graph
    assert again.fingerprint == graph.fingerprint
    assert costs_from_dict(costs_data, again) == costs


def _set(data, path, item):
    for key in path[:-1]:
        data = data[key]
    data[path[-1]] = item


@pytest.mark.parametrize(
    ("path", "item"),
    [
        (["schema"], 2),
        (["ops"], "f"),
        (["ops", 0], None),
        (["ops", 0, "inputs"], [0.5]),
        (["ops", 0, "inputs"], [True]),
        (["ops", 0, "inputs"], [99]),
        (["ops", 0, "name"], 3),
        (["ops", 0, "random"], "yes"),
        (["ops", 0, "surprise"], 1),
        (["values", 0, "bytes"], -1),
        (["values", 0, "bytes"], 2**61),
        (["values", 0, "bytes"], 1e3),
        (["values", 1, "producer"], "f"),
        (["boundary"], 99),
        (["outputs"], {"0": 1}),
        (["outputs"], [10**9]),
    ],
)
def test_hostile_graph_data_is_refused(path, item):
    data = graph_to_dict(samples.training_chain(2)[0])
    _set(data, path, item)
    with pytest.raises(InvalidGraphError):
        graph_from_dict(data)


@pytest.mark.parametrize("data", [None, [], "graph", {}, {"schema": 1}])
def test_things_that_are_no_graph_are_refused(data):
    with pytest.raises(InvalidGraphError):
        graph_from_dict(data)


@pytest.mark.parametrize("seconds", [[1.0], ["1"] * 5, [float("nan")] * 5, [-1.0] * 5, [True] * 5, None])
def test_hostile_costs_are_refused(seconds):
    graph, costs = samples.training_chain(2)
    with pytest.raises(InvalidGraphError):
        costs_from_dict(costs_to_dict(costs) | {"seconds": seconds}, graph)


def test_every_layer_of_a_chain_is_a_cut():
    graph, _ = samples.training_chain(4)
    assert cut_points(graph) == ((0, 1), (1, 2), (2, 3))
    assert values_for_backward(graph) == (1, 2, 3, 4)


def test_a_skip_hides_the_cuts_it_spans():
    graph, _ = samples.skip_chain(6, skip=3)
    ops = [graph.ops[op].name for op, _ in cut_points(graph)]
    # The first addition reads an input of the graph, which is always there; the second reads what the first made.
    assert ops == ["layer0.f", "layer1.f", "layer2.f", "layer2.add"]


def test_inputs_do_not_spoil_cuts():
    builder = GraphBuilder()
    x, w = builder.add_input("x", 1), builder.add_input("w", 1)
    (a,) = builder.add_op("a", [x, w], [("a", 1)])
    (b,) = builder.add_op("b", [a, w, x], [("b", 1)])
    builder.add_op("c", [b, w, x], [("c", 1)])
    assert cut_points(builder.build()) == ((0, a), (1, b))
