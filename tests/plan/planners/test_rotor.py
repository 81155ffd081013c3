"""The chain program of rotor against a search over all persistent schedules, and its planner on many chains."""

import heapq
import random
from dataclasses import replace
from itertools import count, pairwise, product

import pytest

from lowtide.errors import InfeasibleBudgetError, InvalidOptionError, PlannerRefusedError
from lowtide.graph import samples
from lowtide.graph.build import GraphBuilder
from lowtide.plan.core.problem import Problem
from lowtide.plan.core.result import Outcome
from lowtide.plan.planners.chain_dp.emit import emit
from lowtide.plan.planners.chain_dp.operations import Action, Operation, keep_everything
from lowtide.plan.planners.chain_dp.pieces import _falling_fit, pieces_of
from lowtide.plan.planners.chain_dp.profile import profile
from lowtide.plan.planners.chain_dp.stages import Stages, operations_seconds, paper_stages
from lowtide.plan.planners.revolve import revolve_operations
from lowtide.plan.planners.rotor import Rotor, RotorTable, rotor_operations
from lowtide.plan.solve import solve
from lowtide.schedule.steps import Schedule
from lowtide.schedule.verify import verify

CHAINS = 1200
QUICK = Rotor(slots=80, max_pieces=40)


def random_paper_chain(rng):
    n = rng.randint(1, 5)
    row = lambda most, length=n: [rng.randint(0, most) for _ in range(length)]  # noqa: E731
    return paper_stages(
        forward_seconds=[rng.randint(1, 9) for _ in range(n)],
        backward_seconds=row(9),
        outputs=row(6, n + 1),
        inside=row(6) if rng.random() < 0.7 else None,
        forward_bytes=row(3) if rng.random() < 0.5 else None,
        backward_bytes=row(3) if rng.random() < 0.5 else None,
        gradients=row(5, n + 1) if rng.random() < 0.5 else None,
    )


def random_chain(rng):
    """Return a chain on which first runs, repeated runs and runs before backward all cost something else."""
    chain = random_paper_chain(rng)
    n = len(chain)
    keep = tuple(seconds + rng.randint(0, 2) for seconds in chain.pass_seconds)
    return replace(
        chain,
        first_seconds=tuple(seconds + rng.randint(0, 2) for seconds in keep),
        keep_seconds=keep,
        leaf_seconds=tuple(rng.randint(0, seconds) for seconds in keep),
        leaf_bytes=tuple(most - rng.randint(0, most) for most in chain.leaf_bytes),
        backward_bytes=tuple(most + rng.randint(0, 3) for most in chain.backward_bytes),
        pass_bytes=tuple(chain.outputs[k + 1] + rng.randint(0, 3) for k in range(n)),
    )


class Machine:
    """The moves of persistent schedules: what is kept stays until its backward has run.

    A state is (layers still to go backward, inputs kept, layers all of which is kept, layer whose input was just made
    and is not kept, or None).
    """

    def __init__(self, stages, memory):
        self.stages, self.memory, self.n = stages, memory, len(stages)

    def start(self):
        return self.n, frozenset([0]), frozenset(), None

    def held(self, state):
        _, inputs, whole, _ = state
        apart = [k for k in inputs if k and k - 1 not in whole]
        return sum(self.stages.outputs[k] for k in apart) + sum(self.stages.saved[k] for k in whole)

    def moves(self, state):
        """Yield each move within the memory: its seconds, and the state after it."""
        turn, inputs, whole, head = state
        for layer in range(turn):
            if layer in inputs or layer - 1 in whole:
                yield from self.forward(state, layer, kept=True)
            elif head == layer:
                yield from self.forward(state, layer, kept=False)
        if turn - 1 in whole and (turn - 1 in inputs or turn - 2 in whole):
            after = turn - 1, inputs - {turn - 1}, whole - {turn - 1}, None
            rest = self.held(state) - self.stages.saved[turn - 1]
            if rest + self.stages.backward_bytes[turn - 1] <= self.memory:
                yield self.stages.backward_seconds[turn - 1], after

    def forward(self, state, layer, *, kept):
        stages, (turn, inputs, whole, _) = self.stages, state
        first = turn == self.n
        base = self.held(state) + stages.gradients[turn] + (0 if kept else stages.outputs[layer])
        seconds = stages.first_seconds[layer] if first else stages.pass_seconds[layer]
        if layer + 1 < turn and base + stages.pass_bytes[layer] <= self.memory:
            yield seconds, (turn, inputs | {layer}, whole, layer + 1)
            if not kept:
                yield seconds, (turn, inputs, whole, layer + 1)
        if layer in whole:
            return
        seconds = stages.first_seconds[layer] if first else stages.keep_seconds[layer]
        if base + stages.keep_bytes[layer] <= self.memory:
            yield seconds, (turn, inputs | {layer}, whole | {layer}, None)
        if layer == turn - 1:
            seconds = stages.first_seconds[layer] if first else stages.leaf_seconds[layer]
            if base - stages.gradients[turn] + stages.leaf_bytes[layer] <= self.memory:
                yield seconds + stages.backward_seconds[layer], (layer, inputs - {layer}, whole, None)


