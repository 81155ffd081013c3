"""Backward passes that ran for gradients in other layouts than planned: they are priced before the next call.

Not while they run: costs are measured on real tensors, for which there may be no room beside the step's own.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from lowtide.capture.arrived_gradients import Arrived
from lowtide.capture.program import Program
from lowtide.graph.ir import Graph
from lowtide.plan.core.problem import Problem
from lowtide.plan.core.result import Outcome, Plan
from lowtide.runtime.peak_watch import PeakWatch
from lowtide.schedule.steps import Schedule


@dataclass(frozen=True)
class Late:
    """One such backward pass.

    Attributes:
        watch: Watches the plan that its forward pass ran.
        graph: The graph as it was traced.
        arrived: The gradients that came.
        program: The program for them.
        schedule: What ran.
        is_only: Whether the planned backward pass never ran.
    """

    watch: PeakWatch
    graph: Graph
    arrived: Arrived
    program: Program
    schedule: Schedule
    is_only: bool

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.watch.plan

    def priced(self, problem: Problem) -> Plan:
        """Return what ran as an answer to `problem`; what is proved about the plan is not proved about it."""
        trace = problem.price(self.schedule)
        outcome = self.plan.outcome if self.plan.outcome is Outcome.NOTHING_TO_DO else Outcome.FITS
        return replace(
            self.plan,
            problem=problem,
            schedule=self.schedule,
            trace=trace,
            outcome=outcome if problem.fits(trace) else Outcome.OVER_BUDGET,
            bound=None,
            given_bound=None,
            min_peak_bytes=min(trace.peak_bytes, problem.baseline.peak_bytes),
        )


@dataclass
class LateLayouts:
    """Those of one model that wait for their price, and the gradients that graphs are to be planned for."""

    _waiting: list[Late] = field(default_factory=list)
    _expected: list[tuple[Graph, Arrived]] = field(default_factory=list)
    _seen: list[tuple[Graph, Arrived]] = field(default_factory=list)

    def add(self, late: Late) -> None:
        """Note that a backward pass runs for other layouts than planned."""
        self._waiting.append(late)
        if late.arrived not in self.seen(late.graph):
            self._seen.append((late.graph, late.arrived))

    def seen(self, graph: Graph) -> list[Arrived]:
        """Return the gradients that have come for `graph` in other layouts than planned."""
        return [arrived for known, arrived in self._seen if known == graph]

    def take(self) -> list[Late]:
        """Return those that wait, and let them wait no longer."""
        waiting, self._waiting = self._waiting, []
        return waiting

    def expect(self, late: Late) -> None:
        """Plan the graph for these gradients from now on."""
        self._expected.append((late.graph, late.arrived))

    def expected(self, graph: Graph) -> Arrived | None:
        """Return the gradients that `graph` is to be planned for, if others were found to need too much."""
        return next((arrived for known, arrived in reversed(self._expected) if known == graph), None)
