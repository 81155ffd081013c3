"""The schedules of many plans of one family, to be priced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lowtide.graph.ir import Graph, ValueId
from lowtide.schedule.expand import expand
from lowtide.schedule.steps import Schedule

_WORK = 400_000
_FEW = 8


def affordable(graph: Graph, plans: int) -> int:
    """Return how many of `plans` plans to price: all on ordinary graphs, fewer on graphs of many thousand ops."""
    return min(plans, max(_FEW, _WORK // max(1, len(graph.ops))))


def schedules(graph: Graph, choices: Iterable[set[ValueId]]) -> Iterator[Schedule]:
    """Yield the schedules of different sets of kept values."""
    seen: set[frozenset[ValueId]] = set()
    for kept in map(frozenset, choices):
        if kept not in seen:
            seen.add(kept)
            yield expand(graph, kept)