def search(stages, memory):
    """Return the least seconds over all persistent schedules, or None if none stays within `memory`."""
    machine = Machine(stages, memory)
    order = count()
    queue = [(0, next(order), machine.start())]
    best = {machine.start(): 0}
    while queue:
        seconds, _, state = heapq.heappop(queue)
        if not state[0]:
            return seconds
        if seconds > best[state]:
            continue
        for extra, after in machine.moves(state):
            if seconds + extra < best.get(after, float("inf")):
                best[after] = seconds + extra
                heapq.heappush(queue, (seconds + extra, next(order), after))
    return None


def run(stages, operations):
    """Carry out `operations` in the model, checking that each finds what it reads; return seconds and most bytes."""
    n = len(stages)
    turn, inputs, whole, head = n, {0}, set(), None
    seconds, most = 0.0, 0
    held = lambda: (  # noqa: E731
        sum(stages.outputs[k] for k in inputs if k and k - 1 not in whole) + sum(stages.saved[k] for k in whole)
    )
    place = 0
    while place < len(operations):
        action, layer = operations[place]
        leaf = action is Action.KEEP_ALL and operations[place + 1] == (Action.BACKWARD, layer)
        if action is Action.BACKWARD or leaf:
            assert layer == turn - 1
            assert layer in inputs or layer - 1 in whole or (leaf and head == layer)
            transient = stages.outputs[layer] if head == layer and layer not in inputs else 0
            if leaf:
                most = max(most, held() + transient + stages.leaf_bytes[layer])
                seconds += stages.first_seconds[layer] if turn == n else stages.leaf_seconds[layer]
                place += 1
            else:
                most = max(most, held() - stages.saved[layer] + stages.backward_bytes[layer])
                whole.remove(layer)
            seconds += stages.backward_seconds[layer]
            inputs.discard(layer)
            turn, head = layer, None
        else:
            kept = layer in inputs or layer - 1 in whole
            assert kept or head == layer, "the input is not there"
            base = held() + stages.gradients[turn] + (0 if kept else stages.outputs[layer])
            if action is Action.KEEP_ALL:
                most = max(most, base + stages.keep_bytes[layer])
                seconds += stages.first_seconds[layer] if turn == n else stages.keep_seconds[layer]
                inputs.add(layer)
                whole.add(layer)
                head = None
            else:
                most = max(most, base + stages.pass_bytes[layer])
                seconds += stages.first_seconds[layer] if turn == n else stages.pass_seconds[layer]
                head = layer + 1
                if action is Action.KEEP_INPUT:
                    inputs.add(layer)
        place += 1
    assert turn == 0
    return seconds, most


