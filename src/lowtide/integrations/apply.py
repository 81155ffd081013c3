"""What every integration does: wrap the model when training begins, and write a report once there is a plan."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from lowtide import api
from lowtide.graph.costs import Costs
from lowtide.plan.core.planner import AbstractPlanner
from lowtide.plan.core.result import Plan
from lowtide.report.write import check_report_path
from lowtide.runtime.wrap import wrapped_of
from lowtide.settings import Settings


@dataclass(frozen=True)
class Wish:
    """What the user asked an integration for; the fields are the arguments of `lowtide.wrap`, and where a report goes.

    Everything is checked here, when the loop is set up, not when it has begun.
    """

    budget: int | str | None = None
    planner: str | AbstractPlanner = "auto"
    costs: str | Costs = "measured"
    plan: Plan | str | Path | None = None
    verify: bool = False
    report: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        """Check the wish."""
        Settings.make(budget=self.budget, planner=self.planner, costs=self.costs, plan=self.plan)
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
                verify=self.verify,
            )

    def write_report(self, model: nn.Module) -> bool:
        """Write the report of the largest plan, if one is wished for; return whether there was a plan."""
        plans = api.plans(model)
        if plans and self.report is not None:
            max(plans, key=lambda plan: plan.baseline_peak_bytes).report(self.report)
        return bool(plans)


class ModelWatch:
    """The part of a callback that is the same for every library: one wish, one model, one report."""

    def __init__(self, **wish: Any) -> None:
        self.wish = Wish(**wish)
        self.model: nn.Module | None = None
        self._reported = False

    @property
    def plans(self) -> list[Plan]:
        """The plans made so far, one for each captured graph."""
        return [] if self.model is None else api.plans(self.model)

    def begin(self, model: nn.Module) -> None:
        """Wrap the model that is about to be trained."""
        self.wish.apply(model)
        self.model = model

    def step_ended(self) -> None:
        """Write the report after the first planned step."""
        if not self._reported and self.model is not None:
            self._reported = self.wish.write_report(self.model)
