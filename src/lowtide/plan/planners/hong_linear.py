"""`hong_linear`: the checkpoints with the least peak of a chain, when each is freed as soon as backward has passed it.

Paper: Hong, Tsai, Wang, Liu, Wu, "GPU Memory Usage Optimization for Backward Propagation in Deep Network Training",
2025 (dynamic checkpoint selection). Memory model, for the segment between checkpoints i < j while backward is in it:
all checkpoints up to i, the outputs of its layers up to j, and either one buffer for the largest gradient ("buffer") or
what is alive layer by layer ("exact", or "exact_output" if the segment's last output is recomputed too). Every dropped
output is recomputed once. Optimal in that model; time is no part of it, and neither is the budget. Cost: linear.

The recurrence is M(i) = d(i) + min over j > i of max(U(i, j), M(j)): the peak of all from checkpoint i on, where U is
what the segment takes. Why a queue of candidates j finds every minimum in constant time on average:

1. U(i, j) grows with j and as i falls, for each of the three costs, with and without bytes inside layers.
2. If j < k and M(j) <= M(k), then j serves every i < j at least as well as k. So M falls along the queue.
3. If p < c and U(i, p) >= M(p), then for i and every smaller index max(U, M) of p is U(i, p) <= U(i, c): c may go.
4. After that U(i, p) < M(p) for the last but one candidate p. All before p cost more than M(p), so only p and the last
   candidate c compete.
5. Each j enters and leaves the queue once, and c and p only move down, so the maxima inside U are sliding windows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from lowtide.errors import InvalidOptionError
from lowtide.graph.analysis import chain_of
from lowtide.plan.core.best_schedule import best_of
from lowtide.plan.core.planner import AbstractPlanner, Proposal
from lowtide.plan.core.problem import Problem
from lowtide.plan.planners.chain_dp.layers import check_layers, checkpoint_links, layers_of, no_chain
from lowtide.progress import Progress, silent
from lowtide.schedule.expand import expand

COSTS = ("buffer", "exact", "exact_output")


@dataclass(frozen=True, kw_only=True)
class HongLinear(AbstractPlanner):
    """Keep the checkpoints with the least peak in the paper's model.

    Attributes:
        cost: What a segment takes: "buffer", "exact" or "exact_output" (see the module), or "all" to try each and take
            the one that the simulator finds best.
    """

    cost: str = "all"

    def __post_init__(self) -> None:
        """Check the options."""
        if self.cost not in (*COSTS, "all"):
            raise InvalidOptionError(f"The cost is {self.cost!r}; it must be one of {', '.join(COSTS)} or all.")

    def supports(self, problem: Problem) -> str | None:
        """Return why there is no chain to cut, or None."""
        if problem.graph.boundary is None:
            return "it needs a graph with a forward and a backward phase"
        return no_chain(len(chain_of(problem.graph, problem.costs).links) - 1)

    def propose(self, problem: Problem, progress: Progress = silent) -> Proposal:
        """Return the schedule that keeps the checkpoints; of several variants the fastest that fits."""
        del progress
        chain = chain_of(problem.graph, problem.costs)
        sizes, inside = layers_of(chain)
        chosen = [
            linear_checkpoints(sizes, inside, cost=cost, loss_gradient=loss_gradient)[0]
            for cost in (COSTS if self.cost == "all" else (self.cost,))
            for loss_gradient in (False, True)
        ]
        kept = [chain.kept(checkpoint_links(chain, checkpoints)) for checkpoints in dict.fromkeys(chosen)]
        return Proposal(best_of(problem, (expand(problem.graph, values) for values in kept)))


def linear_checkpoints(
    sizes: Sequence[int], inside: Sequence[int] | None = None, *, cost: str = "buffer", loss_gradient: bool = False
) -> tuple[tuple[int, ...], int]:
    """Return the checkpoints of a chain with the least peak, and that peak in bytes, in linear time.

    Example:
        ```python
        linear_checkpoints([0, 10, 10, 10, 10, 10])
        #> ((2, 4), 40)
        ```

    Args:
        sizes: Bytes of the chain's input and of every layer's output.
        inside: Bytes inside every layer that exist only while its segment is materialised; none by default.
        cost: What a segment takes: "buffer", "exact" or "exact_output".
        loss_gradient: Whether the last layer's output and its gradient are there together when backward begins.

    Returns:
        The layers whose output is kept, without the input and the last layer, and the peak.
    """
    terms = _terms(sizes, inside, cost)
    peaks, following = _recurrence(terms, terms.sizes[-1] * (2 if loss_gradient else 1))
    last = len(terms.sizes) - 1
    checkpoints, layer = [], following[0]
    while layer < last:
        checkpoints.append(layer)
        layer = following[layer]
    return tuple(checkpoints), peaks[0]


def linear_peak(
    sizes: Sequence[int],
    checkpoints: Iterable[int],
    inside: Sequence[int] | None = None,
    *,
    cost: str = "buffer",
    loss_gradient: bool = False,
) -> int:
    """Return the peak that `checkpoints` have in the model that `linear_checkpoints` minimises."""
    terms = _terms(sizes, inside, cost)
    last = len(terms.sizes) - 1
    borders = [0, *sorted(set(checkpoints) - {0, last}), last]
    kept = accumulate(terms.sizes[layer] for layer in borders)
    peaks = [before + _segment(terms, i, j) for before, i, j in zip(kept, borders, borders[1:], strict=False)]
    return max(*peaks, sum(terms.sizes[layer] for layer in borders) + (terms.sizes[-1] if loss_gradient else 0))


class _Terms(NamedTuple):
    """A segment cost in the form that sliding windows need.

    U(i, j) is `ends[j] - made[i]` and the largest of `keys` from layer `i + skip` to `j - 1`: their sum if `adds`, else
    the larger of `ends[j]` and that key, less `made[i]`.

    Attributes:
        sizes: Bytes of every layer's output.
        made: Bytes of all outputs and insides up to every layer.
        ends: The part of U that belongs to j.
        keys: The terms of which U takes the largest.
        adds: Whether the largest key comes on top of the rest.
    """

    sizes: list[int]
    made: list[int]
    ends: list[int]
    keys: list[int]
    adds: bool

    @property
    def skip(self) -> int:
        """0 if the window of keys begins with the segment's own checkpoint, 1 if it begins after it."""
        return 0 if self.adds else 1


