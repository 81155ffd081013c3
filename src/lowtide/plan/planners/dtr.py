"""`dtr`: run the step as an online runtime would, and evict what is cheap, large and long unused when memory is short.

Also known as: dynamic tensor rematerialization. Paper: Kirisame, Lyubomirsky, Haan, Brennan, He, Roesch, Chen, Tatlock,
"Dynamic Tensor Rematerialization", 2021. Memory model: a runtime that knows nothing of what comes, except that it hears
when a value is read for the last time. Before each op it evicts values until the op fits a threshold, the one with the
least cost / (bytes x staleness) first; what an op reads and is not there is recomputed first, recursively. Its own
bytes are at least the true ones, so the threshold is searched for outside: the fastest schedule whose simulated peak
fits. Not optimal; no bound. Cost: linear in the number of runs, times a vectorised look at all values per eviction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lowtide.errors import InvalidOptionError
from lowtide.graph.ir import Graph, OpId, ValueId
from lowtide.plan.core.best_schedule import best_priced
from lowtide.plan.core.options import check_numbers
from lowtide.plan.core.planner import AbstractPlanner, Proposal
from lowtide.plan.core.problem import Problem
from lowtide.progress import Progress, silent
from lowtide.schedule.simulate import Trace
from lowtide.schedule.steps import Schedule


@dataclass(frozen=True, slots=True)
class Links:
    """What leads where.

    Attributes:
        seconds: For every op, its time.
        producer: For every value, the op that produces it, or -1.
        reads: For every op, the values it reads that can be evicted.
        writes: For every op, the values it writes that can be evicted.
        readers: For every value, the ops that read it.
    """

    seconds: Sequence[float]
    producer: Sequence[OpId]
    reads: Sequence[Sequence[ValueId]]
    writes: Sequence[Sequence[ValueId]]
    readers: Sequence[Sequence[OpId]]


class AbstractNeighbourhood(ABC):
    """Knows, for every value that is there, the seconds that evicting it would put at stake."""

    @abstractmethod
    def evict(self, value: ValueId) -> None:
        """Note that `value`, which was there, is there no more."""

    @abstractmethod
    def restore(self, op: OpId, values: Sequence[ValueId]) -> None:
        """Note that `op` has run and that `values`, its outputs that were not there, are there now."""

    @abstractmethod
    def changed(self, there: Sequence[bool]) -> Iterator[tuple[ValueId, float]]:
        """Yield those of the values that are `there` whose seconds may have changed since the last call."""


class OwnCosts(AbstractNeighbourhood):
    """No neighbourhood: a value's seconds are those of its op."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._new: list[ValueId] = []

    def evict(self, value: ValueId) -> None:
        """Nothing changes for other values."""

    def restore(self, op: OpId, values: Sequence[ValueId]) -> None:
        """Note the values."""
        del op
        self._new += values

    def changed(self, there: Sequence[bool]) -> Iterator[tuple[ValueId, float]]:
        """Yield the values made since the last call."""
        for value in self._new:
            if there[value]:
                yield value, self._links.seconds[self._links.producer[value]]
        self._new.clear()


class Components(AbstractNeighbourhood):
    """Evicted neighbours in either direction form a component, and a value counts the components it touches.

    An op that comes back takes its seconds out of its component, which is not split: that is the approximation.
    """

    def __init__(self, links: Links) -> None:
        self._links = links
        self._out: list[set[ValueId]] = [set() for _ in links.seconds]
        self._component = [-1] * len(links.seconds)
        self._parent: list[int] = []
        self._cost: list[float] = []
        self._border: list[set[ValueId]] = []
        self._dirty: dict[ValueId, None] = {}
        self._dirty_roots: dict[int, None] = {}

    def evict(self, value: ValueId) -> None:
        """Join the components that the value's op touches now."""
        links = self._links
        op = links.producer[value]
        self._out[op].add(value)
        if self._component[op] < 0:
            self._component[op] = len(self._parent)
            self._parent.append(len(self._parent))
            self._cost.append(links.seconds[op])
            self._border.append(set())
        root = self._find(self._component[op])
        for other in self._touched(value):
            root = self._join(root, other)
        border = self._border[root]
        border.update(links.reads[op])
        for reader in links.readers[value]:
            border.update(links.writes[reader])
        self._dirty_roots[root] = None

    def restore(self, op: OpId, values: Sequence[ValueId]) -> None:
        """Take the op out of its component."""
        self._out[op].difference_update(values)
        if self._component[op] >= 0 and not self._out[op]:
            root = self._find(self._component[op])
            self._cost[root] = max(0.0, self._cost[root] - self._links.seconds[op])
            self._component[op] = -1
            self._dirty_roots[root] = None
        for value in values:
            for root in self._touched(value):
                self._border[root].add(value)
        self._dirty.update(dict.fromkeys(values))

    def changed(self, there: Sequence[bool]) -> Iterator[tuple[ValueId, float]]:
        """Yield the values that touch a component that has changed."""
        for root in self._dirty_roots:
            # What is not there is added again when it comes back.
            self._border[root] = {value for value in self._border[root] if there[value]}
            self._dirty.update(dict.fromkeys(self._border[root]))
        self._dirty_roots.clear()
        for value in self._dirty:
            if there[value]:
                own = self._links.seconds[self._links.producer[value]]
                yield value, own + sum([self._cost[root] for root in self._touched(value)])
        self._dirty.clear()

    def _touched(self, value: ValueId) -> dict[int, None]:
        links = self._links
        found: dict[int, None] = {}
        for u in links.reads[links.producer[value]]:
            other = links.producer[u]
            if u in self._out[other]:
                found[self._find(self._component[other])] = None
        for reader in links.readers[value]:
            if self._component[reader] >= 0:
                found[self._find(self._component[reader])] = None
        return found

    def _find(self, node: int) -> int:
        parent = self._parent
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    def _join(self, one: int, other: int) -> int:
        if one == other:
            return one
        if len(self._border[one]) < len(self._border[other]):
            one, other = other, one
        self._parent[other] = one
        self._cost[one] += self._cost[other]
        self._border[one] |= self._border[other]
        self._border[other] = set()
        return one


