"""Chen et al. 2016: mirror counts, static allocator, segments, recursion, and the figures of the paper's networks."""

import math
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.strategies import graphs, schedules
from lowtide.errors import InvalidOptionError
from lowtide.graph import samples
from lowtide.graph.analysis import chain_of
from lowtide.graph.build import GraphBuilder
from lowtide.graph.costs import Costs
from lowtide.plan.core.problem import Problem
from lowtide.plan.planners.chen_greedy import (
    ChenGreedy,
    code_budgets,
    greedy_segments,
    paper_budgets,
    scan_budgets,
)
from lowtide.plan.planners.chen_recursive import ChenRecursive, recursive_levels, recursive_runs
from lowtide.plan.planners.chen_sqrt import ChenSqrt
from lowtide.reproduce.chen import (
    STAGES,
    drop_normalisation,
    extra_time,
    footprint,
    keep_expensive,
    reproduce,
    sublinear,
)
from lowtide.reproduce.chen_networks import lstm, resnet
from lowtide.schedule.arena import InPlace, Reuse, arena_bytes, element_wise_pairs
from lowtide.schedule.expand import expand
from lowtide.schedule.mirror import mirror
from lowtide.schedule.simulate import simulate
from lowtide.schedule.steps import Schedule
from lowtide.schedule.verify import verify

GIB = 2**30
MANY = settings(max_examples=100, deadline=None)


def counts_for(graph, most):
    return (
        st.dictionaries(st.sampled_from(range(graph.num_forward)), st.integers(0, most))
        if graph.forward
        else st.just({})
    )


# Mirror counts


@MANY
@given(st.data(), graphs(max_ops=10))
def test_mirror_counts_of_0_and_1_are_expand(data, sample):
    graph, _ = sample
    counts = data.draw(counts_for(graph, 1))
    kept = {value for op in graph.forward if not counts.get(op) for value in graph.ops[op].outputs}
    assert mirror(graph, counts) == expand(graph, kept)


@MANY
@given(st.data(), graphs(max_ops=10))
def test_kept_values_of_copied_ops_are_expand_too(data, sample):
    graph, _ = sample
    kept = data.draw(st.sets(st.sampled_from(range(len(graph.values)))))
    assert mirror(graph, dict.fromkeys(graph.forward, 1), kept=kept) == expand(graph, kept)


@MANY
@given(st.data(), graphs(max_ops=12))
def test_any_mirror_counts_give_legal_schedules(data, sample):
    graph, costs = sample
    counts = data.draw(counts_for(graph, 4))
    schedule = mirror(graph, counts)
    verify(graph, schedule)
    assert simulate(graph, costs, schedule).seconds >= costs.total_seconds - 1e-9
    for op, runs in Counter(schedule.steps).items():
        assert runs <= 1 + (0 if graph.ops[op].pinned else counts.get(op, 0))


def test_no_counts_are_plain_training():
    graph, _ = samples.unet(3)
    assert mirror(graph, {}) == Schedule.keep_all(graph)


def test_two_levels_by_hand():
    # Layers 0 to 8: every third one from layer 2 keeps its output but the one in the middle, which has one copy; what
    # lies between has two.
    graph, costs = samples.training_chain(9)
    counts = {0: 2, 1: 2, 2: 1, 3: 2, 4: 2, 5: 0, 6: 0, 7: 0, 8: 0}
    steps = [graph.ops[op].name for op in mirror(graph, counts).backward]
    assert steps[:4] == ["loss_grad", "b8", "b7", "b6"]
    # To have the output of layer 4: the first copies of 0, 1, 2, then the second copies of 3 and 4.
    assert steps[4:] == ["f0", "f1", "f2", "f3", "f4", "b5", "b4", "b3", "f0", "f1", "b2", "b1", "b0"]
    assert simulate(graph, costs, mirror(graph, counts)).peak_bytes < 900


def test_two_levels_go_lower_than_one():
    graph, costs = samples.training_chain(64)

    def least(most):
        plans = [recursive_levels([1] * 64, k, most) for k in range(1, 63)]
        schedules = [mirror(graph, dict(enumerate(plan.ends[:-1] + plan.insides[-1:]))) for plan in plans]
        return min(simulate(graph, costs, schedule).peak_bytes for schedule in schedules)

    assert least(2) < least(1) < simulate(graph, costs, Schedule.keep_all(graph)).peak_bytes / 3


