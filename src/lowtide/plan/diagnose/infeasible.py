"""The one message about budgets that cannot be met: what was given, what works, what is in the way, what would help."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.errors import InfeasibleBudgetError
from lowtide.plan.core.account import MemoryAccount
from lowtide.plan.core.result import Outcome, Plan
from lowtide.plan.diagnose.advice import Situation
from lowtide.plan.diagnose.alive import phase_at_peak
from lowtide.plan.diagnose.causes import (
    Part,
    account_parts,
    earlier_part,
    is_in_update,
    op_in_words,
    peak_parts,
    sort_parts,
)
from lowtide.units import Budget, format_bytes, parse_budget

_WIDTH = 100
# The command line writes the command's name before the first line, Python the error's.
_FIRST_WIDTH = 80
# Parts that would be shown as 0.0 % are not shown.
_NEGLIGIBLE = 0.0005


@dataclass(frozen=True, slots=True)
class AskedBudget:
    """The budget as the user gave it, for a whole call, of which a planned graph may be a part.

    Attributes:
        text: What the user wrote, such as "50%", "6GiB" or "auto".
        bytes: What it means in bytes.
        held_bytes: What other graphs of the same call hold of it while this graph runs.
        whole_bytes: What "100%" means; 0 if it is the unplanned peak of the graph and what others hold.
    """

    text: str
    bytes: int
    held_bytes: int = 0
    whole_bytes: int = 0

    @staticmethod
    def of(budget: Budget, budget_bytes: int, *, held_bytes: int = 0, whole_bytes: int = 0) -> AskedBudget:
        """Return `budget`, which means `budget_bytes`, as the user gave it."""
        return AskedBudget(str(budget), budget_bytes, held_bytes, whole_bytes)

    @property
    def is_share(self) -> bool:
        """Whether it is a percentage."""
        return self.text.strip().endswith("%")

    @property
    def left_bytes(self) -> int:
        """What is left of it for this graph."""
        return self.bytes - self.held_bytes

    def __str__(self) -> str:
        """Return it in the user's words and in bytes."""
        if self.is_share or self.text == "auto":
            return f"{self.text} ({self.bytes} bytes, {format_bytes(self.bytes)})"
        return _size(self.bytes)


def infeasible(plan: Plan, asked: AskedBudget | None = None, *, unit: str = "op") -> InfeasibleBudgetError:
    """Return the error that says why `plan`, the one of least peak known, does not fit the budget.

    Example:
        ```python
        plan = solve(problem, "auto", throw=False)
        if not plan.fits:
            raise infeasible(plan, AskedBudget("50%", 6_000_000, held_bytes=100_000))
        ```

    Args:
        plan: The plan.
        asked: The budget as the user gave it; by default the plan's own.
        unit: What ops are called: "op", or "block" in a chain.
    """
    asked = asked or AskedBudget(f"{plan.budget_bytes} bytes", plan.budget_bytes)
    least = asked.held_bytes + plan.peak_bytes
    whole = asked.whole_bytes or asked.held_bytes + plan.baseline_peak_bytes
    parts = sort_parts([*peak_parts(plan, unit), earlier_part(asked.held_bytes)])
    proved = plan.outcome is Outcome.IMPOSSIBLE
    share = least_share(least, whole) if asked.is_share else None
    situation = Situation(
        parts, asked.left_bytes, least - asked.bytes, plan.planner, op_in_words(plan, unit), unit, proved
    )
    raised = f"Raise the budget to {least} bytes or more"
    raised += f' (budget="{share}").' if share else "."
    lines = [
        *_wrapped(f"No schedule within the budget of {asked} was found.", width=_FIRST_WIDTH),
        *(["It is proved that there is none that runs the ops in the given order."] if proved else []),
        *_wrapped(
            f"The least budget known to work with planner {plan.planner!r} is {_size(least)}"
            f"{f', or {share}' if share else ''}."
        ),
        *_wrapped(f"It is {_percent(least, whole)} of the unplanned step, which takes {_size(whole)}."),
        *_wrapped(f"{_moment(plan, unit)} there are:"),
        *_table(parts),
        *_help([raised, *situation.advice()]),
    ]
    return InfeasibleBudgetError("\n".join(lines), budget_bytes=asked.bytes, least_bytes=least, plan=plan)