class Closures(AbstractNeighbourhood):
    """The neighbourhood itself: ops to run again to make a value, and evicted ops that need it."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._out: set[ValueId] = set()
        self._dirty: dict[ValueId, None] = {}

    def evict(self, value: ValueId) -> None:
        """Note the value and whose neighbourhood it enters."""
        self._out.add(value)
        self._soil(value)

    def restore(self, op: OpId, values: Sequence[ValueId]) -> None:
        """Note the values and whose neighbourhood they leave."""
        del op
        for value in values:
            if value in self._out:
                self._soil(value)
                self._out.discard(value)
        self._dirty.update(dict.fromkeys(values))

    def changed(self, there: Sequence[bool]) -> Iterator[tuple[ValueId, float]]:
        """Yield the values near what has changed."""
        seconds = self._links.seconds
        for value in self._dirty:
            if there[value]:
                op = self._links.producer[value]
                yield value, sum([seconds[each] for each in self._above([op]) | self._below([value])])
        self._dirty.clear()

    def _soil(self, value: ValueId) -> None:
        """Mark what borders on the evicted values around `value`."""
        links = self._links
        for op in self._above([links.producer[value]]):
            self._dirty.update(dict.fromkeys(links.reads[op]))
        for op in self._readers_below([value]):
            self._dirty.update(dict.fromkeys(links.writes[op]))

    def _above(self, start: list[OpId]) -> set[OpId]:
        """Return the ops to run so that those in `start` have run."""
        links, found, stack = self._links, set(start), start
        while stack:
            for value in links.reads[stack.pop()]:
                op = links.producer[value]
                if value in self._out and op not in found:
                    found.add(op)
                    stack.append(op)
        return found

    def _below(self, start: list[ValueId]) -> set[OpId]:
        """Return the ops with evicted values that need those in `start`, directly or through evicted values."""
        return {op for op in self._readers_below(start) if not self._out.isdisjoint(self._links.writes[op])}

    def _readers_below(self, start: list[ValueId]) -> set[OpId]:
        links, stack = self._links, start
        found: set[OpId] = set()
        while stack:
            for op in links.readers[stack.pop()]:
                if op not in found:
                    found.add(op)
                    stack += [value for value in links.writes[op] if value in self._out]
        return found


# What each score is made of: the cost, and whether bytes and staleness divide it.
_SCORES: dict[str, tuple[Callable[[Links], AbstractNeighbourhood] | None, bool, bool]] = {
    "dtr": (Closures, True, True),
    "dtr_eq": (Components, True, True),
    "local": (OwnCosts, True, True),
    "lru": (None, False, True),
    "size": (None, True, False),
}
# Thresholds to try: above the budget, for the true bytes are fewer; below it, if even so it does not fit; and shares of
# the plain peak, if nothing near the budget fits.
_ABOVE = (1.0, 1.02, 1.05, 1.1, 1.15, 1.2, 1.3)
_BELOW = (0.98, 0.95, 0.9)
_SHARES = tuple(0.94**k for k in range(1, 41))
_PATIENCE = 2
_SLIVER = 1e-9

Candidate = tuple[Schedule, Trace]


@dataclass(frozen=True, kw_only=True)
class Dtr(AbstractPlanner):
    """Evict by score, recompute when read.

    Attributes:
        heuristic: The score: "dtr" (cost with the evicted neighbourhood), "dtr_eq" (the same by disjoint sets),
            "local" (the op's own cost), "lru" (staleness alone) or "size" (bytes alone).
        thrash: Stop evicting when the step has taken this many times its plain seconds or number of ops.
    """

    heuristic: str = "dtr_eq"
    thrash: float = 3.0

    def __post_init__(self) -> None:
        """Check the options."""
        check_numbers(self)
        if self.heuristic not in _SCORES:
            raise InvalidOptionError(f"The heuristic is {self.heuristic!r}; it must be one of {', '.join(_SCORES)}.")
        if not 1 <= self.thrash < float("inf"):
            raise InvalidOptionError(f"The thrash limit is {self.thrash}; it must be a number of at least 1.")

    def propose(self, problem: Problem, progress: Progress = silent) -> Proposal:
        """Return the fastest schedule found that fits, else the one with the least peak found."""
        if problem.fits(problem.baseline):
            return Proposal(Schedule.keep_all(problem.graph), bound=0.0, optimal=True)
        found = list(self._near(problem, progress))
        if not any(problem.fits(trace) for _, trace in found):
            # These thresholds do not depend on the budget: with the least peak as the budget it is found again.
            found = list(self._far(problem, progress))
        return Proposal(best_priced(problem, found))

    def _near(self, problem: Problem, progress: Progress) -> Iterator[Candidate]:
        """Yield schedules for thresholds above the budget until they do not fit, else below it until one does."""
        fitting = vain = 0
        for factor in _ABOVE + _BELOW:
            if factor > 1 and vain == _PATIENCE:
                continue
            if factor < 1 and fitting:
                return
            candidate = self._run(problem, problem.budget_bytes * factor, progress)
            yield candidate
            fits = problem.fits(candidate[1])
            fitting, vain = fitting + fits, 0 if fits else vain + 1

    def _far(self, problem: Problem, progress: Progress) -> Iterator[Candidate]:
        """Yield schedules for falling thresholds until they lead no lower."""
        least, vain = float("inf"), 0
        for share in _SHARES:
            candidate = self._run(problem, problem.baseline.peak_bytes * share, progress)
            yield candidate
            vain = 0 if candidate[1].peak_bytes < least else vain + 1
            least = min(least, candidate[1].peak_bytes)
            if vain > _PATIENCE:
                return

    def _run(self, problem: Problem, threshold: float, progress: Progress) -> Candidate:
        progress(f"dtr: a threshold of {threshold:.0f} bytes")
        schedule = run_online(problem, threshold, heuristic=self.heuristic, thrash=self.thrash)
        return schedule, problem.price(schedule)


def run_online(problem: Problem, threshold: float, *, heuristic: str, thrash: float = 3.0) -> Schedule:
    """Return what a runtime runs that keeps its bytes within `threshold`, except where nothing can be evicted."""
    runtime = _Runtime(problem, threshold, heuristic, thrash)
    forward = problem.graph.num_forward
    for op in range(len(problem.graph.ops)):
        if op == forward:
            runtime.end_forward()
        runtime.run(op)
    cut = runtime.forward_steps if forward < len(problem.graph.ops) else len(runtime.steps)
    return Schedule(tuple(runtime.steps[:cut]), tuple(runtime.steps[cut:]))


class _Runtime:
    """What is there, since when, and what has run."""

    def __init__(self, problem: Problem, threshold: float, heuristic: str, thrash: float) -> None:
        graph, values = problem.graph, problem.graph.values
        self.graph, self.costs, self.threshold = graph, problem.costs, threshold
        self.most_seconds, self.most_steps = thrash * problem.baseline.seconds, thrash * len(graph.ops)
        self.size = [value.bytes for value in values]
        self.producer = [-1 if value.producer is None else value.producer for value in values]
        self.lasting = [_cannot_be_made_again(graph, value) for value in range(len(values))]
        self.reads = graph.reads
        # A runtime hears when the last reference to a value goes: those of ops that have not run, and the caller's.
        self.pending = [len(readers) for readers in graph.readers]
        self.locks = [0] * len(values)
        for value in (*graph.outputs, *graph.handovers):
            self.pending[value] += 1
            self.locks[value] += 1
        make, self.by_bytes, self.by_staleness = _SCORES[heuristic]
        self.neighbourhood = make(self._links()) if make else None
        self.cost = [1.0] * len(values)
        # The score without staleness; infinite for what cannot be evicted now.
        self.weight = np.full(len(values), np.inf)
        self.last_use = np.zeros(len(values))
        self.sliver = _SLIVER * problem.baseline.seconds + 1e-30
        self.there = [False] * len(values)
        self.has_run = [False] * len(graph.ops)
        self.clock, self.bytes, self.forward_steps = 0.0, 0, 0
        self.steps: list[OpId] = []
        self.temporary: list[ValueId] = []

    def _links(self) -> Links:
        return Links(
            seconds=self.costs.seconds,
            producer=self.producer,
            reads=[[value for value in reads if not self.lasting[value]] for reads in self.reads],
            writes=[[value for value in op.outputs if not self.lasting[value]] for op in self.graph.ops],
            readers=self.graph.readers,
        )

    def end_forward(self) -> None:
        """Let handovers go and begin backward."""
        self.forward_steps = len(self.steps)
        for value in self.graph.handovers:
            self._unlock(value)
            self._unreference(value)

    def run(self, op: OpId) -> None:
        """Run `op` for the first time, and before it whatever must run again."""
        frames = [self._open(op)]
        while frames:
            current, missing = frames[-1]
            if missing:
                value = missing[-1]
                if self.there[value]:
                    self._lock(value)
                    missing.pop()
                else:
                    frames.append(self._open(self.producer[value]))
                continue
            self._execute(current)
            frames.pop()
            for value in self.reads[current]:
                self._unlock(value)
        for value in self.reads[op]:
            self._unreference(value)
        # Nothing refers to these; they were made on the way to what was missing, or nothing reads them at all.
        for value in self.temporary:
            self._release(value)
        self.temporary.clear()

    def _open(self, op: OpId) -> tuple[OpId, list[ValueId]]:
        """Lock what `op` reads and is there; return the op and what is not."""
        missing = []
        for value in reversed(self.reads[op]):
            if self.there[value]:
                self._lock(value)
            else:
                missing.append(value)
        return op, missing

    def _execute(self, op: OpId) -> None:
        again = self.has_run[op]
        written = self.graph.rewrites[op] if again else self.graph.ops[op].outputs
        made = [value for value in written if not self.there[value]]
        extra = self.costs.workspace_bytes[op] + (self.graph.ops[op].replay_bytes if again else 0)
        need = sum([self.size[value] for value in made])
        self._make_room(need + extra)
        self.bytes += need
        self.has_run[op] = True
        self.steps.append(op)
        self.clock += self.costs.seconds[op]
        if self.clock > self.most_seconds or len(self.steps) > self.most_steps:
            self.threshold = float("inf")
        for value in made:
            self.there[value] = True
        if self.neighbourhood:
            self.neighbourhood.restore(op, [value for value in made if not self.lasting[value]])
        for value in (*self.reads[op], *written):
            self.last_use[value] = self.clock
        for value in made:
            if not self.pending[value]:
                self.temporary.append(value)
            self._weigh(value)

    def _make_room(self, need: int) -> None:
        while self.bytes + need > self.threshold:
            if self.neighbourhood:
                for value, cost in self.neighbourhood.changed(self.there):
                    self.cost[value] = cost
                    self._weigh(value)
            score = self.weight / (self.clock - self.last_use + self.sliver) if self.by_staleness else self.weight
            if score.min(initial=np.inf) == np.inf:
                return
            self._release(int(score.argmin()))

    def _weigh(self, value: ValueId) -> None:
        if self.lasting[value] or self.locks[value] or not self.there[value] or not self.size[value]:
            self.weight[value] = np.inf
        else:
            self.weight[value] = (self.cost[value] + self.sliver) / (self.size[value] if self.by_bytes else 1)

    def _lock(self, value: ValueId) -> None:
        self.locks[value] += 1
        self.weight[value] = np.inf

    def _unlock(self, value: ValueId) -> None:
        self.locks[value] -= 1
        if not self.locks[value]:
            self._weigh(value)

    def _unreference(self, value: ValueId) -> None:
        self.pending[value] -= 1
        if not self.pending[value]:
            self._release(value)

    def _release(self, value: ValueId) -> None:
        """Evict `value`; one that cannot be made again stays readable, for the schedule keeps it while it is read."""
        if self.producer[value] < 0 or not self.there[value]:
            return
        self.bytes -= self.size[value]
        if self.lasting[value]:
            return
        self.there[value] = False
        self.weight[value] = np.inf
        if self.neighbourhood:
            self.neighbourhood.evict(value)


def _cannot_be_made_again(graph: Graph, value: ValueId) -> bool:
    producer = graph.values[value].producer
    if producer is None:
        return True
    op = graph.ops[producer]
    return bool(op.pinned) or value in op.first_run_only
