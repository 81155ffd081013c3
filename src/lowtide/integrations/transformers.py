"""Hugging Face `Trainer`: a callback in place of `gradient_checkpointing=True`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from lowtide.errors import InvalidOptionError
from lowtide.graph.costs import Costs
from lowtide.integrations.apply import ModelWatch
from lowtide.plan.core.planner import AbstractPlanner
from lowtide.plan.core.result import Plan
from lowtide.step.plan import StepPlan


class LowtideCallback(TrainerCallback):
    """Makes the training steps of a `Trainer` fit a budget.

    Example:
        ```python
        trainer = Trainer(model, args, train_dataset=data, callbacks=[LowtideCallback(budget="6GiB")])
        ```

    The model is wrapped when training begins and stays wrapped; evaluation, saving and loading do not notice. The loss
    that a Transformers model computes from its labels is part of the plan. A loss of your own (`compute_loss_func`,
    label smoothing) is computed outside of the model, and its memory comes on top.

    Args:
        budget: As for `lowtide.wrap`.
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
        planner: str | AbstractPlanner = "auto",
        costs: str | Costs = "measured",
        plan: Plan | StepPlan | str | Path | None = None,
        blocks: str | Sequence[str | type] = "auto",
        verify: bool = False,
        patience: float | str | None = None,
        on_infeasible: str = "raise",
        report: str | os.PathLike[str] | None = None,
    ) -> None:
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

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **others: Any,
    ) -> None:
        """Wrap the model."""
        if args.gradient_checkpointing or args.torch_compile:
            name = "gradient_checkpointing" if args.gradient_checkpointing else "torch_compile"
            raise InvalidOptionError(
                f"TrainingArguments has {name}=True, which LowtideCallback takes the place of: use one of the two."
            )
        if model is None:
            raise InvalidOptionError("The Trainer gave its callbacks no model; LowtideCallback has nothing to wrap.")
        self._watch.begin(model)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        """Write the report after the first step."""
        self._watch.step_ended()