def test_pinned_ops_are_never_copied():
    builder = GraphBuilder()
    x = builder.add_input("x", 8)
    (a,) = builder.add_op("a", [x], [("a", 8)], pinned="it has an effect")
    (b,) = builder.add_op("b", [a], [("b", 8)])
    builder.begin_backward()
    (c,) = builder.add_op("c", [a, b], [("c", 8)])
    graph = builder.build(outputs=[c])
    assert mirror(graph, {0: 3, 1: 1}).backward == (1, 2)


@pytest.mark.parametrize("counts", [{0: -1}, {0: 1.5}, {0: True}, {99: 1}, {-1: 1}, {8: 1}])
def test_mirror_refuses_nonsense(counts):
    graph, _ = samples.training_chain(4)
    with pytest.raises(InvalidOptionError):
        mirror(graph, counts)


# The static allocator


def worked_example():
    """Return the paper's second figure: B = sigmoid(A), C = sigmoid(B), F = pool(B), E = pool(C), G = E * F."""
    builder = GraphBuilder()
    a = builder.add_input("A", 4)
    (b,) = builder.add_op("b", [a], [("B", 4)], target="aten.sigmoid.default")
    (c,) = builder.add_op("c", [b], [("C", 4)], target="aten.sigmoid.default")
    (f,) = builder.add_op("f", [b], [("F", 4)], target="aten.max_pool2d_with_indices.default")
    (e,) = builder.add_op("e", [c], [("E", 4)], target="aten.max_pool2d_with_indices.default")
    (g,) = builder.add_op("g", [e, f], [("G", 4)], target="aten.mul.Tensor")
    return builder.build(outputs=[g])


def test_the_papers_worked_example():
    graph = worked_example()
    pairs, plain = element_wise_pairs(graph), Schedule.keep_all(graph)
    # C may not write over B, which F still reads; G writes over E.
    assert [arena_bytes(graph, plain, reuse, in_place=pairs) for reuse in Reuse] == [20, 16, 12]
    # Buffers of B, C and F; E takes that of B.
    assert arena_bytes(graph, plain, Reuse.SHARING) == 12


def without_extras(graph):
    """Return `graph` without generator states, and costs without workspace: the arena counts neither."""
    plain = replace(graph, ops=tuple(replace(op, replay_bytes=0) for op in graph.ops))
    return plain, Costs.unit(plain)


def every_pair(graph):
    return InPlace({k: tuple((i, o) for i in op.inputs for o in op.outputs) for k, op in enumerate(graph.ops)})


@MANY
@given(st.data(), graphs(max_ops=9))
def test_each_strategy_needs_at_most_the_one_before_and_at_least_what_is_alive(data, sample):
    graph, costs = without_extras(sample[0])
    schedule = data.draw(schedules(graph))
    trace = simulate(graph, costs, schedule)
    pairs = data.draw(st.sampled_from((InPlace(), every_pair(graph))))
    none, in_place, sharing = (arena_bytes(graph, schedule, reuse, in_place=pairs) for reuse in Reuse)
    assert none >= in_place >= sharing >= max(trace.bytes_after, default=0)
    assert arena_bytes(graph, schedule) >= trace.peak_bytes


@MANY
@given(st.data(), graphs(max_ops=9))
def test_with_equal_sizes_sharing_needs_exactly_what_is_alive(data, sample):
    graph = replace(sample[0], values=tuple(replace(value, bytes=8) for value in sample[0].values))
    graph, costs = without_extras(graph)
    schedule = data.draw(schedules(graph))
    assert arena_bytes(graph, schedule) == simulate(graph, costs, schedule).peak_bytes


def test_the_comparison_with_what_is_alive_can_fail():
    graph, schedule = row(8, 8, 8)
    assert arena_bytes(graph, schedule, in_place=every_pair(graph)) == 8
    assert simulate(graph, Costs.unit(graph), schedule).peak_bytes == 16


