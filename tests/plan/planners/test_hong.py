"""Hong's planners against known figures, every plan of small chains, and an allocator that counts every byte."""

import random
from itertools import combinations, pairwise

import pytest

from helpers.strategies import examples
from lowtide.errors import InvalidOptionError, PlannerRefusedError
from lowtide.graph import samples
from lowtide.graph.analysis import chain_of
from lowtide.plan.core.problem import Problem
from lowtide.plan.planners import hong_linear
from lowtide.plan.planners.hong_cubic import HongCubic, cubic_checkpoints, cubic_cost
from lowtide.plan.planners.hong_linear import HongLinear, linear_checkpoints, linear_peak
from lowtide.plan.solve import solve
from lowtide.reproduce.hong import event_peak, page, vgg19_sizes

MIB = 2**20
CHAINS = examples(2000)


def subsets(n):
    """Yield every set of layers between the input and layer `n`."""
    return (chosen for size in range(n) for chosen in combinations(range(1, n), size))


def random_chains(seed, *, inside, count=CHAINS, longest=8):
    rng = random.Random(seed)
    for _ in range(count):
        n = rng.randint(1, longest)
        largest = rng.choice((2, 20, 1000))
        sizes = [rng.randint(0, largest) for _ in range(n + 1)]
        yield sizes, [0, *(rng.choice((0, rng.randint(0, largest))) for _ in range(n))] if inside else None


def model_a(sizes, chosen, inside, *, gradient):
    """Return model A's cost, written down from its definition."""
    n = len(sizes) - 1
    inside = inside or [0] * (n + 1)
    largest = 0
    borders = [0, *chosen, n + 1]
    for left, right in pairwise(borders):
        took = sum(sizes[left + 1 : right]) + sum(inside[left + 1 : right + 1])
        if gradient and right > left + 1:
            took += max(sizes[left:right])
        largest = max(largest, took)
    return sum(sizes[k] for k in chosen) + largest


def segment_b(sizes, inside, i, j, cost):
    """Return what the segment between checkpoints `i` and `j` takes, written down from its definition."""
    made = [0]
    for k in range(1, len(sizes)):
        made.append(made[-1] + sizes[k] + inside[k])
    if cost == "buffer":
        return made[j] - made[i] + max(sizes[i:j])
    moments = [made[k] - made[i] + sizes[k] + sizes[k - 1] for k in range(i + 1, j + 1)]
    if cost == "exact":
        moments[-1] -= sizes[j]
    return max(moments)


def model_b(sizes, chosen, inside, *, cost, loss_gradient):
    n = len(sizes) - 1
    inside = inside or [0] * (n + 1)
    borders = [0, *chosen, n]
    peak = sum(sizes[k] for k in borders) + (sizes[n] if loss_gradient else 0)
    for place, (i, j) in enumerate(pairwise(borders)):
        peak = max(peak, sum(sizes[k] for k in borders[: place + 1]) + segment_b(sizes, inside, i, j, cost))
    return peak


class Allocator:
    """Counts the bytes of named buffers; a buffer must not be there twice, nor be freed when it is not there."""

    def __init__(self):
        self.sizes, self.peak = {}, 0

    def take(self, name, size):
        assert name not in self.sizes
        self.sizes[name] = size
        self.peak = max(self.peak, sum(self.sizes.values()))

    def drop(self, name):
        del self.sizes[name]


