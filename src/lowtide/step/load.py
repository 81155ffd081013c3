"""Saved plans of either kind."""

from __future__ import annotations

import os

from lowtide.plan.core.plan_file import STEP_FORMAT, loading, read_json
from lowtide.plan.core.result import Plan
from lowtide.step.plan import StepPlan
from lowtide.step.step_file import step_from_dict


def load(path: str | os.PathLike[str]) -> Plan | StepPlan:
    """Return the plan saved at `path`, of one graph or of a step of several blocks.

    Raises `PlanFileError` if the file is not a valid plan. Nothing in a file is executed; schedules are checked to be
    legal, and peaks are worked out anew.

    Example:
        ```python
        plan = lowtide.load("plan.json")
        ```

    Args:
        path: The file, as written by `plan.save`.
    """
    with loading(path):
        data = read_json(path)
        if isinstance(data, dict) and data.get("format") == STEP_FORMAT:
            return StepPlan.from_record(step_from_dict(data))
    return Plan.load(path)
