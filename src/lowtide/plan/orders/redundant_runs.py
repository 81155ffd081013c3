"""Runs whose results nobody reads before the op runs again: the op may as well wait for that.

A search with the first runs in a given order can only get rid of a large result that comes too early by making it
again. Where nothing has read it meanwhile, the earlier run is for nothing. Without it the schedule takes less time and
no more memory, and its first runs are in another order. Ops stay in their phase; random ops and those of which
something must run once keep their first runs. Cost: linear in the length of the schedule.
"""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.graph.ir import Graph, OpId, ValueId
from lowtide.schedule.steps import Schedule


def without_idle_runs(graph: Graph, schedule: Schedule) -> Schedule:
    """Return `schedule`, a legal one, without the runs that another one of the same op in the same phase makes idle."""
    wanted: set[ValueId] = set()
    # What backward reads first is decided before forward is looked at.
    backward = _useful(graph, schedule.backward, wanted)
    return Schedule(_useful(graph, schedule.forward, wanted), backward)


def _useful(graph: Graph, steps: Sequence[OpId], wanted: set[ValueId]) -> tuple[OpId, ...]:
    """Return the steps of one phase that are of use, given the values that later ones want, and add what they want."""
    kept: list[OpId] = []
    runs_later: set[OpId] = set()
    for op in reversed(steps):
        fact = graph.ops[op]
        if not fact.keeps_place and op in runs_later and wanted.isdisjoint(fact.outputs):
            continue
        kept.append(op)
        runs_later.add(op)
        wanted.difference_update(graph.rewrites[op])
        wanted.update(fact.inputs)
    return tuple(reversed(kept))
