"""The menu of a block: plans along its trade-off between what it keeps, what it needs while it runs, and seconds.

A block of a larger step is not planned for a peak of its own. What it keeps for backward weighs on every other block,
and what it needs while it runs weighs on itself. So the menu asks the planner for both: for plans that keep at most so
many bytes (a weight is put on the moment between forward and backward, which leaves that much less for what is kept),
and for plans of a lower peak. Entries that are no better than another one in anything are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lowtide.graph.costs import Costs
from lowtide.graph.ir import Graph
from lowtide.plan import registry
from lowtide.plan.core.planner import AbstractPlanner
from lowtide.plan.core.problem import Problem
from lowtide.plan.core.result import Plan
from lowtide.plan.plan_cache import solve_or_nearest
from lowtide.plan.solve import solve
from lowtide.progress import Progress, silent
from lowtide.schedule.simulate import Trace
from lowtide.schedule.steps import Schedule
from lowtide.units import MOST_BUDGET_BYTES


@dataclass(frozen=True)
class MenuPolicy:
    """How fine a menu is.

    Attributes:
        kept_levels: Shares of the way from the least to the most that a block can keep. Equal layers mix two
            neighbouring levels, and where the trade-off bends between two of them the step pays: with seven levels a
            LLaMA of 12 layers at half its memory takes 3.3 %, with twenty 2.5 %. A plan that keeps a given amount is
            found in milliseconds, so twenty take little longer than the least one.
        peak_levels: Shares of the way from the least peak to that of plain training.
    """

    kept_levels: tuple[float, ...] = tuple(level / 20 for level in range(1, 20))
    peak_levels: tuple[float, ...] = (0.25, 0.5, 0.75)


@dataclass(frozen=True)
class Entry:
    """One plan of a menu.

    Attributes:
        plan: The plan, for the block by itself.
        kept_at_most: The bytes it was asked to keep at most, or None if it was asked for a peak.
        bound: Proved lower bound on the overhead of every plan that keeps at most `kept_at_most`.
    """

    plan: Plan
    kept_at_most: int | None
    bound: float

    @property
    def trace(self) -> Trace:
        """What the plan takes."""
        return self.plan.trace


def make_menu(
    graph: Graph,
    costs: Costs,
    planner: AbstractPlanner,
    progress: Progress = silent,
    policy: MenuPolicy | None = None,
) -> tuple[Entry, ...]:
    """Return the menu of a block, the fastest plan first and the one that keeps least last."""
    policy = policy or MenuPolicy()
    problem = Problem(graph, costs, MOST_BUDGET_BYTES)
    everything = Entry(solve(problem, Schedule.keep_all(graph)), None, 0.0)
    if not everything.trace.boundary or len(everything.plan.schedule.backward) == 0:
        return (everything,)
    found = [everything, *_by_kept(problem, planner, progress, policy), *_by_peak(problem, planner, progress, policy)]
    return _pruned(found)


def menu_planner(planner: AbstractPlanner) -> AbstractPlanner:
    """Return the planner for menus: `auto` would take minutes for a dozen plans, and `greedy` comes very near to it."""
    # Reading a plan must not load all planners.
    from lowtide.plan.auto.planner import Auto

    return registry.get("greedy") if isinstance(planner, Auto) else planner


def _by_kept(problem: Problem, planner: AbstractPlanner, progress: Progress, policy: MenuPolicy) -> Iterator[Entry]:
    """Yield the plan that keeps least, and plans that keep at most so much."""
    base = problem.baseline
    least = _keeping_at_most(problem, 0, planner, progress)
    floor = least.trace.saved_bytes
    # What was proved for it is about keeping nothing at all.
    yield replace(least, kept_at_most=floor, bound=0.0)
    for level in policy.kept_levels:
        kept = floor + int(level * (base.saved_bytes - floor))
        entry = _keeping_at_most(problem, kept, planner, progress)
        if entry.trace.saved_bytes <= kept:
            yield entry


def _keeping_at_most(problem: Problem, kept: int, planner: AbstractPlanner, progress: Progress) -> Entry:
    """Return a plan that keeps at most `kept` bytes, or nearly as little as can be."""
    base = problem.baseline
    # Generous with the peak: recomputing a block as a whole needs what it needs in plain training, and its tangents.
    peak = 2 * base.peak_bytes
    op = base.boundary
    first = problem.graph.backward[0]
    arriving = base.bytes_during[op] - base.bytes_after[op - 1]
    weight = max(peak - kept - arriving, 0)
    workspace = list(problem.costs.workspace_bytes)
    workspace[first] += weight
    weighted = Problem(problem.graph, replace(problem.costs, workspace_bytes=tuple(workspace)), peak)
    plan = solve_or_nearest(weighted, planner, progress)
    own = replace(plan, problem=problem, trace=problem.price(plan.schedule))
    return Entry(own, kept, plan.bound or 0.0)


def _by_peak(problem: Problem, planner: AbstractPlanner, progress: Progress, policy: MenuPolicy) -> Iterator[Entry]:
    """Yield the plan of the least peak, and plans of a lower peak than plain training's."""
    base = problem.baseline
    lowest = solve_or_nearest(replace(problem, budget_bytes=1), planner, progress)
    least = lowest.peak_bytes
    peaks = [max(least + int(level * (base.peak_bytes - least)), 1) for level in policy.peak_levels]
    for plan in (lowest, *(solve_or_nearest(replace(problem, budget_bytes=peak), planner, progress) for peak in peaks)):
        yield Entry(replace(plan, problem=problem, trace=problem.price(plan.schedule)), None, 0.0)


def _pruned(entries: list[Entry]) -> tuple[Entry, ...]:
    """Return the entries that are better than every other one in something, the fastest first."""
    kept: list[Entry] = []
    for entry in sorted(entries, key=_price):
        if not any(_at_least_as_good(other, entry) for other in kept):
            kept.append(entry)
    return tuple(kept)


def _price(entry: Entry) -> tuple[float, int, int, int]:
    return (entry.trace.seconds, *_bytes(entry))


def _bytes(entry: Entry) -> tuple[int, int, int]:
    trace = entry.trace
    backward = max(trace.bytes_during[trace.boundary :], default=0)
    return trace.saved_bytes, max(trace.bytes_during[: trace.boundary], default=0), backward


def _at_least_as_good(one: Entry, other: Entry) -> bool:
    return all(mine <= theirs for mine, theirs in zip(_bytes(one), _bytes(other), strict=True))
