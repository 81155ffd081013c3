"""What plans of one graph and plans of a whole step have in common: figures that follow from others, and reports."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Protocol

from lowtide.plan.core.account import MemoryAccount
from lowtide.units import format_bytes, format_seconds


class ReportWriter(Protocol):
    """Writes a plan to a file for people."""

    def __call__(self, plan: Any, path: str | os.PathLike[str], comparison: Any, /) -> None:
        """Write `plan` to `path`."""


class PlanFigures(ABC):
    """A plan as people ask about it, of one graph or of a step of several blocks.

    Attributes:
        planner: Name of the planner that proposed it.
        bound: Proved lower bound on the overhead, or None if nothing is proved.
        min_peak_bytes: Least peak known.
        seconds: Time spent planning.
        account: All the memory that training takes, if the plan was made for a device or a size of memory.
        cut: Why the model is cut into blocks as it is, or into none; None if there was nothing to decide on.
    """

    planner: str
    bound: float | None
    min_peak_bytes: int
    seconds: float
    account: MemoryAccount | None
    cut: str | None
    baseline_seconds: Any

    # Pages and pictures are a layer above this one, which therefore does not import them: the package root, where all
    # parts are put together, says who writes reports.
    report_writer: ClassVar[ReportWriter]

    @property
    @abstractmethod
    def peak_bytes(self) -> int:
        """Predicted peak of the step."""

    @property
    @abstractmethod
    def baseline_peak_bytes(self) -> int:
        """Peak of plain training."""

    @property
    @abstractmethod
    def budget_bytes(self) -> int:
        """The budget."""

    @property
    @abstractmethod
    def overhead(self) -> float:
        """Extra seconds as a share of the seconds of plain training."""

    @property
    @abstractmethod
    def saved_bytes(self) -> int:
        """Bytes alive between forward and backward."""

    @property
    @abstractmethod
    def num_ops(self) -> int:
        """Number of ops of the step."""

    @property
    @abstractmethod
    def num_recomputed(self) -> int:
        """Number of runs beyond the first of each op."""

    @property
    @abstractmethod
    def costs_source(self) -> str:
        """Where the costs of the ops come from."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """A name for what is planned."""

    @abstractmethod
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to `path` as JSON, replacing what is there."""

    @property
    def fits(self) -> bool:
        """Whether the peak is within the budget."""
        return self.peak_bytes <= self.budget_bytes

    @property
    def promised_bytes(self) -> int:
        """What a step with this plan may take: the budget, or the peak of a plan that is known not to fit."""
        return max(self.budget_bytes, self.peak_bytes)

    @property
    def gap(self) -> float | None:
        """How far the overhead may be from the least possible one, or None if there is no bound."""
        return None if self.bound is None else max(0.0, self.overhead - self.bound)

    def report(self, path: str | os.PathLike[str], *, comparison: Any = None) -> None:
        """Write a report to `path`, replacing what is there: a page (.html), a picture (.png, .svg) or text (.txt).

        The page is one file that needs no network: memory over the step, what is alive at the peak, what each module
        or block keeps and recomputes, memory against time, and all ops.

        Args:
            path: The file; its suffix says what it becomes.
            comparison: Other planners and budgets to show beside this plan, from `lowtide.compare`.
        """
        type(self).report_writer(self, path, comparison)

    def peak_line(self) -> str:
        """Return the line of a summary that is about the peak."""
        share = 100 * self.peak_bytes / self.baseline_peak_bytes if self.baseline_peak_bytes else 100.0
        return (
            f"  peak      {format_bytes(self.peak_bytes)} of {format_bytes(self.budget_bytes)} allowed; "
            f"{format_bytes(self.baseline_peak_bytes)} without a plan ({share:.1f} %)"
        )

    def overhead_line(self) -> str:
        """Return the line of a summary that is about time."""
        plain = self.baseline_seconds
        return (
            f"  overhead  {100 * self.overhead:.2f} % ({format_seconds(self.overhead * plain)} on "
            f"{format_seconds(plain)}, costs {self.costs_source}){self._proof()}"
        )

    def planning_line(self) -> str:
        """Return the line of a summary that is about planning."""
        return f"  planning  {format_seconds(self.seconds)}"

    def cut_lines(self) -> list[str]:
        """Return the line of a summary that says why the blocks are what they are, or nothing if that is not known."""
        return [] if self.cut is None else [f"  blocks    {self.cut}"]

    def account_lines(self) -> list[str]:
        """Return the memory of training as a table, or nothing if that is not known."""
        return [] if self.account is None else ["", *self.account.lines()]

    def _proof(self) -> str:
        if not self.bound or self.gap is None:
            return ""
        return f"; at least {100 * self.bound:.2f} % is needed, so at most {100 * self.gap:.2f} % is wasted"
