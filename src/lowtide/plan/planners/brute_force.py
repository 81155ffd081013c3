"""`brute_force`: the least seconds over all schedules whose first runs are in the given order. An oracle for tests.

Memory model: the simulator's, in full: workspace, outputs and handovers, generator states, pinned ops, outputs of first
runs only. Optimal: every op may run any number of times. Method: shortest path over states (next first run, what is
alive), in which something is dropped only when the next run would not fit, and then no more than needed: keeping more
never hurts later. Cost: exponential in the number of values, so it refuses graphs above `max_ops` and `max_values`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from lowtide.graph.costs import Costs
from lowtide.graph.ir import Graph, OpId
from lowtide.plan.core.options import check_numbers
from lowtide.plan.core.planner import AbstractPlanner, Proposal
from lowtide.plan.core.problem import Problem
from lowtide.progress import Progress, silent
from lowtide.schedule.steps import Schedule

# A set of items, one bit each: values that ops produce, and generator states kept for a replay.
Items = int


@dataclass(frozen=True, kw_only=True)
class BruteForce(AbstractPlanner):
    """Search all schedules of a tiny graph.

    Attributes:
        max_ops: Largest number of ops that is served.
        max_values: Largest number of values that is served.
    """

    max_ops: int = 12
    max_values: int = 16

    def __post_init__(self) -> None:
        """Check the options."""
        check_numbers(self)

    def supports(self, problem: Problem) -> str | None:
        """Return by how much the graph is too large, or None."""
        ops, values = len(problem.graph.ops), len(problem.graph.values)
        if ops > self.max_ops or values > self.max_values:
            return (
                f"it serves graphs of up to {self.max_ops} ops and {self.max_values} values; this one has {ops} and "
                f"{values}"
            )
        return None

    def propose(self, problem: Problem, progress: Progress = silent) -> Proposal:
        """Return the fastest schedule that fits, else one with the least peak there is."""
        del progress
        machine = _Machine(problem.graph, problem.costs)
        schedule = _search(machine, problem.budget_bytes)
        if schedule is None:
            return Proposal(_least_peak(machine, problem))
        return Proposal(schedule, bound=problem.overhead(problem.price(schedule)), optimal=True)


def _least_peak(machine: _Machine, problem: Problem) -> Schedule:
    """Return a schedule with the least peak, found by halving the range of budgets."""
    best = Schedule.keep_all(problem.graph)
    low, high = problem.budget_bytes, problem.baseline.peak_bytes
    while high - low > 1:
        schedule = _search(machine, (low + high) // 2)
        if schedule is None:
            low = (low + high) // 2
        else:
            best, high = schedule, problem.price(schedule).peak_bytes
    return best


class _State(NamedTuple):
    """Where a run of the graph stands.

    Attributes:
        following: The op whose first run is next.
        in_backward: Whether forward has ended.
        alive: Items that later runs can read.
        replaced: Outputs of forward whose readable instance is no longer the one that the caller receives.
    """

    following: OpId
    in_backward: bool
    alive: Items
    replaced: Items


class _Machine:
    """The graph as bit sets, and the moves between states."""

    def __init__(self, graph: Graph, costs: Costs) -> None:
        self.graph, self.costs = graph, costs
        produced = [value for value, fact in enumerate(graph.values) if fact.producer is not None]
        self._bit = {value: 1 << index for index, value in enumerate(produced)}
        self._bytes = [graph.values[value].bytes for value in produced]
        self._state: list[Items] = []
        for op in graph.ops:
            self._state.append(1 << len(self._bytes) if op.replay_bytes else 0)
            self._bytes += [op.replay_bytes] if op.replay_bytes else []
        self._reads = [self._items(op.inputs) for op in graph.ops]
        self._writes = [self._items(op.outputs) for op in graph.ops]
        self._rewrites = [self._items(graph.rewrites[op]) for op in range(len(graph.ops))]
        held = self._items(graph.outputs)
        forward = self._items(tuple(value for op in graph.forward for value in graph.ops[op].outputs))
        self._held_forward, self._held_backward = held & forward, held & ~forward
        self._due_forward = self._held_forward | self._items(graph.handovers)
        self._held_bytes = self.size(self._held_forward)

    def _items(self, values: tuple[int, ...]) -> Items:
        items = 0
        for value in values:
            items |= self._bit.get(value, 0)
        return items

    def size(self, items: Items) -> int:
        """Return the bytes of `items`."""
        return sum(size for index, size in enumerate(self._bytes) if items >> index & 1)

    def ended(self, state: _State) -> bool:
        """Whether every op has run and every output is there."""
        done = state.following == len(self.graph.ops) and state.in_backward
        return done and not self._held_backward & ~state.alive

    def moves(self, state: _State, budget: int) -> Iterator[tuple[float, OpId | None, _State]]:
        """Yield each move: seconds of repeated work, the op that runs (None at the boundary), the state after it."""
        if not state.in_backward and state.following == self.graph.num_forward:
            if not self._due_forward & ~state.alive:
                yield 0.0, None, state._replace(in_backward=True)
        elif state.following < len(self.graph.ops):
            for after in self._run(state, state.following, budget, again=False):
                yield 0.0, state.following, after
        for op in range(state.following):
            useful = self._rewrites[op] & ~state.alive
            if useful and not self.graph.ops[op].pinned:
                for after in self._run(state, op, budget, again=True):
                    yield self.costs.seconds[op], op, after

    def _run(self, state: _State, op: OpId, budget: int, *, again: bool) -> Iterator[_State]:
        """Yield the states after running `op`, one for each smallest choice of what is dropped before."""
        needed = self._reads[op] | (self._state[op] if again else 0)
        if needed & ~state.alive:
            return
        writes = self._rewrites[op] if again else self._writes[op]
        others = state.alive & ~writes
        # The instances that the caller receives are counted separately, for they cannot be dropped.
        owned = self._held_forward & ~state.replaced if state.in_backward else 0
        fresh_state = 0 if again else self._state[op]
        replaced = state.replaced | (writes & self._held_forward if state.in_backward else 0)
        needs = self.costs.workspace_bytes[op] + (self.graph.ops[op].replay_bytes if again else 0)
        needs += self.size(writes) + (self._held_bytes if state.in_backward else 0)
        optional = (others & ~needed & ~owned) | fresh_state
        excess = needs + self.size(others & ~owned) + self.size(fresh_state) - budget
        for dropped in self._smallest(optional, excess):
            yield _State(
                state.following + (not again),
                state.in_backward,
                (others | writes | fresh_state) & ~dropped,
                replaced,
            )

    def _smallest(self, optional: Items, excess: int) -> Iterator[Items]:
        """Yield the subsets of `optional` with at least `excess` bytes of which nothing can be left out."""
        if excess <= 0:
            yield 0
            return
        items = [(size, 1 << index) for index, size in enumerate(self._bytes) if optional >> index & 1 and size]
        items.sort(reverse=True)
        # Largest first: the item that reaches the excess is the smallest chosen, so none chosen before it is spare
        # unless that one is, and the set is as small as it can be.
        stack = [(0, 0, 0)]
        while stack:
            start, chosen, total = stack.pop()
            for index in range(start, len(items)):
                size, item = items[index]
                if total + size >= excess:
                    yield chosen | item
                else:
                    stack.append((index + 1, chosen | item, total + size))


def _search(machine: _Machine, budget: int) -> Schedule | None:
    """Return the schedule with the least repeated work whose peak is within `budget`, or None if there is none."""
    start = _State(0, False, 0, 0)
    came: dict[_State, tuple[_State, OpId | None]] = {}
    settled: set[_State] = set()
    best = {start: 0.0}
    order = count()
    queue = [(0.0, next(order), start)]
    while queue:
        seconds, _, state = heapq.heappop(queue)
        if state in settled:
            continue
        settled.add(state)
        if machine.ended(state):
            return _retrace(came, start, state)
        for extra, op, after in machine.moves(state, budget):
            if seconds + extra < best.get(after, float("inf")):
                best[after] = seconds + extra
                came[after] = (state, op)
                heapq.heappush(queue, (seconds + extra, next(order), after))
    return None


def _retrace(came: dict[_State, tuple[_State, OpId | None]], start: _State, end: _State) -> Schedule:
    forward: list[OpId] = []
    backward: list[OpId] = []
    state = end
    while state != start:
        state, op = came[state]
        if op is not None:
            (backward if state.in_backward else forward).append(op)
    return Schedule(tuple(reversed(forward)), tuple(reversed(backward)))