def compare(stages, memory):
    """Check the table against the search for one memory; return whether anything fits."""
    best = search(stages, memory)
    table = RotorTable(stages, memory)
    fits = [bound for bound in table.bounds() if bound <= memory]
    assert bool(fits) == (best is not None), (stages, memory)
    if best is None:
        return False
    operations = table.operations(memory)
    seconds, most = run(stages, operations)
    assert most <= memory
    assert seconds == operations_seconds(stages, operations) == best, (stages, memory)
    return True


@pytest.mark.parametrize("make", [random_paper_chain, random_chain])
def test_table_equals_the_search_over_persistent_schedules(make):
    rng = random.Random(make.__name__)
    results = []
    for _ in range(CHAINS):
        stages = make(rng)
        results.append(compare(stages, rng.randint(1, max(2, stages.plain_bytes + 2))))
    assert CHAINS / 3 < sum(results) < CHAINS


def test_the_comparison_can_fail(monkeypatch):
    monkeypatch.setattr(RotorTable, "_keep", lambda self, s, t: self._costs[s, t] + float("inf"))
    with pytest.raises(AssertionError):
        test_table_equals_the_search_over_persistent_schedules(random_paper_chain)


def test_bounds_are_the_least_memory_for_every_time():
    rng = random.Random(5)
    for _ in range(60):
        stages = random_paper_chain(rng)
        table = RotorTable(stages, stages.plain_bytes)
        bounds = table.bounds()
        times = [run(stages, table.operations(bound))[0] for bound in bounds]
        assert times == sorted(set(times), reverse=True)
        assert times[-1] == sum(stages.first_seconds) + sum(stages.backward_seconds)
        for bound, seconds in zip(bounds, times, strict=True):
            assert search(stages, bound) == seconds
            lower = search(stages, bound - 1)
            assert lower is None or lower > seconds


def test_more_memory_than_plain_training_needs_changes_nothing():
    stages = random_paper_chain(random.Random(3))
    operations, _ = rotor_operations(stages, stages.plain_bytes + 7, slots=10**6)
    assert operations == keep_everything(len(stages))
    assert run(stages, operations)[1] == stages.plain_bytes


def test_rounding_up_keeps_within_the_memory():
    rng = random.Random(11)
    for _ in range(100):
        stages = random_paper_chain(rng)
        grown = replace(
            stages,
            **{
                name: tuple(997 * size for size in getattr(stages, name))
                for name in (
                    "outputs",
                    "gradients",
                    "saved",
                    "pass_bytes",
                    "keep_bytes",
                    "leaf_bytes",
                    "backward_bytes",
                )
            },
        )
        memory = rng.randint(1, grown.plain_bytes + 1)
        try:
            operations, seconds = rotor_operations(grown, memory, slots=30)
        except InfeasibleBudgetError as error:
            assert_least_is_enough(grown, memory, error)
            continue
        assert run(grown, operations)[0] == seconds
        assert run(grown, operations)[1] <= memory


def assert_least_is_enough(stages, memory, error):
    assert error.budget_bytes == memory < error.least_bytes
    operations, _ = rotor_operations(stages, error.least_bytes, slots=30)
    assert run(stages, operations)[1] <= error.least_bytes


@pytest.mark.parametrize("checkpoints", [1, 2, 3, 5, 9])
def test_rotor_is_no_slower_than_revolve_in_the_same_memory(checkpoints):
    n = 20
    stages = paper_stages(
        forward_seconds=[1] * n,
        backward_seconds=[2] * n,
        outputs=[10] * (n + 1),
        inside=[25] * n,
        gradients=[0] * (n + 1),
    )
    seconds, most = run(stages, revolve_operations(n, checkpoints))
    assert rotor_operations(stages, most, slots=most)[1] <= seconds


def test_falling_fit_is_the_best():
    rng = random.Random(2)
    for _ in range(400):
        points = [rng.randint(0, 3) for _ in range(rng.randint(1, 6))]
        fit = _falling_fit(points)
        assert all(a >= b for a, b in pairwise(fit))
        rows = [row for row in product(range(4), repeat=len(points)) if all(a >= b for a, b in pairwise(row))]
        least = min(sum(abs(a - b) for a, b in zip(points, row, strict=True)) for row in rows)
        assert sum(abs(a - b) for a, b in zip(points, fit, strict=True)) == least


