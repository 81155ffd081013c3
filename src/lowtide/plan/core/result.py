"""The answer: a schedule with its price, its proof, and the words for people."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from enum import Enum

from lowtide.plan.core.account import MemoryAccount
from lowtide.plan.core.figures import PlanFigures
from lowtide.plan.core.module_table import module_rows, module_table
from lowtide.plan.core.plan_file import PlanRecord, read_record, write_record
from lowtide.plan.core.problem import Problem
from lowtide.schedule.simulate import Trace
from lowtide.schedule.steps import Schedule
from lowtide.units import format_bytes


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


OUTCOMES = tuple(outcome.name for outcome in Outcome)


class Stage(Enum):
    """How far planning has come when a plan is in use; each value is how users read it."""

    FIRST = "first"
    """It was made quickly so that training can begin; a better one is being made."""
    FINAL = "final"
    """It is what the planner that was asked for has found."""


@dataclass(frozen=True)
class Plan(PlanFigures):
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
        cut: Why the model is cut into blocks as it is, or into none; None if there was nothing to decide on.
        stage: Whether a better plan is being made while this one runs. Plan files do not keep it.
        is_cached: Whether it was made in an earlier run, which spent the seconds. Plan files do not keep it either.
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
    cut: str | None = None
    # What a plan is does not depend on it.
    stage: Stage = field(default=Stage.FINAL, compare=False)
    is_cached: bool = field(default=False, compare=False)

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
    def overhead(self) -> float:
        """Extra seconds as a share of the seconds of plain training."""
        return self.problem.overhead(self.trace)

    @property
    def costs_source(self) -> str:
        """Where the costs of the ops come from."""
        return self.problem.costs.source

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the graph."""
        return self.problem.graph.fingerprint

    @property
    def num_ops(self) -> int:
        """Number of ops of the graph."""
        return len(self.problem.graph.ops)

    @property
    def baseline_seconds(self) -> float:
        """Seconds of plain training."""
        return self.problem.baseline.seconds

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
        write_record(self.to_record(), path)

    def to_record(self) -> PlanRecord:
        """Return what a plan file holds of it."""
        return PlanRecord(
            problem=self.problem,
            schedule=self.schedule,
            planner=self.planner,
            outcome=self.outcome.name,
            bound=self.bound,
            min_peak_bytes=self.min_peak_bytes,
            seconds=self.seconds,
            account=self.account,
            given_bound=self.given_bound,
            cut=self.cut,
        )

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Return the plan saved at `path`; raise `PlanFileError` if the file is not a valid plan."""
        return Plan.from_record(read_record(path, outcomes=OUTCOMES))

    @staticmethod
    def from_record(record: PlanRecord) -> Plan:
        """Return the plan that a plan file holds."""
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
            cut=record.cut,
        )

    def __str__(self) -> str:
        """Return summary lines, then a table by module."""
        graph = self.problem.graph
        rows = module_rows(graph, self.problem.costs, self.schedule)
        return "\n".join([*self._summary(), *self.account_lines(), "", *module_table(rows)])

    def _summary(self) -> list[str]:
        return [
            f"Plan by {self.planner}: {self.outcome.value}",
            self.peak_line(),
            self.overhead_line(),
            *self.cut_lines(),
            f"  graph     {self.num_ops} ops, {self.num_recomputed} recomputed, "
            f"{format_bytes(self.saved_bytes)} saved for backward",
            self.planning_line(),
        ]

    def planning_line(self) -> str:
        """Return the line of a summary that is about planning."""
        line = f"{super().planning_line()}{' in an earlier run' if self.is_cached else ''}"
        return line if self.stage is Stage.FINAL else f"{line}; a first plan, until a better one is made"

    def _proof(self) -> str:
        proof = super()._proof()
        if not proof or self.given_bound is None or self.given_bound <= self.overhead:
            return proof
        return f"{proof} in this order of ops; in the recorded one, at least {100 * self.given_bound:.2f} % is needed"
