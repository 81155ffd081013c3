"""The planners that come with the package, ready to use, and which of them `auto` asks."""

from __future__ import annotations

from dataclasses import replace

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
_ALGORITHMS: dict[str, AbstractPlanner] = {
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
_ASKED = (
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
    planners={name: _ALGORITHMS[name] for name in _ASKED} | {"greedy": _ALGORITHMS["greedy"]}, slow=_SLOW, late=_LATE
)
PLANNERS: dict[str, AbstractPlanner] = {
    "auto": _AUTO,
    "auto_thorough": replace(_AUTO, effort=10.0, gap=0.0005),
    **_ALGORITHMS,
    "brute_force": BruteForce(),
}
