"""The online runtime of dtr: its evicted neighbourhoods against their definition, and the figures of its authors."""

import json
import random

import pytest
from hypothesis import HealthCheck, given, settings

from helpers.paths import published_graph
from helpers.strategies import problems
from lowtide.errors import InfeasibleBudgetError, InvalidOptionError
from lowtide.graph import samples
from lowtide.graph.build import GraphBuilder
from lowtide.plan.core.problem import Problem
from lowtide.plan.planners.brute_force import BruteForce
from lowtide.plan.planners.dtr import Closures, Components, Dtr, Links, OwnCosts, run_online
from lowtide.plan.solve import solve
from lowtide.schedule.steps import Schedule
from lowtide.schedule.verify import verify

HEURISTICS = ("dtr", "dtr_eq", "local", "lru", "size")


def links_of(graph, costs):
    return Links(
        seconds=costs.seconds,
        producer=[-1 if value.producer is None else value.producer for value in graph.values],
        reads=[[u for u in op.inputs if graph.values[u].producer is not None] for op in graph.ops],
        writes=[op.outputs for op in graph.ops],
        readers=graph.readers,
    )


def ops_to_run(links, out, op):
    """Return the ops that must run so that `op` has run, by the definition."""
    found = {op}
    for value in links.reads[op]:
        if value in out:
            found |= ops_to_run(links, out, links.producer[value])
    return found


def ops_that_need(links, out, value):
    """Return the ops with a value in `out` that need `value` to run again, by the definition."""
    found = set()
    for op in links.readers[value]:
        lost = [made for made in links.writes[op] if made in out]
        if lost:
            found.add(op)
            for made in lost:
                found |= ops_that_need(links, out, made)
        # What reads a value of `op` that is there does not need `value`.
    return found


def exact_cost(links, out, value):
    ops = ops_to_run(links, out, links.producer[value]) | ops_that_need(links, out, value)
    return sum(links.seconds[op] for op in ops)


def joined_cost(links, out, value):
    """Return the own seconds of `value` and those of all evicted ops connected to it, whatever the direction."""
    out_ops = {links.producer[each] for each in out}

    def near(op):
        above = {links.producer[u] for u in links.reads[op] if u in out}
        below = {reader for made in links.writes[op] if made in out for reader in links.readers[made]}
        return (above | below) & out_ops

    own = links.producer[value]
    stack = [links.producer[u] for u in links.reads[own] if u in out]
    stack += [reader for reader in links.readers[value] if reader in out_ops]
    found = set()
    while stack:
        op = stack.pop()
        if op not in found:
            found.add(op)
            stack += near(op)
    return links.seconds[own] + sum(links.seconds[op] for op in found)


def single_output_dag(seed, n=14):
    rng = random.Random(seed)
    builder = GraphBuilder()
    values = []
    for k in range(n):
        inputs = rng.sample(values[-5:], min(len(values), rng.randint(0, 3)))
        values += builder.add_op(f"op{k}", inputs, [(f"v{k}", 1)], seconds=float(rng.randint(1, 50)))
    return builder.build(), builder.costs()


class Costs:
    """The newest costs that a neighbourhood has told of."""

    def __init__(self, kind, links, num_values):
        self.neighbourhood = kind(links)
        self.there = [False] * num_values
        self.known = {}
        for op, made in enumerate(links.writes):
            self.restore(op, made)

    def restore(self, op, made):
        for value in made:
            self.there[value] = True
        self.neighbourhood.restore(op, made)

    def evict(self, value):
        self.there[value] = False
        self.neighbourhood.evict(value)

    def update(self):
        self.known.update(self.neighbourhood.changed(self.there))
        return {value: self.known[value] for value, there in enumerate(self.there) if there}


@pytest.mark.parametrize("seed", range(60))
def test_closures_equal_their_definition_at_all_times(seed):
    graph, costs = samples.random_dag(seed, n=14, phases=False)
    links, rng = links_of(graph, costs), random.Random(seed)
    held = Costs(Closures, links, len(graph.values))
    out = set()
    for _ in range(40):
        there = [value for value, is_there in enumerate(held.there) if is_there]
        if out and rng.random() < 0.4:
            op = links.producer[rng.choice(sorted(out))]
            back = [value for value in links.writes[op] if value in out]
            held.restore(op, back)
            out.difference_update(back)
        elif there:
            value = rng.choice(there)
            held.evict(value)
            out.add(value)
        if rng.random() < 0.5:
            assert held.update() == {
                value: exact_cost(links, out, value) for value, is_there in enumerate(held.there) if is_there
            }