def measured_peak(sizes, chosen, inside, *, recompute_output, loss_gradient):
    """Return the peak of a training step in which every output, gradient and inside buffer is taken and dropped."""
    n = len(sizes) - 1
    inside = inside or [0] * (n + 1)
    kept = {0, *chosen, n}
    heap = Allocator()
    heap.take("a0", sizes[0])
    for k in range(1, n + 1):
        heap.take(f"w{k}", inside[k])
        heap.take(f"a{k}", sizes[k])
        heap.drop(f"w{k}")
        if k - 1 not in kept:
            heap.drop(f"a{k - 1}")
    if loss_gradient:
        heap.take(f"g{n}", sizes[n])
        heap.drop(f"a{n}")
    else:
        heap.drop(f"a{n}")
        heap.take(f"g{n}", sizes[n])
    right = n
    while right > 0:
        left = max(k for k in kept if k < right)
        for k in range(left + 1, right + 1):
            heap.take(f"w{k}", inside[k])
            if k < right or recompute_output:
                heap.take(f"a{k}", sizes[k])
        for k in range(right, left, -1):
            heap.take(f"g{k - 1}", sizes[k - 1])
            heap.drop(f"g{k}")
            heap.drop(f"w{k}")
            if k < right or recompute_output:
                heap.drop(f"a{k}")
        heap.drop(f"a{left}")
        right = left
    assert set(heap.sizes) == {"g0"}
    return heap.peak


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("cost", ["outputs", "gradient"])
def test_cubic_equals_trying_every_plan(cost, inside):
    for sizes, within in random_chains(f"{cost}{inside}", inside=inside):
        checkpoints, value = cubic_checkpoints(sizes, within, cost=cost)
        n = len(sizes) - 1
        plans = [*subsets(n), *((*chosen, n) for chosen in subsets(n))]
        best = min(model_a(sizes, chosen, within, gradient=cost == "gradient") for chosen in plans)
        assert value == best, (sizes, within)
        assert model_a(sizes, checkpoints, within, gradient=cost == "gradient") == value
        assert cubic_cost(sizes, checkpoints, within, cost=cost) == value


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("loss_gradient", [False, True])
@pytest.mark.parametrize("cost", ["buffer", "exact", "exact_output"])
def test_linear_equals_trying_every_plan(cost, loss_gradient, inside):
    for sizes, within in random_chains(f"{cost}{loss_gradient}{inside}", inside=inside):
        options = {"cost": cost, "loss_gradient": loss_gradient}
        checkpoints, value = linear_checkpoints(sizes, within, **options)
        best = min(model_b(sizes, chosen, within, **options) for chosen in subsets(len(sizes) - 1))
        assert value == best, (sizes, within)
        assert model_b(sizes, checkpoints, within, **options) == value
        assert linear_peak(sizes, checkpoints, within, **options) == value


@pytest.mark.parametrize("cost", ["buffer", "exact", "exact_output"])
def test_linear_equals_the_quadratic_recurrence_on_longer_chains(cost):
    for sizes, within in random_chains(cost, inside=True, count=60, longest=80):
        n = len(sizes) - 1
        peaks = [0] * n + [sizes[n]]
        for i in reversed(range(n)):
            peaks[i] = sizes[i] + min(max(segment_b(sizes, within, i, j, cost), peaks[j]) for j in range(i + 1, n + 1))
        assert linear_checkpoints(sizes, within, cost=cost)[1] == peaks[0]


def test_the_comparison_with_every_plan_can_fail():
    sizes = [0, 5, 1, 5, 1, 5]
    checkpoints, value = linear_checkpoints(sizes)
    worse = [
        chosen for chosen in subsets(5) if model_b(sizes, chosen, None, cost="buffer", loss_gradient=False) > value
    ]
    assert worse
    assert checkpoints not in worse
    assert model_a(sizes, (1,), None, gradient=False) > cubic_checkpoints(sizes)[1]


def test_the_segment_costs_differ():
    sizes = [0, 10, 30, 10, 25, 5, 20]
    assert len({linear_checkpoints(sizes, cost=cost)[1] for cost in ("exact", "exact_output")}) == 2
    assert linear_peak(vgg19_sizes(), (3, 6), cost="buffer") < linear_peak(vgg19_sizes(), (3, 6), cost="exact")
    assert cubic_checkpoints(sizes, cost="outputs")[1] < cubic_checkpoints(sizes, cost="gradient")[1]


