"""Independent segments: published golden values, plain versions of every part, and the two planners."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.division_oracles import (
    cheapest_cut,
    cheapest_division,
    check_closed,
    plain_shape,
    random_dag,
    random_nest,
    shape_of,
)
from helpers.paths import published_graph
from helpers.strategies import examples, problems
from lowtide.errors import InvalidGraphError, InvalidOptionError
from lowtide.graph import samples
from lowtide.graph.build import GraphBuilder
from lowtide.graph.costs import Costs
from lowtide.plan.core.problem import Problem
from lowtide.plan.planners.feng import Feng, Solver
from lowtide.plan.planners.feng_chain import FengChain
from lowtide.plan.planners.feng_division.chain import Row, cut, solve_chain
from lowtide.plan.planners.feng_division.multigraph import Multigraph, tensor_view_of, topological_order
from lowtide.plan.planners.feng_division.terms import Terms, spread
from lowtide.plan.planners.feng_division.tree import divide
from lowtide.plan.solve import solve
from lowtide.schedule.verify import verify

PLANNERS = (Feng(), FengChain(), Feng(plans=0), Feng(plans=0, count_all=True), FengChain(plans=0), Feng(plans=5))


# --- chains -----------------------------------------------------------------------------------------------------------


def vgg19(batch=32):
    """Return the bytes of every tensor of VGG-19, from the image to the loss."""

    def size(channels, side):
        return 4 * batch * channels * side * side

    sizes, side = [size(3, 224)], 224
    for channels, convolutions in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
        sizes += [size(channels, side)] * (2 * convolutions)  # each with its rectifier
        side //= 2
        sizes.append(size(channels, side))
    sizes.append(sizes[-1])  # reshaped for the first of three dense layers; two have a rectifier and dropout
    return [*sizes, *[size(4096, 1)] * 6, size(1000, 1), 4]


def test_vgg19_as_a_chain():
    sizes = vgg19()
    assert len(sizes) == 47
    found = solve_chain(sizes)
    assert (found.total, found.max_term, found.checkpoints) == (1_412_956_160, 822_083_584, (3, 5, 10, 19))


@pytest.mark.parametrize(("n", "total", "max_term"), [(10, 4, 2), (26, 8, 4), (50, 12, 6), (101, 18, 9)])
def test_unit_chains(n, total, max_term):
    found = solve_chain([1] * n)
    assert (found.total, found.max_term) == (total, max_term)
    assert len(found.checkpoints) == total - max_term


def random_row(rng, longest=11):
    n = rng.randint(2, longest)
    stored = [rng.randint(0, 12) for _ in range(n)]
    inside = stored if rng.random() < 0.5 else [rng.randint(0, 12) for _ in range(n)]
    between = [0] * (n - 1) if rng.random() < 0.5 else [rng.choice((0, 0, 1, 3, 40)) for _ in range(n - 1)]
    return Row(tuple(stored), tuple(inside), tuple(between))


def test_chains_against_every_subset():
    rng = random.Random(1)
    for _ in range(1500):
        row = random_row(rng)
        found = solve_chain(row.stored, inside=row.inside, between=row.between)
        assert found.total == cheapest_cut(row.stored, row.inside, row.between)
        borders = [0, *found.checkpoints, len(row.stored) - 1]
        costs = [sum(row.inside[a + 1 : b]) + sum(row.between[a:b]) for a, b in pairwise(borders)]
        assert found.max_term == max(costs)
        assert found.total == sum(row.stored[k] for k in found.checkpoints) + max(costs)


def test_the_comparison_with_every_subset_can_fail():
    assert cheapest_cut([1] * 10, [1] * 10, [0] * 9) == 4 < 5 == sum([1, 1]) + 3


def test_search_skips_thresholds_but_no_better_answer():
    rng = random.Random(2)
    for n in (30, 60, 90):
        sizes = [rng.randint(1, 1000) for _ in range(n)]
        row = Row(tuple(sizes), tuple(sizes), (0,) * (n - 1))
        limits = Terms([(row.before, row.counted)]).all()
        expected = min((limit + cut(row, limit)[0], limit) for limit in limits)
        found = solve_chain(sizes)
        assert (found.total, found.max_term) == expected


@pytest.mark.parametrize(
    ("stored", "more"),
    [([1], {}), ([], {}), ([1, -1, 1], {}), ([1, 1], {"inside": [1]}), ([1, 1], {"between": [1, 1]})],
)
def test_nonsense_chains_are_refused(stored, more):
    with pytest.raises(InvalidGraphError):
        solve_chain(stored, **more)


# --- thresholds -------------------------------------------------------------------------------------------------------


def test_neighbouring_terms_are_those_of_the_full_list():
    rng = random.Random(3)
    for _ in range(200):
        rows = [random_row(rng, 6) for _ in range(rng.randint(1, 4))]
        terms = Terms([(row.before, row.counted) for row in rows])
        listed = {
            row.before[b] - row.before[a] - row.counted[a]
            for row in rows
            for b in range(len(row.stored))
            for a in range(b)
        } - {0}
        assert terms.all() == sorted(listed)
        for limit in range(terms.largest + 3):
            assert terms.at_most(limit) == max((term for term in listed if term <= limit), default=0)
            assert terms.above(limit) == min((term for term in listed if term > limit), default=None)


def test_spread_plans_are_different_and_few():
    sizes = [random.Random(4).randint(1, 100) for _ in range(60)]
    row = Row(tuple(sizes), tuple(sizes), (0,) * 59)
    terms = Terms([(row.before, row.counted)])
    every = spread(terms, lambda limit: cut(row, limit), 10**6)
    assert len(every) == len({cut(row, limit)[0] for limit in [0, *terms.all()]})
    some = spread(terms, lambda limit: cut(row, limit), 9)
    assert 5 <= len(some) <= 9
    assert len({tuple(plan) for plan in some}) == len(some)
    assert some[-1] == []


# --- the division tree ------------------------------------------------------------------------------------------------


def random_graphs(count):
    rng = random.Random(5)
    for k in range(count):
        if k % 2:
            yield random_nest(rng, rng.randint(1, 3))
        else:
            yield random_dag(rng, rng.randint(2, 14), rng.choice((0.05, 0.15, 0.25, 0.5)))


def test_tree_is_the_one_that_its_definition_gives():
    kinds = Counter()
    for graph in random_graphs(400):
        tree = divide(graph)
        kinds += tree.kinds
        assert shape_of(tree) == plain_shape(graph)
    assert min(kinds.values()) > 50
    assert len(kinds) == 4


def test_tree_partitions_the_edges_into_closed_sets():
    for graph in random_graphs(300):
        tree = divide(graph)
        for number, node in enumerate(tree.nodes):
            edges = sorted(tree.edges(number))
            below = sorted(edge for child in node.children for edge in tree.edges(child))
            assert below == (edges if node.children else [])
            check_closed(graph, edges, node.source, node.target)
            vertices = {vertex for edge in edges for vertex in graph.edges[edge]} - {node.source, node.target}
            assert node.cost == sum(graph.inside[vertex] for vertex in vertices)


def test_the_check_for_closed_sets_can_fail():
    graph = Multigraph(((0, 1), (1, 2), (1, 3), (2, 3)), (1,) * 4, (1,) * 4, 0, 3)
    check_closed(graph, [1, 2, 3], 1, 3)
    for edges, source, target in (([0, 1], 0, 2), ([1, 2], 1, 3), ([0, 1, 3], 0, 3)):
        with pytest.raises(AssertionError):
            check_closed(graph, edges, source, target)


def test_solver_finds_the_best_of_all_choices():
    compared = 0
    for graph in random_graphs(400):
        if len(graph) > 11:
            continue
        compared += 1
        solver = Solver(graph)
        found = solver.best()
        assert found.total == cheapest_division(solver.tree)
    assert compared > 150


def test_segments_are_closed_and_cost_what_the_answer_says():
    for graph in random_graphs(300):
        solver = Solver(graph)
        found = solver.best()
        kept = {*found.division.checkpoints, graph.source, graph.target}
        covered, costs = [], [0]
        for segment in found.division.segments:
            edges = [edge for number in segment.nodes for edge in solver.tree.edges(number)]
            check_closed(graph, edges, segment.source, segment.target)
            assert {segment.source, segment.target} <= kept
            inner = {vertex for edge in edges for vertex in graph.edges[edge]} - {segment.source, segment.target}
            assert not inner & kept
            costs.append(sum(graph.inside[vertex] for vertex in inner))
            covered += edges
        assert sorted(covered) == list(range(len(graph.edges)))
        assert found.max_term >= max(costs)
        assert found.total == found.max_term + sum(graph.stored[vertex] for vertex in found.division.checkpoints)


def test_more_room_never_keeps_more():
    for graph in random_graphs(60):
        solver = Solver(graph)
        costs = [solver.at(limit)[0] for limit in [0, *solver.terms.all()]]
        assert costs == sorted(costs, reverse=True)


@pytest.mark.parametrize("n", [2, 3, 50, 3000])
def test_a_chain_is_divided_into_its_edges(n):
    graph = Multigraph(tuple((k, k + 1) for k in range(n - 1)), (1,) * n, (1,) * n, 0, n - 1)
    assert divide(graph).kinds == Counter(leaf=n - 1, linear=1) if n > 2 else Counter(leaf=1)
    found = Solver(graph).best()
    chain = solve_chain([1] * n)
    assert (found.total, found.division.checkpoints) == (chain.total, chain.checkpoints)


def test_deep_nests_do_not_exhaust_the_stack():
    n = 400  # every vertex of the way down is read again on the way up
    edges = [(k, k + 1) for k in range(2 * n - 1)] + [(k, 2 * n - 1 - k) for k in range(n - 1)]
    graph = Multigraph(tuple(edges), (1,) * (2 * n), (1,) * (2 * n), 0, 2 * n - 1)
    assert divide(graph).kinds["branch"] == n - 1


@pytest.mark.parametrize(
    "graph",
    [
        Multigraph(((0, 1), (1, 2), (2, 1)), (1,) * 3, (1,) * 3, 0, 2),
        Multigraph(((0, 2), (1, 2)), (1,) * 3, (1,) * 3, 0, 2),
        Multigraph(((0, 1), (0, 2)), (1,) * 3, (1,) * 3, 0, 2),
        Multigraph(((0, 1), (1, 2)), (1,) * 3, (1,) * 3, 0, 1),
        Multigraph(((0, 1),), (1, -1), (1, 1), 0, 1),
        Multigraph(((0, 1),), (1, 1), (1,), 0, 1),
        Multigraph(((0, 3),), (1, 1), (1, 1), 0, 1),
        Multigraph((), (1,), (1,), 0, 0),
    ],
)
def test_nonsense_graphs_are_refused(graph):
    with pytest.raises(InvalidGraphError):
        divide(graph)


# --- the authors' solver on published graphs --------------------------------------------------------------------------


def read_graph(name):
    """Return a published graph of tensors, its image as source."""
    lines = iter(published_graph(f"kusumoto_{name}.txt").read_text().splitlines())
    variables, functions = map(int, next(lines).split())
    rows = [next(lines).split(" ", 2) for _ in range(variables)]
    sizes = {int(number): int(size) for number, size, _ in rows}
    vertices = [int(number) for number, _, kind in rows if kind == "0"]
    calls = []
    for _ in range(functions):
        phase = next(lines)
        reads, writes = map(int, next(lines).split())
        inputs = [int(next(lines).split()[0]) for _ in range(reads)]
        outputs = [int(next(lines)) for _ in range(writes)]
        next(lines), next(lines)
        if phase == "forward":
            vertices += outputs
            calls.append((inputs, outputs))
    place = {variable: k for k, variable in enumerate(vertices)}
    edges = [(place[u], place[v]) for inputs, outputs in calls for u in inputs if u in place for v in outputs]
    costs = tuple(sizes[variable] for variable in vertices)
    (target,) = set(range(len(vertices))) - {tail for tail, _ in edges}
    return Multigraph(tuple(edges), costs, costs, 0, target)


@pytest.mark.parametrize(
    ("name", "kinds", "terms", "megabytes", "checkpoints", "segments", "share"),
    [
        ("vgg19", (1, 0, 0), 592, (1413.0, 822.1, 590.9), 4, 5, 0.353),
        ("unet", (9, 4, 0), 313, (4422.4, 1991.5, 2430.9), 5, 8, 0.375),
        ("resnet50", (21, 16, 0), 492, (976.2, 475.3, 501.0), 9, 11, 0.212),
        ("googlenet", (41, 9, 1), 275, (354.4, 257.7, 96.7), 6, 9, 0.278),
    ],
)
def test_published_graphs(name, kinds, terms, megabytes, checkpoints, segments, share):
    graph = read_graph(name)
    solver = Solver(graph)
    found = solver.best()
    assert tuple(solver.tree.kinds[kind] for kind in ("linear", "branch", "complicated")) == kinds
    assert len(solver.terms.all()) == terms
    stored = found.total - found.max_term
    assert tuple(round(size / 1e6, 1) for size in (found.total, found.max_term, stored)) == megabytes
    assert (len(found.division.checkpoints), len(found.division.segments)) == (checkpoints, segments)
    assert round(found.total / solver.tree.nodes[0].cost, 3) == share


def test_vgg19_of_the_layer_list_is_the_published_one():
    graph = read_graph("vgg19")
    order = topological_order(graph)
    assert [graph.stored[vertex] for vertex in order] == vgg19()


# --- the view of a training graph -------------------------------------------------------------------------------------


def edges_by_name(view):
    names = ["source", *(view.graph.ops[op].name for op in view.ops), "target"]
    return {(names[tail], names[head]) for tail, head in view.tensors.edges}


def test_view_of_a_chain():
    view = tensor_view_of(samples.training_chain(3)[0])
    # Backward begins with the last value, which so is needed like any other.
    assert edges_by_name(view) == {("source", "f0"), ("f0", "f1"), ("f1", "f2"), ("f2", "target")}
    assert view.tensors.stored == (0, 100, 100, 100, 0)


def build(forward, *, reads, held=(), pinned=()):
    """Return a graph of ops given as {name: inputs}, and a backward op that reads `reads`."""
    builder = GraphBuilder()
    made = {"x": builder.add_input("x", 8)}
    for name, inputs in forward.items():
        why = "it prints" if name in pinned else ""
        (made[name],) = builder.add_op(name, [made[each] for each in inputs], [(name, 10)], pinned=why)
    builder.begin_backward()
    (gradient,) = builder.add_op("b", [made[name] for name in reads], [("g", 1)], kind="gradient")
    return builder.build(outputs=[gradient, *(made[name] for name in held)])


def test_late_roots_and_early_ends_lie_beside_an_edge():
    graph = build(
        {"a": ["x"], "b0": ["a"], "weight": ["x"], "c": ["b0", "weight"], "head": ["b0"], "d": ["c"]},
        reads=["a", "b0", "weight", "c", "head", "d"],
    )
    assert edges_by_name(tensor_view_of(graph)) == {
        ("source", "a"),
        ("a", "b0"),
        ("b0", "weight"),
        ("weight", "c"),
        ("b0", "c"),
        ("b0", "head"),
        ("head", "weight"),
        ("c", "d"),
        ("d", "target"),
    }


def test_view_leaves_out_what_is_always_there_and_what_nobody_needs():
    graph = build(
        {"a": ["x"], "print": ["a"], "b0": ["print", "a"], "out": ["b0"], "statistic": ["b0"], "c": ["out"]},
        reads=["a", "print", "b0", "out", "c"],
        held=["out"],
        pinned=["print"],
    )
    # Nothing ties c to what comes before but "out", which is always there; so c follows the end before it.
    assert edges_by_name(tensor_view_of(graph)) == {
        ("source", "a"),
        ("a", "b0"),
        ("b0", "c"),
        ("c", "target"),
    }


def test_values_that_backward_does_not_read_cost_nothing_inside():
    graph = build({"a": ["x"], "b0": ["a"], "c": ["b0"]}, reads=["a", "c"])
    assert tensor_view_of(graph).tensors.inside == (0, 10, 0, 10, 0)
    assert tensor_view_of(graph).tensors.stored == (0, 10, 10, 10, 0)
    assert tensor_view_of(graph, count_all=True).tensors.inside == (0, 10, 10, 10, 0)


def test_view_of_a_backward_that_needs_nothing():
    view = tensor_view_of(build({"a": ["x"]}, reads=["x"]))
    assert edges_by_name(view) == {("source", "target")}
    assert Solver(view.tensors).best().total == 0


@settings(max_examples=examples(200), deadline=None, suppress_health_check=list(HealthCheck))
@given(problems(max_ops=10), st.booleans())
def test_view_has_one_source_and_one_target_and_real_edges(problem, count_all):
    graph = problem.graph
    if graph.boundary is None:
        return
    view = tensor_view_of(graph, count_all=count_all)
    order = topological_order(view.tensors)
    assert (order[0], order[-1]) == (0, len(order) - 1)
    edges = set(view.tensors.edges)
    vertex = {op: k for k, op in enumerate(view.ops, 1)}
    for op in view.ops:
        for value in graph.ops[op].inputs:
            producer = graph.values[value].producer
            if producer in vertex and not graph.ops[producer].first_run_only and value not in graph.held:
                assert (vertex[producer], vertex[op]) in edges


@pytest.mark.parametrize("seed", [6, 26, 45, 53, 81, 87, 171, 197])
def test_ties_make_no_cycle(seed):
    # Graphs with many beginnings in the middle, of which one was once put behind what it leads to.
    view = tensor_view_of(samples.random_dag(seed, n=60 + seed % 100, reach=2 + seed % 5)[0])
    assert len(topological_order(view.tensors)) == len(view.ops) + 2


def test_a_conversion_far_before_its_use_does_not_hide_cut_points():
    layers = {f"layer{k}": [f"layer{k - 1}", f"weight{k}"] for k in range(1, 9)}
    graph = build(
        {"layer0": ["x"]} | {f"weight{k}": ["x"] for k in range(1, 9)} | layers,
        reads=["layer0", *layers, *(f"weight{k}" for k in range(1, 9))],
    )
    tree = divide(tensor_view_of(graph).tensors)
    root = tree.nodes[0]
    assert root.kind == "linear"
    assert len(root.division) == 9


# --- planners ---------------------------------------------------------------------------------------------------------


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(problems(max_ops=9))
def test_planners_keep_their_promises(problem):
    for planner in PLANNERS:
        if planner.supports(problem) is not None:
            continue
        proposal = planner.propose(problem)
        verify(problem.graph, proposal.schedule)
        assert proposal == planner.propose(problem)
        assert max(Counter(proposal.schedule.steps).values(), default=0) <= 2
        trace = problem.price(proposal.schedule)
        if planner.plans and not problem.fits(trace):
            again = Problem(problem.graph, problem.costs, max(1, trace.peak_bytes))
            assert again.fits(again.price(planner.propose(again).schedule))


@pytest.mark.parametrize("seed", range(40))
def test_planners_on_random_joint_graphs(seed):
    graph, costs = samples.random_dag(seed, n=40 + seed, reach=3 + seed % 5)
    peak = Problem(graph, costs, 1).baseline.peak_bytes
    for planner in PLANNERS:
        for share in (100, 70, 1):
            problem = Problem(graph, costs, max(1, peak * share // 100))
            if planner.supports(problem) is None:
                verify(graph, planner.propose(problem).schedule)


@pytest.mark.parametrize("planner", [Feng(plans=0), Feng(plans=0, count_all=True), FengChain(plans=0)])
def test_the_papers_answer_on_a_chain(planner):
    graph, costs = samples.training_chain(24)
    plan = solve(Problem(graph, costs, 10**9), planner)
    # 26 vertices with source and target: checkpoints at 5, 10, 15, 20 and what follows the last one.
    assert plan.saved_bytes == 100 * (4 + 4)
    assert sorted(Counter(plan.schedule.steps).items()) == [
        (op, 2 if op < 19 and op % 5 != 4 else 1) for op in range(len(graph.ops))
    ]


@pytest.mark.parametrize(("graph", "costs"), [samples.unet(5), samples.skip_chain(30), samples.training_chain(40)])
def test_budget_decides_among_the_plans(graph, costs):
    peak = Problem(graph, costs, 1).baseline.peak_bytes
    ample = solve(Problem(graph, costs, peak), Feng())
    assert ample.num_recomputed == 0
    least = solve(Problem(graph, costs, 1), Feng(), throw=False)
    pure = solve(Problem(graph, costs, 1), Feng(plans=0), throw=False)
    assert least.peak_bytes <= pure.peak_bytes < peak
    seconds = []
    for share in range(10):
        budget = least.peak_bytes + (peak - least.peak_bytes) * share // 9
        plan = solve(Problem(graph, costs, budget), Feng())
        assert plan.peak_bytes <= budget
        seconds.append(plan.trace.seconds)
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1]


def test_chain_planner_needs_a_chain():
    graph, costs = samples.random_dag(6, n=8, phases=False)
    assert FengChain().supports(Problem(graph, costs, 10)) is not None
    assert Feng().supports(Problem(graph, costs, 10)) is not None
    whole = build({"a": ["x"]}, reads=["a"])
    assert "cut point" in FengChain().supports(Problem(whole, Costs.unit(whole), 10))


@pytest.mark.parametrize("planner", [Feng, FengChain])
def test_nonsense_options_are_refused(planner):
    with pytest.raises(InvalidOptionError):
        planner(plans=-1)