@pytest.mark.parametrize("seed", range(60))
def test_components_join_all_that_is_evicted_side_by_side(seed):
    graph, costs = single_output_dag(seed)
    links, rng = links_of(graph, costs), random.Random(seed)
    held = Costs(Components, links, len(graph.values))
    out = set()
    for value in rng.sample(range(len(graph.values)), 10):
        held.evict(value)
        out.add(value)
        expected = {each: joined_cost(links, out, each) for each, there in enumerate(held.there) if there}
        assert held.update() == pytest.approx(expected)


def test_a_component_is_not_split():
    graph, costs = samples.chain(6)
    links = links_of(graph, costs)
    components, closures = (Costs(kind, links, len(graph.values)) for kind in (Components, Closures))
    first, *middle, last = (value for value in range(len(graph.values)) if graph.values[value].producer is not None)
    for held in (components, closures):
        for value in middle:
            held.evict(value)
        held.restore(graph.values[middle[1]].producer, [middle[1]])
    # Of four evicted ops the second is back: one is left before it and two after it, all still in one component.
    assert components.update() == {first: 4, middle[1]: 4, last: 4}
    assert closures.update() == {first: 2, middle[1]: 4, last: 3}


def test_own_costs_know_no_neighbours():
    graph, costs = samples.chain(4)
    held = Costs(OwnCosts, links_of(graph, costs), len(graph.values))
    held.evict(2)
    assert held.update() == {1: 1, 3: 1, 4: 1}


def test_a_definition_can_be_missed():
    graph, costs = samples.chain(4)
    links = links_of(graph, costs)
    assert exact_cost(links, {2}, 3) == joined_cost(links, {2}, 3) == 2
    assert exact_cost(links, set(), 3) == 1


@pytest.mark.parametrize("heuristic", HEURISTICS)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(problem=problems(max_ops=7))
def test_schedules_are_legal_and_keep_first_runs_in_order(heuristic, problem):
    for threshold in (1, problem.budget_bytes, problem.baseline.peak_bytes):
        schedule = run_online(problem, threshold, heuristic=heuristic)
        verify(problem.graph, schedule)
        assert list(dict.fromkeys(schedule.steps)) == list(range(len(problem.graph.ops)))


@pytest.mark.parametrize("heuristic", HEURISTICS)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(problem=problems(max_ops=6))
def test_never_better_than_brute_force(heuristic, problem):
    best = BruteForce().propose(problem)
    trace = problem.price(Dtr(heuristic=heuristic).propose(problem).schedule)
    if not best.optimal:
        assert not problem.fits(trace)
    elif problem.fits(trace):
        assert trace.seconds >= problem.price(best.schedule).seconds - 1e-9


@pytest.mark.parametrize("heuristic", HEURISTICS)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(problem=problems(max_ops=7, marks=False))
def test_nothing_is_evicted_while_all_fits(heuristic, problem):
    schedule = run_online(problem, problem.baseline.peak_bytes, heuristic=heuristic)
    assert schedule == Schedule.keep_all(problem.graph)


def test_the_least_recently_used_value_goes_first():
    graph, costs = samples.training_chain(4)
    # Three values fit; v0 has waited longest when the fourth is made, so it alone is recomputed.
    schedule = run_online(Problem(graph, costs, 400), 400, heuristic="lru")
    assert schedule.forward == (0, 1, 2, 3)
    assert schedule.backward == (4, 5, 6, 0, 7, 8)


def test_the_largest_value_goes_first():
    builder = GraphBuilder()
    values = [builder.add_op(f"f{k}", [], [(f"v{k}", size)])[0] for k, size in enumerate((100, 200, 100, 100))]
    builder.begin_backward()
    for value in (0, 2, 3, 1):
        builder.add_op(f"b{value}", [values[value]], [(f"g{value}", 1)])
    graph, costs = builder.build(), builder.costs()
    schedule = run_online(Problem(graph, costs, 450), 450, heuristic="size")
    assert schedule.backward == (4, 5, 6, 1, 7)


