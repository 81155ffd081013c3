"""The planners by name."""

from __future__ import annotations

import difflib

from lowtide.errors import InvalidOptionError, UnknownPlannerError
from lowtide.plan.auto import Auto
from lowtide.plan.base import AbstractPlanner
from lowtide.plan.planners.brute_force import BruteForce
from lowtide.plan.planners.chen_sqrt import ChenSqrt
from lowtide.plan.planners.drop_cheap import DropCheap
from lowtide.plan.planners.greedy import Greedy
from lowtide.plan.planners.keep_all import KeepAll

_KEEP_ALL, _CHEN_SQRT, _DROP_CHEAP, _GREEDY = KeepAll(), ChenSqrt(), DropCheap(), Greedy()
_PLANNERS: dict[str, AbstractPlanner] = {
    "auto": Auto(
        planners={"keep_all": _KEEP_ALL, "drop_cheap": _DROP_CHEAP, "chen_sqrt": _CHEN_SQRT, "greedy": _GREEDY}
    ),
    "keep_all": _KEEP_ALL,
    "chen_sqrt": _CHEN_SQRT,
    "drop_cheap": _DROP_CHEAP,
    "greedy": _GREEDY,
    "brute_force": BruteForce(),
}


def register(name: str, planner: AbstractPlanner) -> None:
    """Make `planner` available under `name`; raise `InvalidOptionError` if the name is taken or empty."""
    key = normalise(name)
    if not key:
        raise InvalidOptionError(f"{name!r} is not a name for a planner.")
    if key in _PLANNERS:
        raise InvalidOptionError(f"A planner is already registered as {key!r}; choose another name.")
    if not isinstance(planner, AbstractPlanner):
        raise InvalidOptionError(f"{planner!r} is not a planner: it must be an instance of an AbstractPlanner.")
    _PLANNERS[key] = planner


def get(name: str) -> AbstractPlanner:
    """Return the planner registered under `name`; raise `UnknownPlannerError` with the valid names if there is none."""
    key = normalise(name)
    if key not in _PLANNERS:
        near = difflib.get_close_matches(key, _PLANNERS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UnknownPlannerError(f"No planner is called {name!r}. Planners: {', '.join(names())}.{hint}")
    return _PLANNERS[key]


def names() -> tuple[str, ...]:
    """Return the names of all planners."""
    return tuple(_PLANNERS)


def normalise(name: str) -> str:
    """Return `name` as the registry spells it: lower case, without blanks around it, with underscores."""
    return name.strip().lower().replace("-", "_")
