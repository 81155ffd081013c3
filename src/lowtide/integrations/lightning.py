"""Lightning: a callback for its `Trainer`."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.errors import InvalidOptionError
from lowtide.graph.costs import Costs
from lowtide.integrations.apply import ModelWatch
from lowtide.plan.core.planner import AbstractPlanner
from lowtide.plan.core.result import Plan
from lowtide.step.plan import StepPlan

# The library is published under two names, whose classes do not know each other.
if TYPE_CHECKING or importlib.util.find_spec("lightning") is not None:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    from pytorch_lightning import Callback, LightningModule, Trainer


class LowtideCallback(Callback):
    """Makes the training steps of a `LightningModule` fit a budget.

    Example:
        ```python
        trainer = Trainer(callbacks=[LowtideCallback(budget="6GiB")])
        ```

    What is planned is the call of the module, `self(...)`, or of one of its submodules, `self.net(...)`, if `module`
    names it. What `training_step` computes besides is not part of the plan: to have the loss in it, let `forward`
    return the loss.

    Args:
        budget: As for `lowtide.wrap`.
        module: Path of the submodule that `training_step` calls; by default the module itself.
        planner: As for `lowtide.wrap`.
        costs: As for `lowtide.wrap`.
        plan: As for `lowtide.wrap`.
        blocks: As for `lowtide.wrap`.
        verify: As for `lowtide.wrap`.
        patience: As for `lowtide.wrap`.
        on_infeasible: As for `lowtide.wrap`.
        report: Where to write a report after the first step: .html, .png, .svg or .txt.
    """

    def __init__(
        self,
        budget: int | str | None = None,
        *,
        module: str = "",
        planner: str | AbstractPlanner = "auto",
        costs: str | Costs = "measured",
        plan: Plan | StepPlan | str | Path | None = None,
        blocks: str | Sequence[str | type] = "auto",
        verify: bool = False,
        patience: float | str | None = None,
        on_infeasible: str = "raise",
        report: str | os.PathLike[str] | None = None,
    ) -> None:
        self._module = module
        self._watch = ModelWatch(
            budget=budget,
            planner=planner,
            costs=costs,
            plan=plan,
            blocks=blocks,
            verify=verify,
            patience=patience,
            on_infeasible=on_infeasible,
            report=report,
        )

    @property
    def plans(self) -> list[Plan | StepPlan]:
        """The plans made so far, as `lowtide.plans` returns them."""
        return self._watch.plans

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wrap the module."""
        try:
            model = pl_module.get_submodule(self._module)
        except AttributeError:
            names = ", ".join(name for name, _ in pl_module.named_children())
            raise InvalidOptionError(
                f"{type(pl_module).__name__} has no submodule {self._module!r}. It has: {names}."
            ) from None
        self._watch.begin(model)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write the report after the first step; say so if the steps do not call what was wrapped."""
        self._watch.step_ended()
        if not self._watch.plans:
            raise InvalidOptionError(
                f"A training step of {type(pl_module).__name__} has ended without a call of "
                f"{f'its submodule {self._module!r}' if self._module else 'the module itself'}, so there is nothing to "
                "plan. Name the submodule that training_step calls, as in LowtideCallback(module='net')."
            )
