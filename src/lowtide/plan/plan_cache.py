"""Plans of earlier runs: `wrap` and `plan` look here before they search, and keep what took long to find.

The folder is "plans" in the cache folder. `LOWTIDE_PLAN_CACHE=0` switches this off.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import warnings
from dataclasses import is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from lowtide.environment import cache_dir, plan_cache_is_on
from lowtide.errors import InfeasibleBudgetError, LowtideError, LowtideWarning
from lowtide.files import replace_text
from lowtide.graph.io import costs_to_dict, graph_to_dict, read_fields
from lowtide.plan.core.answer import FIELDS, answer_from_dict, answer_to_dict
from lowtide.plan.core.planner import AbstractPlanner
from lowtide.plan.core.problem import Problem
from lowtide.plan.core.result import Plan
from lowtide.plan.solve import solve
from lowtide.progress import Progress

FORMAT = "lowtide-answer"
VERSION = 1
MOST_FILES = 256
MOST_FILE_BYTES = 64 * 2**20
_FIELDS = {"format", "version", "key", *FIELDS}
_PARTS = ("graph", "schedule", "plan")


class PlanStore:
    """Plans in a folder, by key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, problem: Problem, planner: AbstractPlanner) -> Plan | None:
        """Return the plan that `planner` made for `problem` earlier, or None."""
        key = key_of(problem, planner)
        if key is None:
            return None
        path = self._path(key)
        try:
            if not path.is_file() or path.stat().st_size > MOST_FILE_BYTES:
                return None
            plan = _plan(json.loads(path.read_text(encoding="utf-8")), key, problem)
            # What is used stays; the least recently used goes first.
            path.touch()
        except (OSError, ValueError, RecursionError, LowtideError):
            return None
        return plan

    def put(self, plan: Plan, planner: AbstractPlanner) -> None:
        """Keep `plan`, which `planner` made; raise `OSError` if it cannot be written."""
        key = key_of(plan.problem, planner)
        if key is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_text(self._path(key), json.dumps(_record(plan, key), allow_nan=False) + "\n")
        for file in self.files()[MOST_FILES:]:
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)

    def files(self) -> list[Path]:
        """Return the files, the most recently used first."""
        found = list(self.folder.glob("plan-*.json")) if self.folder.is_dir() else []
        return sorted(found, key=_modified, reverse=True)

    def clear(self) -> int:
        """Return the number of files deleted, which are all there are."""
        files = self.files()
        for file in files:
            file.unlink(missing_ok=True)
        return len(files)

    def _path(self, key: str) -> Path:
        return self.folder / f"plan-{key}.json"


def key_of(problem: Problem, planner: AbstractPlanner) -> str | None:
    """Return the key of the question, or None if the planner may answer differently another time.

    Planners of other packages are such: their code may change without notice.
    """
    if not type(planner).__module__.startswith("lowtide.") or not is_dataclass(planner):
        return None
    parts = [
        _code_digest(),
        json.dumps(graph_to_dict(problem.graph), separators=(",", ":")),
        json.dumps(costs_to_dict(problem.costs), separators=(",", ":")),
        str(problem.budget_bytes),
        f"{type(planner).__module__} {planner!r}",
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


@cache
def _code_digest() -> str:
    """Return a hash of the sources that plan, so that no answer outlives the code that gave it."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for part in _PARTS:
        for path in sorted((root / part).rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _record(plan: Plan, key: str) -> dict[str, Any]:
    return {"format": FORMAT, "version": VERSION, "key": key, **answer_to_dict(plan)}


def _plan(data: object, key: str, problem: Problem) -> Plan | None:
    fields = read_fields(data, "The file", _FIELDS)
    if (fields["format"], fields["version"], fields["key"]) != (FORMAT, VERSION, key):
        return None
    plan = answer_from_dict({name: fields[name] for name in FIELDS}, problem)
    return replace(plan, is_cached=True) if plan is not None and plan.fits else None


def _modified(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:  # another process has just deleted it
        return 0.0


# Quicker answers are not worth a file.
_WORTH_SECONDS = 1.0
_warned = False


def plan_store() -> PlanStore:
    """Return where plans are kept."""
    return PlanStore(cache_dir() / "plans")


def solve_once(problem: Problem, planner: AbstractPlanner, progress: Progress) -> Plan:
    """Return the plan that `planner` makes for `problem`, or made for the very same one before."""
    if not plan_cache_is_on():
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


def known_plan(problem: Problem, planner: AbstractPlanner) -> Plan | None:
    """Return the plan that `planner` made for `problem` before, or None."""
    return plan_store().get(problem, planner) if plan_cache_is_on() else None


def solve_or_nearest(problem: Problem, planner: AbstractPlanner, progress: Progress) -> Plan:
    """Return the plan that `planner` makes, also if the one of least peak that it knows does not fit the budget."""
    try:
        return solve_once(problem, planner, progress)
    except InfeasibleBudgetError as error:
        if not isinstance(error.plan, Plan):
            raise
        return error.plan


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
