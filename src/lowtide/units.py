"""Bytes, seconds and counts as people write them, and sizes back; the only place where units live."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lowtide.errors import InvalidBudgetError

_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
# Plan files hold no larger numbers.
MOST_BUDGET_BYTES = 2**63 - 1
_SIZE = re.compile(r"\s*(?P<number>[0-9]*\.?[0-9]+)\s*(?P<unit>%|[A-Za-z]*)\s*")
_ALLOWED = 'A budget is a whole number of bytes, a size such as "6GiB" or "500MB", a share such as "50%", or "auto"'


@dataclass(frozen=True, slots=True)
class Budget:
    """A byte budget as the user gave it: `bytes`, a `fraction` of the unplanned peak, or neither ("auto")."""

    bytes: int | None = None
    fraction: float | None = None

    @property
    def is_auto(self) -> bool:
        """True if the budget is whatever the accelerator has free."""
        return self.bytes is None and self.fraction is None

    def resolve(self, baseline_peak_bytes: int) -> int:
        """Return the budget in bytes for a graph whose unplanned peak is `baseline_peak_bytes`."""
        if self.bytes is not None:
            return self.bytes
        if self.fraction is None:
            raise InvalidBudgetError('The budget "auto" must be replaced by free bytes before it is resolved.')
        return int(self.fraction * baseline_peak_bytes)

    def __str__(self) -> str:
        """Return the budget as a user would write it."""
        if self.bytes is not None:
            return format_bytes(self.bytes)
        return "auto" if self.fraction is None else f"{100 * self.fraction:g}%"


def parse_budget(budget: int | str | Budget) -> Budget:
    """Return the `Budget` that `budget` names.

    Example:
        ```python
        parse_budget("6GiB")
        #> Budget(bytes=6442450944, fraction=None)
        parse_budget("50%")
        #> Budget(bytes=None, fraction=0.5)
        ```
    """
    if isinstance(budget, Budget):
        return budget
    if isinstance(budget, bool) or not isinstance(budget, int | str):
        raise InvalidBudgetError(f"Budget {budget!r} is a {type(budget).__name__}. {_ALLOWED}.")
    if isinstance(budget, int):
        return Budget(bytes=_in_range(budget, budget))
    if budget.strip().lower() == "auto":
        return Budget()
    match = _SIZE.fullmatch(budget)
    if match is None:
        raise InvalidBudgetError(f"Budget {budget!r} is not understood. {_ALLOWED}.")
    number, unit = float(match["number"]), match["unit"].lower()
    if unit == "%":
        if not 0 < number <= 100:
            raise InvalidBudgetError(
                f"Budget {budget!r} is outside (0%, 100%]: a share is of the unplanned peak, and more than all of it "
                'changes nothing. Use "100%" to plan nothing away, or a size in bytes.'
            )
        return Budget(fraction=number / 100)
    if unit and unit not in _UNITS:
        raise InvalidBudgetError(f"Budget {budget!r} has the unknown unit {match['unit']!r}. {_ALLOWED}.")
    return Budget(bytes=_in_range(number * _UNITS[unit or "b"], budget))


def _in_range(number: int | float, budget: int | str) -> int:
    if number < 1:
        raise InvalidBudgetError(f"Budget {budget!r} is not above zero. {_ALLOWED}.")
    if number > MOST_BUDGET_BYTES:
        raise InvalidBudgetError(f"Budget {budget!s:.40} is above {MOST_BUDGET_BYTES} bytes. {_ALLOWED}.")
    return int(number)


def format_bytes(number: int | float) -> str:
    """Return `number` bytes with a binary unit and three to four significant digits."""
    size = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def format_seconds(seconds: float) -> str:
    """Return `seconds` with the unit that keeps it between 1 and 1000."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= scale:
            return f"{seconds / scale:.2f} {unit}"
    return f"{seconds * 1e9:.0f} ns" if seconds else "0 s"


def counted(number: int, noun: str) -> str:
    """Return `number` with its noun: "1 block run", "3 block runs"; `noun` is in the singular."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