@pytest.mark.parametrize("recompute_output", [False, True])
@pytest.mark.parametrize("loss_gradient", [False, True])
def test_exact_cost_equals_the_allocator(recompute_output, loss_gradient):
    rng = random.Random(7)
    cost = "exact_output" if recompute_output else "exact"
    below = 0
    for sizes, within in random_chains(f"events{recompute_output}{loss_gradient}", inside=True, longest=12):
        chosen = [k for k in range(1, len(sizes) - 1) if rng.random() < 0.4]
        measured = measured_peak(sizes, chosen, within, recompute_output=recompute_output, loss_gradient=loss_gradient)
        assert linear_peak(sizes, chosen, within, cost=cost, loss_gradient=loss_gradient) == measured
        assert measured == event_peak(
            sizes, chosen, within, recompute_output=recompute_output, loss_gradient=loss_gradient
        )
        below += linear_peak(sizes, chosen, within, cost="buffer", loss_gradient=loss_gradient) < measured
    # One gradient buffer is an approximation, so the comparison tells the two costs apart.
    assert below > CHAINS // 20


def test_vgg19_plans():
    sizes = vgg19_sizes()
    assert len(sizes) == 25
    assert round(sum(sizes) / MIB) == 4002
    assert cubic_checkpoints(sizes, cost="outputs") == ((3, 6), 1862 * MIB)
    assert cubic_checkpoints(sizes, cost="gradient") == ((3, 11), 2597 * MIB)
    best = (2, 4, 6, 9, 11, 14, 16, 19, 21, 22)
    for loss_gradient in (False, True):
        assert linear_checkpoints(sizes, loss_gradient=loss_gradient) == (best, 2352 * MIB)


@pytest.mark.parametrize(
    ("chosen", "figures"),
    [
        ((), (4786, 4786, 4067, 4067)),
        (range(1, 24), (4003, 4024, 4024, 4067)),
        ((4, 8, 12, 16), (3258, 2940, 3136, 3136)),
        ((3, 6), (2646, 2548, 3136, 3136)),
        ((3, 11), (2597, 2548, 3136, 3136)),
        ((2, 4, 6, 9, 11, 14, 16, 19, 21, 22), (3241, 2352, 2352, 3136)),
    ],
)
def test_vgg19_values(chosen, figures):
    sizes = vgg19_sizes()
    events = [
        measured_peak(sizes, chosen, None, recompute_output=again, loss_gradient=False) for again in (False, True)
    ]
    values = [cubic_cost(sizes, chosen, cost="gradient"), linear_peak(sizes, chosen), *events]
    assert tuple(round(value / MIB) for value in values) == figures


@pytest.mark.parametrize(("layers", "peak"), [(10**3, 47), (10**4, 143), (10**5, 449)])
def test_uniform_chains_follow_the_square_root_of_twice_their_length(layers, peak):
    assert linear_checkpoints([1] * (layers + 1))[1] == peak


class CountingList(list):
    """A list that counts how often an entry is read."""

    reads = 0

    def __getitem__(self, index):
        CountingList.reads += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("cost", ["buffer", "exact"])
@pytest.mark.parametrize("shape", ["uniform", "random", "rising", "falling", "saw"])
def test_work_per_layer_does_not_grow(shape, cost):
    rng = random.Random(3)
    forms = {
        "uniform": lambda k, n: 5,
        "random": lambda k, n: rng.randint(1, 10**6),
        "rising": lambda k, n: k + 1,
        "falling": lambda k, n: n - k + 1,
        "saw": lambda k, n: 1 + k % 37,
    }
    per_layer = []
    for n in (1_000, 30_000):
        terms = hong_linear._terms([forms[shape](k, n) for k in range(n + 1)], None, cost)
        CountingList.reads = 0
        hong_linear._recurrence(terms._replace(keys=CountingList(terms.keys), ends=CountingList(terms.ends)), 1)
        per_layer.append(CountingList.reads / n)
    assert max(per_layer) < 12