def row(*sizes):
    """Return a chain of ops that make values of these sizes, and its plain schedule."""
    builder = GraphBuilder()
    value = builder.add_input("x", 1)
    for k, size in enumerate(sizes):
        (value,) = builder.add_op(f"f{k}", [value], [(f"v{k}", size)])
    graph = builder.build(outputs=[value])
    return graph, Schedule.keep_all(graph)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((1600, 1, 100), 1601),  # A free buffer of 16 times the size serves,
        ((1600, 1, 99), 1700),  # a larger one does not.
        ((100, 1, 1600), 1601),  # A free buffer of a sixteenth grows,
        ((100, 1, 1700), 1801),  # a smaller one does not.
        ((64, 1, 80, 1, 32), 81),  # The smallest buffer that suffices comes first.
    ],
)
def test_which_free_buffer_serves(sizes, expected):
    assert arena_bytes(*row(*sizes)) == expected


def test_the_match_range_is_an_option():
    assert arena_bytes(*row(100, 1, 1700), match_range=17) == 1701
    with pytest.raises(InvalidOptionError):
        arena_bytes(*row(1), match_range=0)


def test_outputs_and_handovers_are_not_overwritten():
    builder = GraphBuilder()
    x = builder.add_input("x", 4)
    (a,) = builder.add_op("a", [x], [("a", 4)])
    (b,) = builder.add_op("b", [a], [("b", 4)])
    builder.begin_backward()
    (c,) = builder.add_op("c", [b], [("c", 4)])
    plain = Schedule((0, 1), (2,))
    expected = {"free": 4, "output": 8, "handover": 8}
    for what, size in expected.items():
        graph = builder.build(outputs=[c, a] if what == "output" else [c], handovers=[a] if what == "handover" else [])
        assert arena_bytes(graph, plain, in_place=every_pair(graph)) == size, what


def test_buffers_from_outside_are_not_counted():
    graph, schedule = row(8, 16, 32)
    assert arena_bytes(graph, schedule, Reuse.NONE, external=[graph.ops[1].outputs[0]]) == 40


def test_recomputed_values_have_buffers_of_their_own():
    graph, _ = samples.training_chain(3)
    schedule = mirror(graph, {0: 1, 1: 1})
    assert arena_bytes(graph, schedule, Reuse.NONE) == arena_bytes(graph, Schedule.keep_all(graph), Reuse.NONE) + 200


@pytest.mark.parametrize("pairs", [{9: ((0, 1),)}, {1: ((0, 2),)}, {1: ((1, 3),)}])
def test_pairs_must_belong_to_their_ops(pairs):
    graph, schedule = row(4, 4, 4)
    with pytest.raises(InvalidOptionError):
        arena_bytes(graph, schedule, in_place=InPlace(pairs))


def test_element_wise_pairs_are_for_known_ops_only():
    builder = GraphBuilder()
    x = builder.add_input("x", 4)
    targets = ("aten.relu.default", "aten.mm.default", "mylib.relu.default", "aten.add.Tensor")
    for k, target in enumerate(targets):
        builder.add_op(f"f{k}", [x], [(f"v{k}", 4)], target=target)
    assert sorted(element_wise_pairs(builder.build()).pairs) == [0, 3]


# Algorithm 3


def test_segments_by_hand():
    sizes, flags = [3, 1, 4, 1, 5, 9], [False, True, True, False, True, True]
    # More than 4 bytes were made at the third op (8) and at the fifth (6); 9 more at the last.
    found = greedy_segments(sizes, flags, 4)
    assert (found.stored_bytes, found.largest_bytes, found.mirrors) == (4 + 5 + 9, 9, (1, 1, 0, 1, 0, 0))
    # Exactly the budget is not too much, and what follows the last cut is in neither figure.
    found = greedy_segments(sizes, flags, 9)
    assert (found.stored_bytes, found.largest_bytes, found.mirrors) == (5, 14, (1, 1, 1, 1, 0, 1))


def test_members_of_a_group_follow_the_first():
    sizes, flags = [2, 1, 1, 2, 1, 1], [False, True, True] * 2
    found = greedy_segments(sizes, flags, 3, groups=[0, 1, 1, 0, 2, 2])
    # The first group decides at 3 bytes, not above 3; the second at 2 + 1 + 1 + 2 + 1.
    assert (found.stored_bytes, found.largest_bytes, found.mirrors) == (2, 7, (1, 1, 1, 1, 0, 0))


