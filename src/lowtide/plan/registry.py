"""The planners by name."""

from __future__ import annotations

import difflib
from dataclasses import replace

from lowtide.errors import InvalidOptionError, UnknownPlannerError
from lowtide.plan.auto.planner import Auto
from lowtide.plan.core.planner import AbstractPlanner
from lowtide.plan.planners.brute_force import BruteForce
from lowtide.plan.planners.chen_greedy import ChenGreedy
from lowtide.plan.planners.chen_recursive import ChenRecursive
from lowtide.plan.planners.chen_sqrt import ChenSqrt
from lowtide.plan.planners.drop_cheap import DropCheap
from lowtide.plan.planners.dtr import Dtr
from lowtide.plan.planners.feng import Feng
from lowtide.plan.planners.feng_chain import FengChain
from lowtide.plan.planners.greedy import Greedy
from lowtide.plan.planners.hong_cubic import HongCubic
from lowtide.plan.planners.hong_linear import HongLinear
from lowtide.plan.planners.keep_all import KeepAll
from lowtide.plan.planners.kusumoto import Kusumoto
from lowtide.plan.planners.kusumoto_exact import KusumotoExact
from lowtide.plan.planners.revolve import Revolve
from lowtide.plan.planners.rotor import Rotor

# Cheapest to run first: earlier planners win ties, and later ones start from what is known by then.
_PORTFOLIO: dict[str, AbstractPlanner] = {
    "keep_all": KeepAll(),
    "drop_cheap": DropCheap(),
    "chen_sqrt": ChenSqrt(),
    "chen_greedy": ChenGreedy(),
    "chen_recursive": ChenRecursive(),
    "hong_cubic": HongCubic(),
    "hong_linear": HongLinear(),
    "feng_chain": FengChain(),
    "feng": Feng(),
    "kusumoto": Kusumoto(),
    "kusumoto_exact": KusumotoExact(),
    "revolve": Revolve(),
    "rotor": Rotor(),
    "dtr": Dtr(),
    "greedy": Greedy(),
}
# What `auto` begins with, what of it is too slow for large graphs, and what wins only where hardly anything fits. The
# others take longer and win nowhere.
_FIRST = (
    "keep_all",
    "drop_cheap",
    "chen_sqrt",
    "chen_greedy",
    "chen_recursive",
    "hong_linear",
    "feng_chain",
    "feng",
    "rotor",
    "dtr",
)
_SLOW = frozenset({"chen_greedy", "chen_recursive"})
_LATE = frozenset({"dtr"})
_AUTO = Auto(
    planners={name: _PORTFOLIO[name] for name in _FIRST} | {"greedy": _PORTFOLIO["greedy"]}, slow=_SLOW, late=_LATE
)
_PLANNERS: dict[str, AbstractPlanner] = {
    "auto": _AUTO,
    "auto_thorough": replace(_AUTO, effort=10.0, gap=0.0005),
    **_PORTFOLIO,
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


def name_of(planner: AbstractPlanner) -> str:
    """Return the name under which `planner` is registered, else that of its class."""
    return next((name for name, known in _PLANNERS.items() if known is planner), type(planner).__name__)


def names() -> tuple[str, ...]:
    """Return the names of all planners."""
    return tuple(_PLANNERS)


def normalise(name: str) -> str:
    """Return `name` as the registry spells it: lower case, without blanks around it, with underscores."""
    return name.strip().lower().replace("-", "_")
