"""`chen_sqrt`: about the square root of n segments; only their borders are kept, each segment is recomputed whole.

Also known as: gradient checkpointing, sublinear memory. Paper: Chen, Xu, Zhang, Guestrin, "Training Deep Nets with
Sublinear Memory Cost", 2016, section 4. Memory model: kept borders plus the largest segment; it does not look at the
budget. Optimal up to a constant for a uniform chain: O(sqrt n) memory for one extra forward. Cost: linear.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate

from lowtide.errors import InvalidOptionError
from lowtide.graph.analysis import Chain, Link, chain_of
from lowtide.plan.core.options import check_numbers
from lowtide.plan.core.planner import AbstractPlanner, Proposal
from lowtide.plan.core.problem import Problem
from lowtide.progress import Progress, silent
from lowtide.schedule.expand import expand

_MIN_CUTS = 2


@dataclass(frozen=True, kw_only=True)
class ChenSqrt(AbstractPlanner):
    """Cut the forward pass into segments of about equal bytes at cut points and keep only the borders.

    Attributes:
        segments: Number of segments, or 0 for the square root of the number of cut points.
    """

    segments: int = 0

    def __post_init__(self) -> None:
        """Check the options."""
        check_numbers(self)
        if self.segments < 0:
            raise InvalidOptionError(f"The number of segments is {self.segments}; it must be at least 0.")

    def supports(self, problem: Problem) -> str | None:
        """Return why there is no chain to cut, or None."""
        if problem.graph.boundary is None:
            return "it needs a graph with a forward and a backward phase"
        found = len(chain_of(problem.graph, problem.costs).links) - 1
        if found < _MIN_CUTS:
            return f"it needs at least {_MIN_CUTS} cut points in forward and the graph has {found}"
        return None

    def propose(self, problem: Problem, progress: Progress = silent) -> Proposal:
        """Return the schedule that keeps the borders and what the last segment made."""
        del progress
        chain = chain_of(problem.graph, problem.costs)
        segments = self.segments or max(2, math.isqrt(len(chain.links) - 1))
        return Proposal(expand(problem.graph, chain.kept(_borders(chain, segments))))


def _borders(chain: Chain, segments: int) -> set[int]:
    """Return the links whose ends are nearest to `segments` equal shares of the bytes that forward makes."""
    made = list(accumulate(_bytes_made(chain, link) for link in chain.links))
    last = len(chain.links) - 2
    borders = set()
    for part in range(1, segments):
        goal = made[-1] * part / segments
        link = bisect_left(made, goal, 0, last)
        borders.add(link - 1 if link and goal - made[link - 1] <= made[link] - goal else link)
    return borders


def _bytes_made(chain: Chain, link: Link) -> int:
    return sum(chain.graph.values[value].bytes for op in link.ops for value in chain.graph.ops[op].outputs)
