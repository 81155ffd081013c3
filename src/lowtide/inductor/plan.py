"""A plan through Inductor: the schedule that was asked for, and what its generated code takes."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from lowtide.errors import InvalidOptionError
from lowtide.plan.core.result import Plan
from lowtide.units import format_bytes


@dataclass(frozen=True)
class InductorPlan(Plan):
    """A plan whose schedule runs through Inductor's code.

    The budget is the user's and the peak that of the code. Problem, schedule, trace and overhead are what the planner
    was asked and has answered: ops one by one, none of them fused.

    Attributes:
        code_bytes: The peak of the code, from a dry run of it.
        code_saved_bytes: What is there between forward and backward.
        asked_bytes: The budget of the user's.
        eager_bytes: The peak of the step in eager training.
        tuning: How Inductor was asked to compile.
        num_tries: For how many plans code was made and run dry.
    """

    code_bytes: int = field(kw_only=True)
    code_saved_bytes: int = field(kw_only=True)
    asked_bytes: int = field(kw_only=True)
    eager_bytes: int = field(kw_only=True)
    tuning: str = field(kw_only=True)
    num_tries: int = field(kw_only=True)

    @property
    def peak_bytes(self) -> int:
        """Peak of the step as the code will run it."""
        return self.code_bytes

    @property
    def baseline_peak_bytes(self) -> int:
        """Peak of plain eager training."""
        return self.eager_bytes

    @property
    def budget_bytes(self) -> int:
        """The budget."""
        return self.asked_bytes

    @property
    def saved_bytes(self) -> int:
        """Bytes alive between forward and backward."""
        return self.code_saved_bytes

    def save(self, path: str | os.PathLike[str]) -> None:
        """Raise: the plan is for code that Inductor generates anew, and is not read back."""
        del path
        raise InvalidOptionError(
            'A plan of engine="inductor" cannot be saved: its peak is that of code which PyTorch generates in every '
            "process. Wrap the model with the same budget; costs and schedules are taken from lowtide's cache."
        )

    def report(self, path: str | os.PathLike[str], *, comparison: object = None) -> None:
        """Raise: a report shows memory op by op, and the code has fused them."""
        del path, comparison
        raise InvalidOptionError(
            'There is no report of a plan of engine="inductor": it would show memory op by op, and Inductor has fused '
            "them. print(plan) shows its figures; a plan of the exact engine has a report."
        )

    def _summary(self) -> list[str]:
        first, peak, *others = super()._summary()
        code = f"  code      {self.tuning}; {self.num_tries} tried"
        asked = f"; the schedule was planned for {format_bytes(self.problem.budget_bytes)}, counting ops one by one"
        return [first, peak, code + asked, *others]
