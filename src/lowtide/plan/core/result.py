"""The answer: a schedule with its price, its proof, and the words for people."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Protocol

from lowtide.plan.core.account import MemoryAccount
from lowtide.plan.core.module_table import module_rows, module_table
from lowtide.plan.core.plan_file import PlanRecord, read_record, write_record
from lowtide.plan.core.problem import Problem
from lowtide.schedule.simulate import Trace
from lowtide.schedule.steps import Schedule
from lowtide.units import format_bytes, format_seconds


class Outcome(Enum):
    """How planning ended; each value is the sentence users read."""

    NOTHING_TO_DO = "The step fits the budget as it is: nothing is recomputed."
    OPTIMAL = (
        "The schedule fits the budget and is proved to be as fast as any that first runs ops in the given order, to a "
        "hundred-thousandth of a step."
    )
    FITS = "The schedule fits the budget; a faster one may exist."
    IMPOSSIBLE = (
        "It is proved that no schedule that first runs ops in the given order fits the budget, and none was found in "
        "another order; this one has the least peak known. Raise the budget to its peak or make the batch smaller."
    )
    OVER_BUDGET = (
        "No schedule within the budget was found; this one has the least peak known. Raise the budget to its peak, "
        "make the batch smaller, or try another planner."
    )


class ReportWriter(Protocol):
    """Writes a plan to a file for people."""

    def __call__(self, plan: Plan, path: str | os.PathLike[str], comparison: Any, /) -> None:
        """Write `plan` to `path`."""


@dataclass(frozen=True)
class Plan:
    """A schedule for a problem, priced by the simulator.

    Attributes:
        problem: The question.
        schedule: The answer: the order in which ops run.
        trace: Its bytes at every step and its seconds.
        planner: Name of the planner that proposed it.
        outcome: How planning ended.
        bound: Proved lower bound on the overhead of every schedule that first runs ops in the given order, or, if this
            schedule is faster than all of those, in its own order; None if nothing is proved.
        given_bound: Such a bound for the given order in any case: above the overhead if this schedule, in another
            order, is faster than all of those; None if nothing is proved or none of those fits.
        min_peak_bytes: Least peak known for this problem.
        seconds: Time spent planning.
        account: All the memory that training takes, if the plan was made for a device or a size of memory.
    """

    problem: Problem
    schedule: Schedule
    trace: Trace
    planner: str
    outcome: Outcome
    bound: float | None
    min_peak_bytes: int
    seconds: float
    account: MemoryAccount | None = None
    given_bound: float | None = None

    # Pages and pictures are a layer above this one, which therefore does not import them: the package root, where all
    # parts are put together, says who writes reports.
    report_writer: ClassVar[ReportWriter]

    @property
    def peak_bytes(self) -> int:
        """Peak of the schedule."""
        return self.trace.peak_bytes

    @property
    def baseline_peak_bytes(self) -> int:
        """Peak of plain training."""
        return self.problem.baseline.peak_bytes

    @property
    def budget_bytes(self) -> int:
        """The budget."""
        return self.problem.budget_bytes

    @property
    def fits(self) -> bool:
        """Whether the peak is within the budget."""
        return self.problem.fits(self.trace)

    @property
    def overhead(self) -> float:
        """Extra seconds as a share of the seconds of plain training."""
        return self.problem.overhead(self.trace)

    @property
    def gap(self) -> float | None:
        """How far the overhead may be from the least possible one, or None if there is no bound."""
        return None if self.bound is None else max(0.0, self.overhead - self.bound)

    @property
    def saved_bytes(self) -> int:
        """Bytes alive between forward and backward."""
        return self.trace.saved_bytes

    @property
    def num_recomputed(self) -> int:
        """Number of runs beyond the first of each op."""
        return self.schedule.num_recomputed

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to `path` as JSON, replacing what is there."""
        write_record(
            PlanRecord(
                problem=self.problem,
                schedule=self.schedule,
                planner=self.planner,
                outcome=self.outcome.name,
                bound=self.bound,
                min_peak_bytes=self.min_peak_bytes,
                seconds=self.seconds,
                account=self.account,
                given_bound=self.given_bound,
            ),
            path,
        )

    def report(self, path: str | os.PathLike[str], *, comparison: Any = None) -> None:
        """Write a report to `path`, replacing what is there: a page (.html), a picture (.png, .svg) or text (.txt).

        The page is one file that needs no network: memory over the step, what is alive at the peak, what each module
        keeps and recomputes, memory against time, and all ops.

        Args:
            path: The file; its suffix says what it becomes.
            comparison: Other planners and budgets to show beside this plan, from `lowtide.compare`.
        """
        type(self).report_writer(self, path, comparison)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Return the plan saved at `path`; raise `PlanFileError` if the file is not a valid plan."""
        record = read_record(path, outcomes=[outcome.name for outcome in Outcome])
        return Plan(
            problem=record.problem,
            schedule=record.schedule,
            trace=record.problem.price(record.schedule),
            planner=record.planner,
            outcome=Outcome[record.outcome],
            bound=record.bound,
            min_peak_bytes=record.min_peak_bytes,
            seconds=record.seconds,
            account=record.account,
            given_bound=record.given_bound,
        )

    def __str__(self) -> str:
        """Return summary lines, then a table by module."""
        graph = self.problem.graph
        rows = module_rows(graph, self.problem.costs, self.schedule)
        account = [] if self.account is None else ["", *self.account.lines()]
        return "\n".join([*self._summary(), *account, "", *module_table(rows)])

    def _summary(self) -> list[str]:
        share = 100 * self.peak_bytes / self.baseline_peak_bytes if self.baseline_peak_bytes else 100.0
        graph = self.problem.graph
        extra = self.trace.seconds - self.problem.baseline.seconds
        return [
            f"Plan by {self.planner}: {self.outcome.value}",
            f"  peak      {format_bytes(self.peak_bytes)} of {format_bytes(self.budget_bytes)} allowed; "
            f"{format_bytes(self.baseline_peak_bytes)} without a plan ({share:.1f} %)",
            f"  overhead  {100 * self.overhead:.2f} % ({format_seconds(extra)} on "
            f"{format_seconds(self.problem.baseline.seconds)}, costs {self.problem.costs.source}){self._proof()}",
            f"  graph     {len(graph.ops)} ops, {self.num_recomputed} recomputed, "
            f"{format_bytes(self.saved_bytes)} saved for backward",
            f"  planning  {format_seconds(self.seconds)}",
        ]

    def _proof(self) -> str:
        if not self.bound or self.gap is None:
            return ""
        proof = f"; at least {100 * self.bound:.2f} % is needed, so at most {100 * self.gap:.2f} % is wasted"
        if self.given_bound is None or self.given_bound <= self.overhead:
            return proof
        return f"{proof} in this order of ops; in the recorded one, at least {100 * self.given_bound:.2f} % is needed"