def marked_chain(seed):
    """Return a random chain of blocks with its backward pass, with pinned and random ops and gradients of weights."""
    rng = random.Random(seed)
    builder = GraphBuilder()
    x = builder.add_input("x", 10)
    blocks, results = [], []
    for k in range(rng.randint(3, 9)):
        inside, value = [], x
        for j in range(rng.randint(1, 3)):
            marks = rng.choice(({}, {}, {}, {"pinned": "it has an effect"}, {"random": True, "replay_bytes": 2}))
            outputs = [(f"v{k}.{j}", rng.randint(0, 40))] + (
                [(f"m{k}.{j}", rng.randint(0, 9))] if rng.random() < 0.3 else []
            )
            made = builder.add_op(
                f"f{k}.{j}",
                [value, x] if rng.random() < 0.4 else [value],
                outputs,
                seconds=rng.randint(0, 5),
                workspace_bytes=rng.choice((0, 0, 25)),
                **marks,
            )
            inside += [value, *made[1:]]
            value = made[0]
        blocks.append([*inside, value])
        x = value
        if rng.random() < 0.2:
            results.append(value)
    builder.begin_backward()
    (gradient,) = builder.add_op("loss", [x], [("g", 10)])
    for k in reversed(range(len(blocks))):
        reads = [value for value in blocks[k] if rng.random() < 0.7]
        if rng.random() < 0.1:
            reads.append(rng.choice(rng.choice(blocks)))
        outputs = [(f"g{k}", rng.randint(0, 40))] + ([(f"w{k}", rng.randint(0, 20))] if rng.random() < 0.5 else [])
        made = builder.add_op(f"b{k}", [gradient, *dict.fromkeys(reads)], outputs, seconds=rng.randint(0, 9))
        gradient, results = made[0], results + list(made[1:])
    return builder.build(outputs=[*results, gradient]), builder.costs()


def random_operations(rng, first, last):
    """Return any operations that go through the layers from `first` to `last`."""
    if first == last:
        return [Operation(Action.KEEP_ALL, first), Operation(Action.BACKWARD, first)]
    if rng.random() < 0.4:
        rest = random_operations(rng, first + 1, last)
        return [Operation(Action.KEEP_ALL, first), *rest, Operation(Action.BACKWARD, first)]
    split = rng.randint(first + 1, last)
    ahead = [Operation(Action.PASS, layer) for layer in range(first + 1, split)]
    return [
        Operation(Action.KEEP_INPUT, first),
        *ahead,
        *random_operations(rng, split, last),
        *random_operations(rng, first, split - 1),
    ]


def test_all_operations_give_legal_schedules():
    rng = random.Random(8)
    for seed in range(300):
        graph, costs = marked_chain(seed)
        pieces = pieces_of(graph, costs, rng.choice((3, 5, 100)))
        assert [op for piece in pieces.pieces for op in piece.forward] == list(graph.forward)
        assert [op for piece in reversed(pieces.pieces) for op in piece.backward] == list(graph.backward)
        operations = random_operations(rng, 0, len(pieces) - 1)
        schedule = emit(pieces, operations)
        verify(graph, schedule)
        assert [op for op in schedule.backward if not graph.is_forward(op)] == list(graph.backward)
        assert emit(pieces, keep_everything(len(pieces))) == Schedule.keep_all(graph)


