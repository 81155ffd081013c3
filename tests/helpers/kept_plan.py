"""A small problem and its plan, for processes that keep it in a cache of plans."""

from __future__ import annotations

from lowtide.graph import samples
from lowtide.plan.core.problem import Problem
from lowtide.plan.planners.greedy import Greedy
from lowtide.plan.solve import solve

GRAPH, COSTS = samples.training_chain(8)
PROBLEM = Problem(GRAPH, COSTS, 600)
PLANNER = Greedy(effort=0.02)
PLAN = solve(PROBLEM, PLANNER)
