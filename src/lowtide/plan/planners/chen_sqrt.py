"""`chen_sqrt`: about the square root of n segments; only their borders are kept, each segment is recomputed whole.

Also known as: gradient checkpointing, sublinear memory. Paper: Chen, Xu, Zhang, Guestrin, "Training Deep Nets with
Sublinear Memory Cost", 2016, section 4. Memory model: kept borders plus the largest segment; it does not look at the
budget. Optimal up to a constant for a uniform chain: O(sqrt n) memory for one extra forward. Cost: linear.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lowtide.graph.analysis import cut_points
from lowtide.graph.ir import Graph, OpId, ValueId
from lowtide.plan.base import AbstractPlanner, Progress, Proposal, silent
from lowtide.plan.problem import Problem
from lowtide.schedule.expand import expand

_MIN_CUTS = 2


@dataclass(frozen=True, kw_only=True)
class ChenSqrt(AbstractPlanner):
    """Cut the forward pass into segments of about equal bytes at cut points and keep only the borders.

    Attributes:
        segments: Number of segments, or 0 for the square root of the number of cut points.
    """

    segments: int = 0

    def supports(self, problem: Problem) -> str | None:
        """Return why there is no chain to cut, or None."""
        if problem.graph.boundary is None:
            return "it needs a graph with a forward and a backward phase"
        found = len(cut_points(problem.graph))
        if found < _MIN_CUTS:
            return f"it needs at least {_MIN_CUTS} cut points in forward and the graph has {found}"
        return None

    def propose(self, problem: Problem, progress: Progress = silent) -> Proposal:
        """Return the schedule that keeps the borders and what the last segment made."""
        del progress
        graph = problem.graph
        cuts = cut_points(graph)
        borders = _borders(graph, cuts, self.segments or max(2, math.isqrt(len(cuts))))
        # Backward begins with the last segment, so recomputing it at once would free nothing.
        last = borders[-1][0] if borders else -1
        kept = {value for _, value in borders}
        kept.update(value for op in graph.forward if op > last for value in graph.ops[op].outputs)
        return Proposal(expand(graph, kept))


def _borders(graph: Graph, cuts: tuple[tuple[OpId, ValueId], ...], segments: int) -> list[tuple[OpId, ValueId]]:
    """Return the cut points nearest to `segments` equal shares of the bytes that forward makes."""
    made, total = {}, 0
    for op in graph.forward:
        total += sum(graph.values[value].bytes for value in graph.ops[op].outputs)
        made[op] = total
    chosen = {min(cuts, key=lambda cut: abs(made[cut[0]] - total * k / segments)) for k in range(1, segments)}
    return sorted(chosen)