@pytest.mark.parametrize("planner", [HongCubic(), HongLinear()])
def test_planner_keeps_what_the_algorithm_chose(planner):
    graph, costs = samples.training_chain(30, sizes=[100 + 37 * (k % 5) for k in range(30)])
    plan = solve(Problem(graph, costs, 10**9), planner)
    assert plan.peak_bytes < plan.baseline_peak_bytes / 2
    runs = [plan.schedule.steps.count(op) for op in graph.forward]
    assert max(runs) == 2


def test_planner_serves_each_cost_and_takes_the_best_of_all():
    graph, costs = samples.skip_chain(40)
    problem = Problem(graph, costs, 1)
    for planner, names in ((HongCubic, ("outputs", "gradient")), (HongLinear, hong_linear.COSTS)):
        peaks = [problem.price(planner(cost=name).propose(problem).schedule).peak_bytes for name in names]
        assert problem.price(planner().propose(problem).schedule).peak_bytes == min(peaks)


def test_planner_counts_bytes_inside_links():
    graph, costs = samples.skip_chain(12)
    chain = chain_of(graph, costs)
    assert any(link.inside_bytes for link in chain.links)
    with_inside = problem_peak(graph, costs, HongLinear(cost="exact"))
    assert with_inside < Problem(graph, costs, 1).baseline.peak_bytes


def problem_peak(graph, costs, planner):
    problem = Problem(graph, costs, 1)
    return problem.price(planner.propose(problem).schedule).peak_bytes


@pytest.mark.parametrize("planner", [HongCubic(), HongLinear()])
def test_refusals(planner):
    graph, costs = samples.chain(5)
    with pytest.raises(PlannerRefusedError, match="forward and a backward"):
        solve(Problem(graph, costs, 10**6), planner)
    graph, costs = samples.training_chain(1)
    with pytest.raises(PlannerRefusedError, match="cut points"):
        solve(Problem(graph, costs, 10**6), planner)


def test_cubic_refuses_long_chains():
    graph, costs = samples.training_chain(20)
    with pytest.raises(PlannerRefusedError, match="up to 10 links and this one has"):
        solve(Problem(graph, costs, 10**6), HongCubic(max_links=10))


@pytest.mark.parametrize("function", [cubic_checkpoints, linear_checkpoints])
@pytest.mark.parametrize(
    ("sizes", "inside", "message"),
    [
        ([5], None, "at least one layer"),
        ([0, 1, 2], [0, 1], "equal length"),
        ([0, -1, 2], None, "at least 0"),
        ([0, 1, 2], [3, 0, 0], "only layers have any"),
    ],
)
def test_bad_rows(function, sizes, inside, message):
    with pytest.raises(InvalidOptionError, match=message):
        function(sizes, inside)


@pytest.mark.parametrize(
    "call",
    [
        lambda: HongCubic(cost="nothing"),
        lambda: HongLinear(cost="nothing"),
        lambda: cubic_checkpoints([0, 1], cost="both"),
        lambda: linear_checkpoints([0, 1], cost="all"),
    ],
)
def test_bad_options(call):
    with pytest.raises(InvalidOptionError, match="must be one of"):
        call()


def test_page_has_every_figure(monkeypatch):
    monkeypatch.setattr("lowtide.reproduce.hong._TIMED", (100, 1000))
    made = page()
    captured = [row for row in made.rows if row.network.endswith("PyTorch")]
    assert len(made.rows) - len(captured) == 5 + 24 + 3 + 2
    assert {row.unit for row in captured} == {"MiB", "%"}
    for row in made.rows:
        assert row.published is None
        _, found, figure = row.note.partition("the recurrence gives ")
        if found:
            assert abs(row.ours - int(figure.split(";")[0].split()[0])) <= 0.5, row