def _terms(sizes: Sequence[int], inside: Sequence[int] | None, cost: str) -> _Terms:
    if cost not in COSTS:
        raise InvalidOptionError(f"The cost of a segment is {cost!r}; it must be one of {', '.join(COSTS)}.")
    outputs, insides = check_layers(sizes, inside)
    made = list(accumulate((a + b for a, b in zip(outputs[1:], insides[1:], strict=True)), initial=0))
    if cost == "buffer":
        return _Terms(outputs, made, made, outputs, adds=True)
    # While backward is in layer k: all made up to k, the gradient of its output and that of its input.
    before = [0, *outputs]
    keys = [total + size + previous for total, size, previous in zip(made, outputs, before, strict=False)]
    ends = [key - size for key, size in zip(keys, outputs, strict=True)] if cost == "exact" else keys
    return _Terms(outputs, made, ends, keys, adds=False)


def _segment(terms: _Terms, i: int, j: int) -> int:
    """Return U(i, j)."""
    largest = max(terms.keys[i + terms.skip : j], default=0)
    return (terms.ends[j] + largest if terms.adds else max(terms.ends[j], largest)) - terms.made[i]


def _recurrence(terms: _Terms, last_peak: int) -> tuple[list[int], list[int]]:
    """Return M and, for every layer, the checkpoint that follows if this layer is one."""
    sizes, made, ends, keys, adds = terms
    skip, n = terms.skip, len(sizes) - 1
    peaks, following = [0] * n + [last_peak], [n] * (n + 1)
    # Candidates j, the largest first; those before `head` are gone.
    queue: list[int] = []
    head = 0
    # Layers whose key is larger than all keys to the left of it. The largest key of a window that ends before c is the
    # first entry below c; `at_c` and `at_p` are where that was found last, and only move on as c and p fall.
    stack: list[int] = []
    at_c = at_p = 0
    for i in range(n - 1, -1, -1):
        peak = peaks[i + 1]
        while len(queue) > head and peaks[queue[-1]] >= peak:
            queue.pop()
        queue.append(i + 1)
        if i + skip < n:
            key = keys[i + skip]
            while stack and keys[stack[-1]] <= key:
                stack.pop()
            stack.append(i + skip)
        top, base = len(stack), made[i]
        if at_c >= top:
            at_c = max(0, top - 1)
        if at_p >= top:
            at_p = max(0, top - 1)
        while True:
            c = queue[head]
            while at_c < top and stack[at_c] >= c:
                at_c += 1
            largest = keys[stack[at_c]] if at_c < top else 0
            end = ends[c]
            best = end + largest - base if adds else (end if end > largest else largest) - base
            if best < peaks[c]:
                best = peaks[c]
            if len(queue) - head == 1:
                break
            p = queue[head + 1]
            while at_p < top and stack[at_p] >= p:
                at_p += 1
            largest = keys[stack[at_p]] if at_p < top else 0
            end = ends[p]
            if (end + largest if adds else end if end > largest else largest) - base >= peaks[p]:
                head += 1
                at_c = at_p
                continue
            if best > peaks[p]:
                best, c = peaks[p], p
            break
        peaks[i] = sizes[i] + best
        following[i] = c
    return peaks, following
