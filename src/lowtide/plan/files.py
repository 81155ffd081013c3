"""Saving and loading plans, as functions."""

from __future__ import annotations

import os

from lowtide.plan.result import Plan


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write `plan` to `path` as JSON; a reader sees the old file or the whole new one, never a part."""
    plan.save(path)


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Return the plan saved at `path`, every field checked; raise `PlanFileError` if it is not a valid plan."""
    return Plan.load(path)
