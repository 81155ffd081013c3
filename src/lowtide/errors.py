"""The errors lowtide raises, as one small tree.

Every error is a `LowtideError` and also the built-in that fits it, so callers may catch either. A message states the
fact with its values, what is allowed, and what to do.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

_NOT_THE_USERS = ("lowtide.", "torch.", "contextlib", "concurrent.", "threading")


class LowtideError(Exception):
    """Base of everything lowtide raises on purpose."""


class InvalidBudgetError(LowtideError, ValueError):
    """The budget is not a number of bytes, a size such as `"6GiB"`, or a percentage in (0, 100]."""


class InvalidGraphError(LowtideError, ValueError):
    """A graph breaks one of its own rules: an input without producer, a size below zero, a cycle."""


class InvalidScheduleError(LowtideError, ValueError):
    """A schedule breaks a rule of its graph: an input that is not there, an op that must not run twice."""


class InvalidModelError(LowtideError, TypeError):
    """The object given is not a model or function that can be trained."""


class InvalidInputError(LowtideError, ValueError):
    """The call's inputs cannot be planned: tensors on several devices, or no tensor that needs a gradient."""


class InvalidOptionError(LowtideError, ValueError):
    """An option has a value that does not exist: an unknown cost source, backend option or device name."""


class UnknownPlannerError(LowtideError, KeyError):
    """No planner is registered under this name."""

    def __str__(self) -> str:
        """Return the message itself: `KeyError` would print its quoted form."""
        return str(self.args[0])


class PlannerRefusedError(LowtideError, ValueError):
    """The planner cannot serve this problem; the message says what it needs."""


class InfeasibleBudgetError(LowtideError, ValueError):
    """No schedule within the budget was found.

    Attributes:
        budget_bytes: The budget that was given.
        least_bytes: The least budget known to work.
        plan: The `Plan` of least peak known, which `lowtide.explain` explains; None if there is no graph.
    """

    def __init__(self, message: str, *, budget_bytes: int, least_bytes: int, plan: Any = None) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.least_bytes = least_bytes
        self.plan = plan


class PlanFileError(LowtideError, ValueError):
    """A plan file is unreadable, truncated, of another version, or made for another graph."""


class ReportError(LowtideError, RuntimeError):
    """A report or picture could not be written."""


class CaptureError(LowtideError, RuntimeError):
    """The model's training graph could not be captured."""


class MeasureError(LowtideError, RuntimeError):
    """Peak memory or the cost of an op could not be measured."""


class UnsupportedBackwardError(LowtideError, RuntimeError):
    """Backward was asked for something a planned graph cannot give, such as a second derivative."""


class VerificationError(LowtideError, RuntimeError):
    """`verify=True` found a result that differs from plain training."""


class RanksError(LowtideError, RuntimeError):
    """Processes that train together cannot go on: one of them is gone, or they would communicate in other orders."""


class UnsupportedTorchError(LowtideError, ImportError):
    """The PyTorch that is installed lacks private names that lowtide needs; the message lists them."""


class LowtideWarning(UserWarning):
    """Something the user should know; training goes on."""


def warn(message: str) -> None:
    """Give a `LowtideWarning` at the line of the user's that led here."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(_NOT_THE_USERS):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, LowtideWarning, stacklevel=level)
