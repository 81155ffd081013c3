"""Plans of earlier runs: `wrap` and `plan` look here before they search, and keep what took long to find.

The folder is "plans" in the cache folder. `LOWTIDE_PLAN_CACHE=0` switches this off.
"""

from __future__ import annotations

import os
import warnings

from lowtide.costs.cache import cache_dir
from lowtide.errors import LowtideWarning
from lowtide.plan.core.planner import AbstractPlanner, Progress
from lowtide.plan.core.problem import Problem
from lowtide.plan.core.result import Plan
from lowtide.plan.plan_store import PlanStore
from lowtide.plan.solve import solve

# Quicker answers are not worth a file.
_WORTH_SECONDS = 1.0
_warned = False


def plan_store() -> PlanStore:
    """Return where plans are kept."""
    return PlanStore(cache_dir() / "plans")


def solve_once(problem: Problem, planner: AbstractPlanner, progress: Progress) -> Plan:
    """Return the plan that `planner` makes for `problem`, or made for the very same one before."""
    if os.environ.get("LOWTIDE_PLAN_CACHE", "1") in ("0", ""):
        return solve(problem, planner, progress=progress)
    store = plan_store()
    found = store.get(problem, planner)
    if found is not None:
        progress("found the plan of an earlier run")
        return found
    plan = solve(problem, planner, progress=progress)
    if plan.seconds >= _WORTH_SECONDS:
        _keep(store, plan, planner)
    return plan


def _keep(store: PlanStore, plan: Plan, planner: AbstractPlanner) -> None:
    global _warned
    try:
        store.put(plan, planner)
    except OSError as error:
        if not _warned:
            _warned = True
            warnings.warn(
                f"The plan cache {store.folder} cannot be written, so plans will be made again ({error}).",
                LowtideWarning,
                stacklevel=2,
            )
