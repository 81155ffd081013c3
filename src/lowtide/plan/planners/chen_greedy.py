"""`chen_greedy`: cut the forward pass greedily into segments that make more than B bytes, and search for the best B.

Paper: Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016, Algorithm 3 and appendix A; the
search is that of the authors' program memonger, which differs from the appendix (better budgets for deep ResNets, worse
ones for long LSTMs), followed by a scan. Memory model: outputs kept between segments plus the bytes made in the largest
segment; it only yields candidates, which the simulator ranks. Not optimal. Cost: linear for each plan, about 150 by
default.

One thing is added, because the paper does not trade memory for time: where the budget allows it, the last borders are
left out, so that everything after the last one that remains is kept and not recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from lowtide.errors import InvalidOptionError
from lowtide.graph.analysis import Chain, chain_of
from lowtide.plan.core.best_schedule import best_of
from lowtide.plan.core.options import check_numbers
from lowtide.plan.core.planner import AbstractPlanner, Proposal
from lowtide.plan.core.problem import Problem
from lowtide.plan.planners.chain_dp.layers import no_chain
from lowtide.progress import Progress, silent
from lowtide.schedule.expand import expand

_RUNS = 3
_GRID = 6
_SHARES = 4


@dataclass(frozen=True, slots=True)
class Segments:
    """The outcome of one greedy run.

    Attributes:
        stored_bytes: Bytes kept between segments, the paper's x.
        largest_bytes: Bytes made in the largest segment that ends in a cut, the paper's y.
        mirrors: For every op, 0 if its output is kept and 1 if it is recomputed.
    """

    stored_bytes: int
    largest_bytes: int
    mirrors: tuple[int, ...]


Cutter = Callable[[float], Segments]


def greedy_segments(
    sizes: Sequence[int], candidates: Sequence[bool], budget: float, *, groups: Sequence[int] | None = None
) -> Segments:
    """Return the segments of Algorithm 3: cut at the first candidate at which more than `budget` bytes were made.

    Example:
        ```python
        greedy_segments([1, 1, 1, 1], [True] * 4, budget=1).mirrors
        #> (1, 0, 1, 0)
        ```

    Args:
        sizes: Bytes of each op's outputs, in the order in which ops run.
        candidates: Whether the op's outputs may be kept.
        budget: The paper's B. What follows the last cut is not held to it.
        groups: A number for every op; candidates of equal number share the decision of the first of them. The others
            count as stored, not as part of a segment. By default every op decides for itself.
    """
    if not len(sizes) == len(candidates) == len(sizes if groups is None else groups):
        raise InvalidOptionError("Sizes, candidates and groups must be of equal length.")
    made = stored = largest = 0
    decided: dict[int, bool] = {}
    mirrors = []
    for op, (size, candidate) in enumerate(zip(sizes, candidates, strict=True)):
        group = op if groups is None else groups[op]
        if candidate and decided.get(group):
            stored += size
            mirrors.append(0)
            continue
        made += size
        cut = candidate and group not in decided and made > budget
        if candidate:
            decided.setdefault(group, cut)
        if cut:
            stored, largest, made = stored + size, max(largest, made), 0
        mirrors.append(0 if cut else 1)
    return Segments(stored, largest, tuple(mirrors))


def paper_budgets(cut: Cutter) -> tuple[float, ...]:
    """Return the budgets of the paper's appendix A: 0, B = sqrt(x y) of that run, and 6 from B/sqrt(2) to B sqrt(2)."""
    first = cut(0)
    middle = math.sqrt(first.stored_bytes * first.largest_bytes)
    low, high = middle / math.sqrt(2), middle * math.sqrt(2)
    return (0, middle, *(low + (high - low) * part / (_GRID - 1) for part in range(_GRID)))


