"""What every integration does: wrap the model when training begins, and write a report once there is a plan."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from lowtide import api
from lowtide.graph.costs import Costs
from lowtide.plan.core.planner import AbstractPlanner
from lowtide.plan.core.result import Plan
from lowtide.report.write import check_report_path
from lowtide.runtime.wrapped import wrapped_of
from lowtide.settings import Settings
from lowtide.step.plan import StepPlan


@dataclass(frozen=True)
class WrapOptions:
    """The arguments of `lowtide.wrap` that the user gave to an integration, and where the report goes.

    They are checked when the training loop is set up, not when it has begun.
    """

    budget: int | str | None = None
    planner: str | AbstractPlanner = "auto"
    costs: str | Costs = "measured"
    plan: Plan | StepPlan | str | Path | None = None
    blocks: str | Sequence[str | type] = "auto"
    verify: bool = False
    patience: float | str | None = None
    on_infeasible: str = "raise"
    report: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        """Check every option."""
        Settings.make(
            budget=self.budget,
            planner=self.planner,
            costs=self.costs,
            plan=self.plan,
            blocks=self.blocks,
            patience=self.patience,
            on_infeasible=self.on_infeasible,
        )
        if self.report is not None:
            check_report_path(self.report)

    def apply(self, model: nn.Module) -> None:
        """Wrap `model` in place, unless it is wrapped already: then its plans are still good."""
        if wrapped_of(model) is None:
            api.wrap(
                model,
                budget=self.budget,
                planner=self.planner,
                costs=self.costs,
                plan=self.plan,
                blocks=self.blocks,
                verify=self.verify,
                patience=self.patience,
                on_infeasible=self.on_infeasible,
            )

    def write_report(self, model: nn.Module) -> bool:
        """Write the report of the step, if one was asked for; return True if there was a plan."""
        plans = api.plans(model)
        if plans and self.report is not None:
            api.main_plan(plans).report(self.report)
        return bool(plans)


class ModelWatch:
    """The part of a callback that is the same for every library: one set of options, one model, one report."""

    def __init__(self, **options: Any) -> None:
        self.options = WrapOptions(**options)
        self.model: nn.Module | None = None
        self._reported = False

    @property
    def plans(self) -> list[Plan | StepPlan]:
        """The plans made so far, as `lowtide.plans` returns them."""
        return [] if self.model is None else api.plans(self.model)

    def begin(self, model: nn.Module) -> None:
        """Wrap the model that is about to be trained."""
        self.options.apply(model)
        self.model = model

    def step_ended(self) -> None:
        """Write the report after the first planned step."""
        if not self._reported and self.model is not None:
            self._reported = self.options.write_report(self.model)