def test_planner_keeps_its_promises_on_marked_chains():
    met = 0
    for seed in range(60):
        graph, costs = marked_chain(seed)
        peak = Problem(graph, costs, 1).baseline.peak_bytes
        for share in (100, 85, 60):
            problem = Problem(graph, costs, max(1, peak * share // 100))
            if QUICK.supports(problem) is not None:
                continue
            plan = solve(problem, QUICK, throw=False)
            if plan.outcome is Outcome.OVER_BUDGET:
                again = solve(Problem(graph, costs, plan.peak_bytes), QUICK)
                assert again.peak_bytes <= plan.peak_bytes
            elif share == 100:
                assert plan.overhead == 0
            else:
                met += 1
    assert met > 20


def test_model_of_a_plain_chain_is_the_simulator():
    rng = random.Random(4)
    sizes = [rng.randint(1, 50) for _ in range(12)]
    graph, costs = samples.training_chain(12, sizes=sizes, seconds=[rng.randint(1, 9) for _ in range(12)])
    problem = Problem(graph, costs, 1)
    pieces = pieces_of(graph, costs, 100)
    stages = profile(pieces, costs)
    for _ in range(200):
        operations = random_operations(rng, 0, len(pieces) - 1)
        trace = problem.price(emit(pieces, operations))
        seconds, most = run(stages, operations)
        assert trace.seconds == seconds
        assert trace.peak_bytes <= most


@pytest.mark.parametrize("share", [80, 50, 30, 15])
def test_planner_on_long_chains(share):
    graph, costs = samples.training_chain(60)
    peak = Problem(graph, costs, 1).baseline.peak_bytes
    plan = solve(Problem(graph, costs, peak * share // 100), QUICK)
    assert plan.overhead < {80: 0.09, 50: 0.19, 30: 0.26, 15: 0.45}[share]


def test_merged_chains_stay_within_the_limit():
    graph, costs = samples.skip_chain(300)
    pieces = pieces_of(graph, costs, 25)
    assert 15 <= len(pieces) <= 25
    peak = Problem(graph, costs, 1).baseline.peak_bytes
    plan = solve(Problem(graph, costs, peak // 5), Rotor(slots=60, max_pieces=25))
    assert plan.overhead < 0.4


def test_values_that_backward_does_not_read_are_no_borders():
    builder = GraphBuilder()
    value = builder.add_input("x", 100)
    read = []
    for k in range(6):
        (unread,) = builder.add_op(f"sum{k}", [value], [(f"s{k}", 100)])
        read += builder.add_op(f"relu{k}", [unread], [(f"r{k}", 100)])
        value = read[-1]
    builder.begin_backward()
    (gradient,) = builder.add_op("loss", [value], [("g", 100)])
    for k in reversed(range(6)):
        (gradient,) = builder.add_op(f"b{k}", [gradient, read[k]], [(f"g{k}", 100)])
    graph, costs = builder.build(outputs=[gradient]), builder.costs()
    pieces = pieces_of(graph, costs, 100)
    # The last sum stays a border, for no value behind it can stand for it.
    assert [piece.value for piece in pieces.pieces] == [*read[:-1], unread, None]
    # Plain training holds the six values that are read, the gradient and the next one; the model holds that sum too.
    assert Problem(graph, costs, 1).baseline.peak_bytes == 800
    assert profile(pieces, costs).plain_bytes == 900


def test_refusals():
    for graph, costs in (samples.chain(5), samples.training_chain(1)):
        with pytest.raises(PlannerRefusedError, match="it needs"):
            solve(Problem(graph, costs, 10**6), Rotor())


def test_bad_figures():
    stages = random_paper_chain(random.Random(0))
    with pytest.raises(InvalidOptionError, match="figures of saved"):
        replace(stages, saved=(1,) * (len(stages) + 1))
    with pytest.raises(InvalidOptionError, match="at least 0"):
        replace(stages, saved=(-1,) * len(stages))
    with pytest.raises(InvalidOptionError, match="its input comes first"):
        paper_stages(forward_seconds=[1, 1], backward_seconds=[1, 1], outputs=[1, 1])
    with pytest.raises(InvalidOptionError, match="at least 1 and 8"):
        rotor_operations(stages, 0)
    with pytest.raises(InvalidOptionError, match="at least 1 and 2"):
        Rotor(slots=0)
    with pytest.raises(InvalidOptionError, match="at least one"):
        Stages(**dict.fromkeys(Stages.__dataclass_fields__, ()))
