"""lowtide: train PyTorch models inside the memory you have."""

from typing import TYPE_CHECKING, Any

from lowtide import errors
from lowtide.analysis.batch_search import BatchFit
from lowtide.analysis.explain_peak import Explanation
from lowtide.analysis.explain_step import StepExplanation
from lowtide.analysis.planner_comparison import Comparison
from lowtide.api import compare, explain, max_batch, plan, plans, unwrap, wrap
from lowtide.graph.costs import Costs
from lowtide.graph.ir import Graph, Op, Value
from lowtide.plan.core.account import MemoryAccount
from lowtide.plan.core.figures import PlanFigures
from lowtide.plan.core.parallel import Parallel
from lowtide.plan.core.planner import AbstractPlanner, Proposal
from lowtide.plan.core.problem import Problem
from lowtide.plan.core.result import Plan
from lowtide.plan.registry import register
from lowtide.plan.solve import solve
from lowtide.report.write import write_report
from lowtide.schedule.expand import expand
from lowtide.schedule.simulate import simulate
from lowtide.schedule.steps import Schedule
from lowtide.schedule.verify import verify
from lowtide.step.load import load
from lowtide.step.plan import StepPlan

if TYPE_CHECKING:
    from lowtide.chains import chain, chain_layers, unroll
    from lowtide.measure import measure_peak

__version__ = "0.1.0"

PlanFigures.report_writer = write_report

__all__ = [
    "AbstractPlanner",
    "BatchFit",
    "Comparison",
    "Costs",
    "Explanation",
    "Graph",
    "MemoryAccount",
    "Op",
    "Parallel",
    "Plan",
    "Problem",
    "Proposal",
    "Schedule",
    "StepExplanation",
    "StepPlan",
    "Value",
    "chain",
    "chain_layers",
    "compare",
    "errors",
    "expand",
    "explain",
    "load",
    "max_batch",
    "measure_peak",
    "plan",
    "plans",
    "register",
    "simulate",
    "solve",
    "unroll",
    "unwrap",
    "verify",
    "wrap",
]


def __getattr__(name: str) -> Any:
    """Return what needs PyTorch from the start, imported when it is first asked for."""
    if name == "measure_peak":
        from lowtide.measure import measure_peak

        return measure_peak
    if name in ("chain", "chain_layers", "unroll"):
        from lowtide import chains

        return getattr(chains, name)
    raise AttributeError(f"module 'lowtide' has no attribute {name!r}")
