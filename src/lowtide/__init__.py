"""lowtide: train PyTorch models inside the memory you have."""

from lowtide import errors
from lowtide.api import plan, plans, unwrap, wrap
from lowtide.graph.costs import Costs
from lowtide.graph.ir import Graph, Op, Value
from lowtide.measure import measure_peak
from lowtide.plan.base import AbstractPlanner, Proposal
from lowtide.plan.problem import Problem
from lowtide.plan.registry import register
from lowtide.plan.result import Plan
from lowtide.plan.solve import solve
from lowtide.schedule.expand import expand
from lowtide.schedule.simulate import simulate
from lowtide.schedule.steps import Schedule
from lowtide.schedule.verify import verify

__version__ = "0.1.0"

__all__ = [
    "AbstractPlanner",
    "Costs",
    "Graph",
    "Op",
    "Plan",
    "Problem",
    "Proposal",
    "Schedule",
    "Value",
    "errors",
    "expand",
    "measure_peak",
    "plan",
    "plans",
    "register",
    "simulate",
    "solve",
    "unwrap",
    "verify",
    "wrap",
]