@MANY
@given(st.lists(st.tuples(st.integers(0, 20), st.booleans()), max_size=30), st.integers(0, 60))
def test_segments_end_at_the_first_candidate_above_the_budget(ops, budget):
    sizes, flags = [size for size, _ in ops], [flag for _, flag in ops]
    found = greedy_segments(sizes, flags, budget)
    made = largest = 0
    for size, flag, count in zip(sizes, flags, found.mirrors, strict=True):
        made += size
        assert count == (0 if flag and made > budget else 1)
        largest, made = (max(largest, made), 0) if not count else (largest, made)
    assert found.largest_bytes == largest
    assert found.stored_bytes == sum(size for size, count in zip(sizes, found.mirrors, strict=True) if not count)


def test_lengths_must_agree():
    with pytest.raises(InvalidOptionError):
        greedy_segments([1, 2], [True], 1)
    with pytest.raises(InvalidOptionError):
        greedy_segments([1], [True], 1, groups=[])


def test_budgets_of_both_searches_on_a_unit_chain():
    cut = partial(greedy_segments, [100] * 400, [True] * 400)
    paper = paper_budgets(cut)
    assert paper[0] == 0
    assert paper[1] == pytest.approx(math.sqrt(40_000 * 100))
    assert (min(paper[2:]), max(paper[2:])) == pytest.approx((paper[1] / math.sqrt(2), paper[1] * math.sqrt(2)))
    assert len(paper) == 8
    code = code_budgets(cut)
    # 40000 and 100 bytes at first; with segments of 15 layers 26 are stored, with segments of 14 layers 28. The least y
    # is the 100 bytes of the first run, the third guess is 1400; 6 equal steps lead from the one to sqrt(2) the other.
    assert code[:3] == (0, 1414, int(math.sqrt(2600 * 1500 / 2)))
    assert code[3:] == tuple(100 + (int(math.sqrt(2) * 1400) - 100) // 6 * part for part in range(1, 7))


@pytest.mark.parametrize("n", [100, 400, 900])
def test_stored_and_largest_follow_the_law_of_two_square_roots(n):
    sizes, flags = [1] * n, [True] * n
    found = greedy_segments(sizes, flags, math.isqrt(n) - 1)
    assert found.stored_bytes + found.largest_bytes == 2 * math.isqrt(n)
    least = min(
        segments.stored_bytes + segments.largest_bytes
        for budget in range(n)
        if (segments := greedy_segments(sizes, flags, budget)).stored_bytes
    )
    assert least == 2 * math.isqrt(n)


def test_the_scan_reaches_from_one_op_to_all():
    budgets = scan_budgets([5] * 40, 16)
    assert len(budgets) == 16
    assert max(budgets) == 200
    assert min(budgets) == pytest.approx(5)
    assert scan_budgets([5] * 40, 0) == ()


# Recursion


@pytest.mark.parametrize(("k", "depth"), [(1, 5), (1, 8), (2, 4), (3, 3), (7, 2)])
def test_recursion_holds_k_borders_per_level_and_runs_n_log_n_layers(k, depth):
    n = (k + 1) ** depth
    runs = recursive_runs(n, k)
    assert [run.layer for run in runs if run.backward] == list(reversed(range(n)))
    assert stored_at_once(n, runs) == k * depth
    forward = sum(not run.backward for run in runs)
    # All layers once; after that each of the `depth` levels runs k of k + 1 parts, except what forward left behind.
    assert forward == n + sum(k * (n // (k + 1) - (k + 1) ** (depth - level - 1)) for level in range(depth))
    assert forward <= n * depth + n


def stored_at_once(n, runs):
    """Return how many layer inputs are stored at once: those made by a run and read by a later one that is not next."""
    stored, peak = set(), 0
    for place, run in enumerate(runs):
        if run.layer in stored:
            needed_again = next_use(runs, place, run.layer)
            if not needed_again:
                stored.discard(run.layer)
        if not run.backward and next_use(runs, place, run.layer + 1, beyond=place + 1):
            stored.add(run.layer + 1)
        peak = max(peak, len(stored))
    return peak


def next_use(runs, place, layer, beyond=0):
    """Whether the input of `layer` is read after `place`, and after `beyond`, before the layer before it runs again."""
    for later in range(place + 1, len(runs)):
        if runs[later].layer == layer and later > beyond:
            return True
        if runs[later] == (layer - 1, False):
            return False
    return False


def as_steps(n, runs):
    """Return the ops of `training_chain(n)` that the runs stand for, in order."""
    first = next(place for place, run in enumerate(runs) if run.backward)
    steps = [2 * n - run.layer if run.backward else run.layer for run in runs]
    return [*steps[:first], n, *steps[first:]]


@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("n", [3, 4, 7, 16, 33, 100])
def test_mirror_counts_perform_the_recursion(n, k):
    graph, costs = samples.training_chain(n)
    schedule = ChenRecursive(k=k, depth=-1).propose(Problem(graph, costs, 10**9)).schedule
    assert list(schedule.steps) == as_steps(n, recursive_runs(n, k))


def test_the_peak_grows_with_the_logarithm_of_the_depth():
    peaks = []
    for power in range(3, 11):
        graph, costs = samples.training_chain(2**power)
        problem = Problem(graph, costs, 10**9)
        peaks.append(problem.price(ChenRecursive(k=1, depth=-1).propose(problem).schedule).peak_bytes)
    assert {after - before for before, after in pairwise(peaks)} == {100}


@pytest.mark.parametrize("k", [1, 4])
def test_uneven_chains_do_not_go_deep(k):
    weights = [2**k for k in range(200)]
    bytes_made = sum(weights)
    mixed = [size * 200 + bytes_made for size in weights]
    assert max(recursive_levels(mixed, k).insides) <= 2 * math.log2(200) + 2


# Planners

PLANNERS = {
    "greedy": ChenGreedy(),
    "greedy, paper": ChenGreedy(search="paper", scan=0),
    "recursive": ChenRecursive(),
    "recursive, k = 1": ChenRecursive(k=1, depth=-1),
    "recursive, depth 2": ChenRecursive(k=2, depth=2),
    "sqrt": ChenSqrt(),
    "sqrt, 3": ChenSqrt(segments=3),
}


@MANY
@given(graphs(max_ops=14), st.sampled_from(sorted(PLANNERS)))
def test_planners_give_legal_schedules_on_marked_graphs(sample, name):
    problem = Problem(*sample, 100)
    if PLANNERS[name].supports(problem) is None:
        verify(problem.graph, PLANNERS[name].propose(problem).schedule)


@pytest.mark.parametrize("name", PLANNERS)
@pytest.mark.parametrize("seed", range(40))
def test_planners_give_legal_schedules_on_random_training_graphs(name, seed):
    graph, costs = samples.random_dag(seed, n=60, reach=2 + seed % 3)
    problem = Problem(graph, costs, 1000)
    if len(chain_of(graph, costs).links) > 2:
        assert PLANNERS[name].supports(problem) is None
        verify(graph, PLANNERS[name].propose(problem).schedule)


@pytest.mark.parametrize("sample", [samples.training_chain(60), samples.skip_chain(60)])
@pytest.mark.parametrize("planner", [ChenGreedy(), ChenRecursive()])
def test_more_memory_is_never_slower_and_the_budget_is_kept(planner, sample):
    graph, costs = sample
    base = Problem(graph, costs, 1).baseline
    problem = Problem(graph, costs, 1)
    least = problem.price(planner.propose(problem).schedule).peak_bytes
    seconds = []
    for part in range(9):
        problem = Problem(graph, costs, least + (base.peak_bytes - least) * part // 8)
        trace = problem.price(planner.propose(problem).schedule)
        assert problem.fits(trace)
        seconds.append(trace.seconds)
    assert seconds == sorted(seconds, reverse=True)
    assert len(set(seconds)) > 4


def test_greedy_spends_what_it_may_on_speed():
    graph, costs = samples.training_chain(100)
    problem = Problem(graph, costs, 10**9)
    assert problem.price(ChenGreedy().propose(problem).schedule).seconds == problem.baseline.seconds


@pytest.mark.parametrize("n", [64, 144, 400])
def test_peaks_of_planned_unit_chains_follow_the_square_root(n):
    graph, costs = samples.training_chain(n)
    problem = Problem(graph, costs, 1)
    for planner in (ChenSqrt(), ChenGreedy()):
        peak = problem.price(planner.propose(problem).schedule).peak_bytes
        assert peak <= 100 * (2 * math.sqrt(n) + 3)


@pytest.mark.parametrize(
    ("planner", "options"),
    [
        (ChenGreedy, {"search": "best"}),
        (ChenGreedy, {"scan": -1}),
        (ChenRecursive, {"k": -1}),
        (ChenRecursive, {"depth": -2}),
        (ChenSqrt, {"segments": -1}),
    ],
)
def test_planners_refuse_nonsense(planner, options):
    with pytest.raises(InvalidOptionError):
        planner(**options)


@pytest.mark.parametrize("planner", [ChenGreedy(), ChenRecursive()])
def test_planners_say_what_they_need(planner):
    assert "phase" in planner.supports(Problem(*samples.chain(5), 100))
    assert "cut points" in planner.supports(Problem(*samples.training_chain(2), 100))


def test_borders_must_be_positive():
    with pytest.raises(InvalidOptionError):
        recursive_runs(4, 0)
    with pytest.raises(InvalidOptionError):
        recursive_levels([1, 1], 0)


# The paper's networks


@pytest.mark.parametrize("stages", STAGES, ids=str)
def test_resnet_figures_to_the_printed_digits(stages):
    network, expected = resnet(stages), STAGES[stages]
    plain = Schedule.keep_all(network.graph)
    found = [footprint(network, plain, reuse) for reuse in Reuse]
    found.append(footprint(network, drop_normalisation(network)))
    found += [footprint(network, sublinear(network, search)[0]) for search in ("paper", "code")]
    assert [round(size / GIB, 2) for size in found][: len(expected)] == list(expected)


def test_the_headline():
    network = resnet((15, 121, 182, 15))
    plan, segments = sublinear(network)
    assert footprint(network, plan) <= 4.04 * GIB
    expensive = keep_expensive(network, segments, 7 * 10**9)
    verify(network.graph, expensive)
    assert footprint(network, expensive) <= 7 * 10**9
    assert extra_time(network, expensive) <= 0.30


@pytest.mark.parametrize(
    ("stages", "parameters"), [((3, 4, 6, 3), 25_557_032), ((3, 4, 23, 3), 44_549_160), ((3, 8, 36, 3), 60_192_808)]
)
def test_resnets_have_the_published_number_of_parameters(stages, parameters):
    assert resnet(stages).parameter_bytes == 4 * parameters


def test_the_weights_of_the_lstm_are_added_up_in_place():
    short, long = (lstm(steps, layers=2, hidden=32, batch=2, inputs=5, classes=7) for steps in (8, 16))
    plain = [Schedule.keep_all(network.graph) for network in (short, long)]
    for reuse, buffers in ((Reuse.NONE, 8), (Reuse.IN_PLACE, 0)):
        growth = footprint(long, plain[1], reuse) - footprint(short, plain[0], reuse)
        # Each of the 8 further steps has the same feature maps, which are smaller than the weights.
        features = 8 * (growth // 8 % short.parameter_bytes)
        assert growth == buffers * short.parameter_bytes + features


def test_lstm_states_of_a_step_are_kept_together():
    network = lstm(32, layers=3, hidden=16, batch=2, inputs=5, classes=7)
    plan, segments = sublinear(network)
    verify(network.graph, plan)
    names = [network.graph.ops[op].name for op, count in enumerate(segments.mirrors) if not count]
    steps = Counter(name.split(".")[0] for name in names)
    assert set(steps.values()) == {6}
    assert {name.split(".")[-1] for name in names} == {"cell", "out"}
    assert footprint(network, plan) < footprint(network, Schedule.keep_all(network.graph)) / 2


@pytest.mark.parametrize("build", [lambda: resnet(()), lambda: resnet((1, 0)), lambda: lstm(0)])
def test_networks_refuse_nonsense(build):
    with pytest.raises(InvalidOptionError):
        build()


def test_the_page():
    stages = ((1, 1, 1, 1), (2, 2, 2, 2), (3, 4, 23, 3))
    page = reproduce(stages=stages, steps=(2, 4, 8))
    assert {row.network for row in page.rows} >= {"ResNet, 14 layers", "ResNet, 101 layers", "LSTM, 8 steps"}
    assert all(math.isfinite(row.ours) and row.note for row in page.rows)
    assert page.remarks
    sharing = [row for row in page.rows if (row.network, row.quantity) == ("ResNet, 101 layers", "sharing")]
    assert [round(row.ours, 2) for row in sharing] == [5.14]
    assert "5.14" in sharing[0].note
    assert len([row for row in page.rows if row.quantity.startswith("growth")]) == 6