def test_the_cheapest_value_goes_first():
    graph, costs = samples.training_chain(4, seconds=[50, 1, 50, 50])
    schedule = run_online(Problem(graph, costs, 400), 400, heuristic="local")
    assert [op for op in graph.forward if schedule.steps.count(op) > 1] == [1]


def test_recomputation_is_recursive_and_happens_in_forward_too():
    builder = GraphBuilder()
    values = [builder.add_input("x")]
    for k in range(4):
        values += builder.add_op(f"f{k}", [values[-1]], [(f"v{k}", 100)])
    (late,) = builder.add_op("late", [values[-1], values[2]], [("late", 100)])
    builder.begin_backward()
    builder.add_op("b", [late], [("g", 100)])
    graph, costs = builder.build(outputs=[late + 1]), builder.costs()
    schedule = run_online(Problem(graph, costs, 300), 299, heuristic="dtr")
    verify(graph, schedule)
    assert schedule.forward.count(0) == schedule.forward.count(1) == 2


def test_it_says_when_it_is_stuck():
    graph, costs = samples.training_chain(12)
    with pytest.raises(InfeasibleBudgetError) as caught:
        solve(Problem(graph, costs, 250), Dtr())
    least = caught.value.least_bytes
    assert solve(Problem(graph, costs, least), Dtr()).peak_bytes <= least


def test_thrashing_ends():
    graph, costs = samples.skip_chain(200)
    schedule = run_online(Problem(graph, costs, 1), 1, heuristic="local", thrash=1.5)
    verify(graph, schedule)
    assert len(schedule.steps) < 20 * len(graph.ops)


@pytest.mark.parametrize("heuristic", HEURISTICS)
def test_same_schedule_every_time(heuristic):
    graph, costs = samples.unet(4)
    problem = Problem(graph, costs, Problem(graph, costs, 1).baseline.peak_bytes * 7 // 10)
    planner = Dtr(heuristic=heuristic)
    assert planner.propose(problem).schedule == planner.propose(problem).schedule


@pytest.mark.parametrize("options", [{"heuristic": "best"}, {"thrash": 0.5}, {"thrash": float("inf")}])
def test_nonsense_is_refused(options):
    with pytest.raises(InvalidOptionError):
        Dtr(**options)


def checkmate_graph(path):
    """Return one of Checkmate's graphs in the order of its generations."""
    data = json.loads(path.read_text())
    nodes = {node["id"]: node for node in data["nodes"]}
    before = {node: [] for node in nodes}
    for link in data["links"]:
        before[link["target"]].append(link["source"])
    builder, made = GraphBuilder(), {}
    while len(made) < len(nodes):
        for node in [n for n in nodes if n not in made and all(u in made for u in before[n])]:
            (made[node],) = builder.add_op(
                nodes[node]["name"],
                [made[u] for u in before[node]],
                [(f"v{node}", nodes[node]["cost_ram"])],
                seconds=float(nodes[node]["cost_cpu"]),
            )
    return builder.build(), builder.costs()


@pytest.mark.parametrize("heuristic", ["dtr", "dtr_eq"])
@pytest.mark.parametrize(
    ("name", "percent", "increase"), [("vgg16", 90, 1.968), ("vgg_unet", 80, 3.419), ("vgg_unet", 50, 7.450)]
)
def test_it_reaches_what_the_simulator_of_its_authors_reaches(name, percent, increase, heuristic):
    graph, costs = checkmate_graph(published_graph(f"checkmate_{name}_train.json"))
    peak = Problem(graph, costs, 1).baseline.peak_bytes
    plan = solve(Problem(graph, costs, peak * percent // 100), Dtr(heuristic=heuristic))
    assert 100 * plan.overhead == pytest.approx(increase, abs=5e-4)


def test_it_plans_a_deep_transformer():
    graph, costs = samples.transformer(24)
    assert 850 < len(graph.ops) < 1000
    gradients = [graph.values[value] for value in graph.outputs]
    assert len(gradients) == 24 * 6
    peak = Problem(graph, costs, 1).baseline.peak_bytes
    plan = solve(Problem(graph, costs, peak // 2), Dtr())
    assert 0 < plan.overhead < 0.2
