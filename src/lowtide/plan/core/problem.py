"""The question a planner answers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from lowtide.errors import InvalidBudgetError
from lowtide.graph.costs import Costs, check_costs
from lowtide.graph.ir import Graph
from lowtide.schedule.simulate import Trace, simulate
from lowtide.schedule.steps import Schedule
from lowtide.units import MOST_BUDGET_BYTES


@dataclass(frozen=True)
class Problem:
    """Run `graph`, whose ops cost `costs`, with a peak of at most `budget_bytes`, as fast as possible."""

    graph: Graph
    costs: Costs
    budget_bytes: int

    def __post_init__(self) -> None:
        """Check that costs fit the graph and that the budget is above zero."""
        check_costs(self.graph, self.costs)
        if isinstance(self.budget_bytes, bool) or not isinstance(self.budget_bytes, int):
            raise InvalidBudgetError(f"A budget of {self.budget_bytes!r:.40} bytes is not a whole number.")
        if self.budget_bytes <= 0:
            raise InvalidBudgetError(f"A budget of {self.budget_bytes} bytes is not above zero.")
        if self.budget_bytes > MOST_BUDGET_BYTES:
            raise InvalidBudgetError(f"A budget is at most {MOST_BUDGET_BYTES} bytes; this one is larger.")

    @cached_property
    def baseline(self) -> Trace:
        """The trace of plain training: every op once, in the given order."""
        return self.price(Schedule.keep_all(self.graph))

    def price(self, schedule: Schedule) -> Trace:
        """Return the trace of `schedule`."""
        return simulate(self.graph, self.costs, schedule)

    def overhead(self, trace: Trace) -> float:
        """Return the extra seconds of `trace` as a share of the baseline's seconds."""
        base = self.baseline.seconds
        return (trace.seconds - base) / base if base else 0.0

    def fits(self, trace: Trace) -> bool:
        """Whether the peak of `trace` is within the budget."""
        return trace.peak_bytes <= self.budget_bytes
