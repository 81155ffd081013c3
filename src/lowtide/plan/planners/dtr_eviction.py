"""What bringing an evicted value back would drag along: the costs in the eviction scores of dynamic rematerialization.

Running an op again takes its own seconds and those of the ops whose evicted values it needs; and evicting a value makes
the evicted values that need it dearer. Kirisame et al. 2021 call both together its evicted neighbourhood. It is kept
here exactly (`Closures`) and by the paper's approximation with disjoint sets (`Components`), both only for values that
are there, and both updated where something changes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lowtide.graph.ir import OpId, ValueId


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
