"""`chen_recursive`: keep k borders, recompute one segment at a time, and treat each segment in the same way.

Paper: Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016, section 4.4: g(n) = k +
g(n / (k + 1)), so k log(n) / log(k + 1) outputs are alive, and log2(n) for k = 1. Memory model: outputs of layers on a
chain, all of equal size. Not optimal; memory logarithmic in depth for at most n log(n) + n runs of layers. Cost:
O(n log n) for each plan, about 50 plans by default for some hundred links.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from lowtide.errors import InvalidOptionError
from lowtide.graph.analysis import Chain, chain_of
from lowtide.graph.ir import OpId
from lowtide.plan.core.best_schedule import best_of
from lowtide.plan.core.options import check_numbers
from lowtide.plan.core.planner import AbstractPlanner, Proposal
from lowtide.plan.core.problem import Problem
from lowtide.plan.planners.chain_dp.layers import no_chain
from lowtide.progress import Progress, silent
from lowtide.schedule.mirror import mirror
from lowtide.schedule.steps import Schedule

_NEXT_BORDERS = 1.5


class Run(NamedTuple):
    """One run of a layer, forward or backward."""

    layer: int
    backward: bool


def recursive_runs(n: int, k: int) -> tuple[Run, ...]:
    """Return the runs of `n` layers: forward, then backward with everything it takes to have each layer's input.

    Forward passes keep the `k` borders of the last segment, the `k` borders of the last part of that, and so on; each
    other segment is run again up to its last border when backward comes to it, and its parts are treated likewise.

    Example:
        ```python
        [run.layer for run in recursive_runs(4, 1)]  # backward from the fifth run on; layer 0 runs twice
        #> [0, 1, 2, 3, 3, 2, 0, 1, 0]
        ```
    """
    check_borders(k)
    runs = [Run(layer, False) for layer in range(n)]
    segments = [(0, n, True)] if n else []
    while segments:
        first, end, is_new = segments.pop()
        borders = _borders(range(n + 1), first, end, k)
        if not borders:
            runs.append(Run(first, True))
            continue
        if not is_new:
            runs += [Run(layer, False) for layer in range(first, borders[-1])]
        # What the forward pass left behind serves the last part; the parts before it have to be run again.
        parts = list(pairwise((first, *borders, end)))
        segments += [(*part, False) for part in parts[:-1]] + [(*parts[-1], is_new)]
    return tuple(runs)


class Levels(NamedTuple):
    """Mirror counts along a chain: of the value at the end of each link, and of everything else made in it."""

    ends: tuple[int, ...]
    insides: tuple[int, ...]


def recursive_levels(weights: Sequence[int], k: int, depth: int | None = None) -> Levels:
    """Return how often each link is run again in a recursion with `k` borders, at most `depth` times into itself.

    Segments are cut into parts of equal weight. A border made in the forward pass has level 0; one that is made when
    its segment is recomputed has the level of the segment. A segment that is not cut further is recomputed whole.
    """
    check_borders(k)
    n = len(weights)
    places = [0, *accumulate(weights)]
    ends, insides = [0] * n, [0] * n
    segments = [(0, n, 0, 0)] if n else []
    while segments:
        first, end, level, cuts = segments.pop()
        borders = _borders(places, first, end, k) if depth is None or cuts < depth else []
        if not borders:
            insides[first:end] = [level] * (end - first)
            ends[first : end - 1] = [level] * (end - first - 1)
            continue
        for border in borders:
            ends[border - 1] = level
        parts = list(pairwise((first, *borders, end)))
        segments += [(*part, level + 1, cuts + 1) for part in parts[:-1]]
        segments.append((*parts[-1], level if level == 0 else level + 1, cuts + 1))
    return Levels(tuple(ends), tuple(insides))


def check_borders(k: int) -> None:
    """Raise `InvalidOptionError` unless `k` is a number of borders."""
    if k < 1:
        raise InvalidOptionError(f"The number of borders k is {k}; it must be at least 1.")


def _borders(places: Sequence[int], first: int, end: int, k: int) -> list[int]:
    """Return at most `k` places strictly between `first` and `end` that cut it into parts of about equal weight."""
    parts = min(k + 1, end - first)
    borders: list[int] = []
    for part in range(1, parts):
        # All is multiplied by the number of parts, so that equal distances are equal.
        goal = places[first] * (parts - part) + places[end] * part
        low, high = (borders[-1] if borders else first) + 1, end - (parts - part)
        place = bisect_left(places, goal, low, high, key=parts.__mul__)
        if place > low and goal - places[place - 1] * parts <= places[place] * parts - goal:
            place -= 1
        borders.append(place)
    return borders


@dataclass(frozen=True, kw_only=True)
class ChenRecursive(AbstractPlanner):
    """Keep k borders, and go into each segment in the same way.

    Attributes:
        k: Number of borders of each segment; 0 tries several and takes the one that the simulator finds best.
        depth: How often segments are cut again at most; 0 tries every depth, -1 is all the way down to single links.
    """

    k: int = 0
    depth: int = 0

    def __post_init__(self) -> None:
        """Check the options."""
        check_numbers(self)
        if self.k < 0:
            raise InvalidOptionError(f"The number of borders k is {self.k}; it must be at least 1, or 0 for several.")
        if self.depth < -1:
            raise InvalidOptionError(
                f"The depth is {self.depth}; it must be at least 1, or 0 to try every depth, or -1 for no limit."
            )

    def supports(self, problem: Problem) -> str | None:
        """Return why there is no chain to cut, or None."""
        if problem.graph.boundary is None:
            return "it needs a graph with a forward and a backward phase"
        return no_chain(len(chain_of(problem.graph, problem.costs).links) - 1)

    def propose(self, problem: Problem, progress: Progress = silent) -> Proposal:
        """Return the fastest schedule that fits, or the one with the least peak."""
        chain = chain_of(problem.graph, problem.costs)
        weights = _weights(chain)
        plans = dict.fromkeys(recursive_levels(weights, k, depth) for k, depth in self._variants(len(weights)))
        progress(f"chen_recursive: pricing {len(plans)} plans")
        return Proposal(best_of(problem, (_schedule(chain, levels) for levels in plans)))

    def _variants(self, n: int) -> Iterator[tuple[int, int | None]]:
        """Yield the numbers of borders and depths to try on `n` links."""
        for k in (self.k,) if self.k else _border_counts(n):
            if self.depth:
                yield k, self.depth if self.depth > 0 else None
                continue
            for depth in range(1, math.ceil(math.log(n, k + 1))):
                yield k, depth
            yield k, None


def _border_counts(n: int) -> Iterator[int]:
    """Yield numbers of borders from 1 to that of all cut points, at first all and then ever fewer."""
    k = 1
    while k < n - 1:
        yield k
        k = max(k + 1, int(k * _NEXT_BORDERS))
    yield n - 1


def _weights(chain: Chain) -> list[int]:
    """Return a weight for every link: half its share of the bytes, half that of one link among all.

    Parts of equal bytes serve uneven networks; the other half keeps the recursion from going deeper than O(log n).
    """
    ops, values = chain.graph.ops, chain.graph.values
    made = [sum(values[value].bytes for op in link.ops for value in ops[op].outputs) for link in chain.links]
    total = sum(made) or 1
    return [size * len(made) + total for size in made]


def _schedule(chain: Chain, levels: Levels) -> Schedule:
    """Return the schedule with these levels; ambient values are kept."""
    graph = chain.graph
    counts: dict[OpId, int] = {}
    for link, end, inside in zip(chain.links, *levels, strict=True):
        counts.update(dict.fromkeys(link.ops, inside))
        if link.value is not None:
            producer = graph.values[link.value].producer
            assert producer is not None, "cut points are values that forward makes"
            counts[producer] = end
    return mirror(graph, counts, kept=chain.ambient)