def code_budgets(cut: Cutter, unit_bytes: int = 1) -> tuple[float, ...]:
    """Return the budgets of the authors' program: three runs from 0, each guessing sqrt(x y / 2) for the next, and 6.

    The last 6 lie between the smallest y of the three runs and sqrt(2) times the third guess; there are none if that
    range is empty.

    Args:
        cut: Algorithm 3 on the network at hand.
        unit_bytes: The unit in which the program calculates in whole numbers; memonger's is 2^20.
    """
    budgets, guess, low = [], 0, math.inf
    for _ in range(_RUNS):
        budgets.append(float(guess * unit_bytes))
        segments = cut(budgets[-1])
        stored, largest = segments.stored_bytes // unit_bytes, segments.largest_bytes // unit_bytes
        low, guess = min(low, largest), int(math.sqrt(stored * largest / 2))
    step = int((int(math.sqrt(2) * guess) - low) / _GRID)
    if step > 0:
        budgets += [float((low + step * (part + 1)) * unit_bytes) for part in range(_GRID)]
    return tuple(budgets)


def scan_budgets(sizes: Sequence[int], count: int) -> tuple[float, ...]:
    """Return `count` budgets up to the sum of `sizes`, half of them in equal steps and half in equal ratios."""
    total = sum(sizes)
    even = [total * part / max(1, count // 2) for part in range(1, count // 2 + 1)]
    ratio = max(1, len(sizes)) ** (1 / max(1, count - count // 2))
    return (*even, *(total / ratio**part for part in range(1, count - count // 2 + 1)))


@dataclass(frozen=True, kw_only=True)
class ChenGreedy(AbstractPlanner):
    """Keep the borders of greedily chosen segments; of all budgets tried, take the fastest schedule that fits.

    Attributes:
        search: How segment budgets are found: "code", as in the authors' program, or "paper", as in the appendix.
        scan: Number of further segment budgets to try, from those of single ops to the whole forward pass, each with
            all borders and with the first three, two and one quarters of them. The paper looks for the least peak; the
            scan finds what is faster and still fits.
    """

    search: str = "code"
    scan: int = 48

    def __post_init__(self) -> None:
        """Check the options."""
        check_numbers(self)
        if self.search not in ("code", "paper"):
            raise InvalidOptionError(f"The search is {self.search!r}; it must be code or paper.")
        if self.scan < 0:
            raise InvalidOptionError(f"The scan has {self.scan} budgets; it must be at least 0.")

    def supports(self, problem: Problem) -> str | None:
        """Return why there is no chain to cut, or None."""
        if problem.graph.boundary is None:
            return "it needs a graph with a forward and a backward phase"
        return no_chain(len(chain_of(problem.graph, problem.costs).links) - 1)

    def propose(self, problem: Problem, progress: Progress = silent) -> Proposal:
        """Return the fastest schedule that fits, or the one with the least peak."""
        chain = chain_of(problem.graph, problem.costs)
        sizes, candidates = _ops_of(chain)
        cut = partial(greedy_segments, sizes, candidates)
        budgets = code_budgets(cut) if self.search == "code" else paper_budgets(cut)
        chosen = dict.fromkeys(_checkpoints(chain, cut(budget)) for budget in budgets)
        for budget in scan_budgets(sizes, self.scan):
            chosen |= dict.fromkeys(_beginnings(_checkpoints(chain, cut(budget))))
        progress(f"chen_greedy: pricing {len(chosen)} plans")
        return Proposal(best_of(problem, (expand(problem.graph, chain.kept(links)) for links in chosen)))


def _ops_of(chain: Chain) -> tuple[list[int], list[bool]]:
    """Return the bytes that every forward op makes, and whether it makes the value of a cut point."""
    graph = chain.graph
    sizes = [sum(graph.values[value].bytes for value in graph.ops[op].outputs) for op in graph.forward]
    candidates = [False] * len(sizes)
    for op in _producers(chain):
        candidates[op] = True
    return sizes, candidates


def _checkpoints(chain: Chain, segments: Segments) -> tuple[int, ...]:
    """Return the links whose value is kept."""
    return tuple(link for link, op in enumerate(_producers(chain)) if not segments.mirrors[op])


def _beginnings(links: tuple[int, ...]) -> Iterable[tuple[int, ...]]:
    """Yield `links`, and the first quarters of them, rounded up."""
    for share in range(_SHARES, 0, -1):
        yield links[: -(-len(links) * share // _SHARES)]


def _producers(chain: Chain) -> Iterable[int]:
    """Yield, for every cut point, the op that makes its value."""
    for link in chain.links:
        if link.value is not None:
            producer = chain.graph.values[link.value].producer
            assert producer is not None, "cut points are values that forward makes"
            yield producer
