"""The planners by name."""

from __future__ import annotations

import difflib

from lowtide.errors import InvalidOptionError, UnknownPlannerError
from lowtide.plan.core.planner import AbstractPlanner

_PLANNERS: dict[str, AbstractPlanner] = {}


def _known() -> dict[str, AbstractPlanner]:
    """Return all planners by name; those of the package are loaded when one is first asked for.

    Whoever prices a ready schedule or only imports the package does not wait for them.
    """
    from lowtide.plan.portfolio import PLANNERS

    for name, planner in PLANNERS.items() if "auto" not in _PLANNERS else ():
        _PLANNERS[name] = planner
    return _PLANNERS


def register(name: str, planner: AbstractPlanner) -> None:
    """Make `planner` available under `name`; raise `InvalidOptionError` if the name is taken or empty."""
    key = normalise(name)
    if not key:
        raise InvalidOptionError(f"{name!r} is not a name for a planner.")
    if key in _known():
        raise InvalidOptionError(f"A planner is already registered as {key!r}; choose another name.")
    if not isinstance(planner, AbstractPlanner):
        raise InvalidOptionError(f"{planner!r} is not a planner: it must be an instance of an AbstractPlanner.")
    _PLANNERS[key] = planner


def get(name: str) -> AbstractPlanner:
    """Return the planner registered under `name`; raise `UnknownPlannerError` with the valid names if there is none."""
    key = normalise(name)
    if key not in _known():
        near = difflib.get_close_matches(key, _known(), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UnknownPlannerError(f"No planner is called {name!r}. Planners: {', '.join(names())}.{hint}")
    return _PLANNERS[key]


def name_of(planner: AbstractPlanner) -> str:
    """Return the name under which `planner` is registered, else that of its class."""
    return next((name for name, known in _known().items() if known is planner), type(planner).__name__)


def registered(planner: AbstractPlanner) -> AbstractPlanner:
    """Return the planner of the registry that equals `planner`, which came from another process; else itself."""
    return next((known for known in _known().values() if known == planner), planner)


def names() -> tuple[str, ...]:
    """Return the names of all planners."""
    return tuple(_known())


def normalise(name: str) -> str:
    """Return `name` as the registry spells it: lower case, without spaces around it, with underscores."""
    return name.strip().lower().replace("-", "_")
