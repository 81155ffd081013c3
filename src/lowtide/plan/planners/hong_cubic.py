"""`hong_cubic`: the checkpoints of a chain with the least sum of checkpoints and largest segment.

Paper: Hong, Tsai, Wang, Liu, Wu, "GPU Memory Usage Optimization for Backward Propagation in Deep Network Training",
2025 (checkpoint selection). Memory model: all checkpoints are there during the whole of backward, and one segment at a
time comes on top. A segment takes the outputs between its checkpoints ("outputs"), or these and one buffer for the
largest gradient ("gradient"); between neighbouring checkpoints it takes nothing. Every dropped output is recomputed
once. Optimal in that model; time is no part of it, and neither is the budget.

1. The largest segment of the best answer is one of the O(n^2) possible segments. Take each as a bound.
2. For a bound, the least bytes of checkpoints such that no segment is larger follow from
   T(i) = min of d(j) + T(j - 1) over the j from which layer i + 1 can be reached within the bound. The j are a sliding
   window and the minimum is at the front of a monotone queue: O(n).
3. The answer is the best sum of T(n) and the largest segment that was really used.

O(n^3) at worst. T falls as the bound grows, so a whole range of bounds is skipped when its smallest bound and the T of
its largest one together are no better than what has been found; the answer stays the best one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from lowtide.errors import InvalidOptionError
from lowtide.graph.analysis import chain_of
from lowtide.plan.core.best_schedule import best_of
from lowtide.plan.core.options import check_numbers
from lowtide.plan.core.planner import AbstractPlanner, Proposal
from lowtide.plan.core.problem import Problem
from lowtide.plan.planners.chain_dp.layers import check_layers, checkpoint_links, layers_of, no_chain
from lowtide.progress import Progress, silent
from lowtide.schedule.expand import expand

COSTS = ("outputs", "gradient")


@dataclass(frozen=True, kw_only=True)
class HongCubic(AbstractPlanner):
    """Keep the checkpoints with the least sum of checkpoints and largest segment.

    Attributes:
        cost: What a segment takes: "outputs" or "gradient" (see the module), or "both" to try each and take the one
            that the simulator finds best.
        max_links: Largest number of links that is served.
    """

    cost: str = "both"
    max_links: int = 2000

    def __post_init__(self) -> None:
        """Check the options."""
        check_numbers(self)
        if self.cost not in (*COSTS, "both"):
            raise InvalidOptionError(f"The cost is {self.cost!r}; it must be one of {', '.join(COSTS)} or both.")

    def supports(self, problem: Problem) -> str | None:
        """Return why there is no chain to cut, or by how much it is too long, or None."""
        if problem.graph.boundary is None:
            return "it needs a graph with a forward and a backward phase"
        links = len(chain_of(problem.graph, problem.costs).links)
        if links > self.max_links:
            return f"it serves chains of up to {self.max_links} links and this one has {links}; hong_linear serves more"
        return no_chain(links - 1)

    def propose(self, problem: Problem, progress: Progress = silent) -> Proposal:
        """Return the schedule that keeps the checkpoints; of both costs the faster that fits."""
        del progress
        chain = chain_of(problem.graph, problem.costs)
        sizes, inside = layers_of(chain)
        chosen = [
            cubic_checkpoints(sizes, inside, cost=cost)[0] for cost in (COSTS if self.cost == "both" else (self.cost,))
        ]
        kept = [chain.kept(checkpoint_links(chain, checkpoints)) for checkpoints in dict.fromkeys(chosen)]
        return Proposal(best_of(problem, (expand(problem.graph, values) for values in kept)))


def cubic_checkpoints(
    sizes: Sequence[int], inside: Sequence[int] | None = None, *, cost: str = "outputs"
) -> tuple[tuple[int, ...], int]:
    """Return the checkpoints with the least sum of their bytes and the largest segment, and that sum.

    Example:
        ```python
        cubic_checkpoints([0, 10, 10, 10, 10, 10])
        #> ((3,), 30)
        ```

    Args:
        sizes: Bytes of the chain's input and of every layer's output.
        inside: Bytes inside every layer that exist only while its segment is materialised; none by default.
        cost: What a segment takes: "outputs" or "gradient".
    """
    rows = _rows(sizes, inside, cost)
    bounds = _bounds(rows)
    best: tuple[int, tuple[int, ...]] | None = None

    def try_bound(index: int) -> int:
        nonlocal best
        least, checkpoints = _least_checkpoints(rows, bounds[index])
        value = least + _largest_segment(rows, checkpoints)
        if best is None or value < best[0]:
            best = value, checkpoints
        return least

    def worth_trying(low: int, least: int) -> bool:
        return best is None or bounds[low] + least < best[0]

    # Ranges of bounds that have not been tried, each with the T of the next larger bound, which none of it goes below.
    ranges = [(0, len(bounds) - 1, try_bound(len(bounds) - 1))]
    while ranges:
        low, high, least = ranges.pop()
        if low < high and worth_trying(low, least):
            middle = (low + high) // 2
            ranges += [(middle + 1, high, least), (low, middle, try_bound(middle))]
    assert best is not None
    return best[1], best[0]


def cubic_cost(
    sizes: Sequence[int], checkpoints: Iterable[int], inside: Sequence[int] | None = None, *, cost: str = "outputs"
) -> int:
    """Return what `checkpoints` cost in the model that `cubic_checkpoints` minimises."""
    rows = _rows(sizes, inside, cost)
    chosen = tuple(sorted(set(checkpoints) - {0}))
    return sum(rows.sizes[layer] for layer in chosen) + _largest_segment(rows, chosen)


class _Rows(NamedTuple):
    """The chain, with a layer of no bytes behind the last one at which the last segment ends.

    Attributes:
        sizes: Bytes of every layer's output.
        made: Bytes of all outputs and insides up to every layer.
        gradient: Whether a segment has a gradient buffer.
    """

    sizes: list[int]
    made: list[int]
    gradient: bool

    def segment(self, left: int, right: int) -> int:
        """Return the bytes of the segment between the checkpoints `left` and `right`."""
        took = self.made[right] - self.made[left] - self.sizes[right]
        if self.gradient and right > left + 1:
            took += max(self.sizes[left:right])
        return took


def _rows(sizes: Sequence[int], inside: Sequence[int] | None, cost: str) -> _Rows:
    if cost not in COSTS:
        raise InvalidOptionError(f"The cost of a segment is {cost!r}; it must be one of {', '.join(COSTS)}.")
    outputs, insides = check_layers(sizes, inside)
    made = list(accumulate((a + b for a, b in zip(outputs[1:], insides[1:], strict=True)), initial=0))
    return _Rows([*outputs, 0], [*made, made[-1]], cost == "gradient")


def _bounds(rows: _Rows) -> list[int]:
    """Return the bytes of all segments, ascending, each once, from the least one within which all layers can run."""
    sizes, made = np.array(rows.sizes, dtype=np.int64), np.array(rows.made, dtype=np.int64)
    found = []
    for left in range(len(sizes) - 1):
        took = made[left + 1 :] - made[left] - sizes[left + 1 :]
        if rows.gradient:
            took[1:] += np.maximum.accumulate(sizes[left:-1])[1:]
        found.append(took)
    # Between neighbours there are only the bytes inside one layer, and no choice of checkpoints gets around them.
    needed = max(int(took[0]) for took in found)
    bounds = np.unique(np.concatenate(found))
    return [int(bound) for bound in bounds[bounds >= needed]]


def _least_checkpoints(rows: _Rows, bound: int) -> tuple[int, tuple[int, ...]]:
    """Return T(n) for `bound` and the checkpoints that reach it."""
    sizes, made, gradient = rows
    layers = len(sizes) - 2
    least, chosen = [0] * (layers + 1), [0] * (layers + 1)
    # What choosing layer j as the last checkpoint costs; 0 stands for none.
    prices = [0] * (layers + 1)
    window: deque[int] = deque([0])
    # Layers of the window whose output is larger than all outputs after it.
    largest: deque[int] = deque([0])
    left = 0
    for i in range(1, layers + 1):
        price = prices[i] = least[i - 1] + sizes[i]
        while window and price < prices[window[-1]]:
            window.pop()
        window.append(i)
        while largest and sizes[largest[-1]] <= sizes[i]:
            largest.pop()
        largest.append(i)
        room = bound + sizes[i + 1] - made[i + 1]
        while (sizes[largest[0]] if gradient and left < i else 0) - made[left] > room:
            left += 1
            if largest[0] < left:
                largest.popleft()
        while window[0] < left:
            window.popleft()
        least[i], chosen[i] = prices[window[0]], window[0]
    checkpoints, layer = [], layers
    while chosen[layer]:
        checkpoints.append(chosen[layer])
        layer = chosen[layer] - 1
    return least[layers], tuple(reversed(checkpoints))


def _largest_segment(rows: _Rows, checkpoints: Sequence[int]) -> int:
    borders = [0, *checkpoints, len(rows.sizes) - 1]
    return max(rows.segment(left, right) for left, right in pairwise(borders))