def infeasible_memory(
    account: MemoryAccount, plan: Plan, memory_bytes: int, *, least_batch: bool = False
) -> InfeasibleBudgetError:
    """Return the error that says why training does not fit a memory.

    Args:
        account: Where the memory goes with the plan of least peak known.
        plan: That plan.
        memory_bytes: The memory.
        least_batch: Whether the batch cannot be smaller.
    """
    parts, needed = account_parts(account, plan), account.peak_bytes
    in_update = is_in_update(account)
    situation = Situation(
        parts,
        memory_bytes - account.resident_bytes,
        needed - memory_bytes,
        plan.planner,
        op_in_words(plan),
        # Another schedule does not make the update smaller.
        proved=in_update or plan.outcome is Outcome.IMPOSSIBLE,
        least_batch=least_batch,
    )
    what = "A batch of one" if least_batch else "Training"
    lines = [
        *_wrapped(f"{what} does not fit the memory of {_size(memory_bytes)}.", width=_FIRST_WIDTH),
        *_wrapped(f"The least memory known to work with planner {plan.planner!r} is {_size(needed)}."),
        *_wrapped(f"{'At that peak, in the update by the optimizer,' if in_update else _moment(plan)} there are:"),
        *_table(parts),
        *_help([f"Use {needed} bytes of memory or more.", *situation.advice()]),
    ]
    return InfeasibleBudgetError("\n".join(lines), budget_bytes=memory_bytes, least_bytes=needed, plan=plan)


def infeasible_chain(memory_bytes: int, least_bytes: int) -> InfeasibleBudgetError:
    """Return the error about a chain of layers without a graph, of which nothing but two figures is known."""
    lines = [
        *_wrapped(f"No persistent schedule of the chain within {_size(memory_bytes)} was found.", width=_FIRST_WIDTH),
        *_wrapped(f"The least memory known to work beyond the chain's input is {_size(least_bytes)}."),
        *_help([f"Raise the memory to {least_bytes} bytes or more.", "Count in more slots."]),
    ]
    return InfeasibleBudgetError("\n".join(lines), budget_bytes=memory_bytes, least_bytes=least_bytes)


def least_share(least_bytes: int, whole_bytes: int) -> str | None:
    """Return the least percentage, to a tenth, that gives `least_bytes` of `whole_bytes`; None if all is too little."""
    tenths = -(-1000 * least_bytes // max(whole_bytes, 1))
    for count in (max(tenths, 1), tenths + 1):
        text = f"{count / 10:g}%"
        # A percentage becomes bytes by rounding down, so the tenth above may be needed.
        if count <= 1000 and parse_budget(text).resolve(whole_bytes) >= least_bytes:
            return text
    return None


def _moment(plan: Plan, unit: str = "op") -> str:
    step, steps = plan.trace.peak_step + 1, len(plan.schedule.steps)
    return f"At that peak, in {phase_at_peak(plan)} at step {step} of {steps}, {op_in_words(plan, unit)},"


def _table(parts: Sequence[Part]) -> list[str]:
    total = sum(part.bytes for part in parts)
    lines = []
    for part in parts:
        if part.bytes < _NEGLIGIBLE * total:
            continue
        head = f"  {format_bytes(part.bytes):>11}  {100 * part.bytes / max(total, 1):5.1f} %  "
        lines += _wrapped(part.words, first=head, then=" " * len(head))
    return lines


def _help(advice: Sequence[str]) -> list[str]:
    return ["What would help:", *(line for each in advice for line in _wrapped(each, first="- ", then="  "))]


def _wrapped(text: str, *, first: str = "", then: str = "", width: int = _WIDTH) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=then, break_on_hyphens=False)


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.1f} %"


def _size(number: int) -> str:
    return f"{number} bytes" if number < 1024 else f"{number} bytes ({format_bytes(number)})"
