"""The one message about budgets that cannot be met: what was given, what works, what is in the way, what would help."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lowtide.errors import InfeasibleBudgetError
from lowtide.plan.core.account import MemoryAccount
from lowtide.plan.core.result import Plan
from lowtide.plan.diagnose.peak_parts import (
    Cause,
    Part,
    PeakFacts,
    account_parts,
    earlier_part,
    graph_peak,
    is_in_update,
    sort_parts,
)
from lowtide.units import Budget, format_bytes, parse_budget

# A cause is worth advice from this share of the peak on.
_SHARE = 1 / 3
_GROWS_WITH_BATCH = (Cause.OP, Cause.KEPT, Cause.PASSING, Cause.OUTPUTS, Cause.BATCH, Cause.BLOCKS, Cause.BETWEEN)
_OF_OPTIMIZER = (Cause.OPTIMIZER, Cause.UPDATE)
# What another schedule may hold less of.
_AVOIDABLE = (Cause.KEPT, Cause.PASSING, Cause.STATES, Cause.EARLIER, Cause.BLOCKS)
_SEARCH_ALL = ("auto_thorough", "brute_force")


@dataclass(frozen=True, slots=True)
class Situation:
    """A budget that is not met.

    Attributes:
        parts: What is there at the least peak known.
        left_bytes: What the budget leaves for the step.
        excess_bytes: By how much the peak is above the budget.
        planner: Name of the planner that found the least peak.
        op: What runs at the peak, in words.
        unit: What ops are called: "op", or "block" in a chain.
        proved: Whether it is proved that no schedule in the given order fits.
        least_batch: Whether the batch cannot be smaller.
    """

    parts: Sequence[Part]
    left_bytes: int
    excess_bytes: int
    planner: str
    op: str
    unit: str = "op"
    proved: bool = False
    least_batch: bool = False

    def advice(self) -> list[str]:
        """Return what would help, one sentence or two each."""
        return [words for words in self._all() if words]

    def _all(self) -> Iterator[str]:
        weighty = self.weighty()
        if Cause.GRADIENTS in weighty:
            yield (
                "Train fewer parameters: a smaller model, frozen parts (requires_grad_(False)) or adapters. "
                "Gradients stay to the end of the step, whatever is recomputed and however small the batch is."
                f"{self._alone(Cause.GRADIENTS)}"
            )
        if Cause.OUTPUTS in weighty:
            yield (
                "Return only the loss: compute it inside the model. What a call returns stays as long as the caller "
                f"holds it.{self._alone(Cause.OUTPUTS)}"
            )
        if Cause.OP in weighty:
            yield f"{self._split()}{self._alone(Cause.OP)}"
        if self._share(*_GROWS_WITH_BATCH) >= _SHARE:
            yield self._smaller_batch()
        if Cause.EARLIER in weighty:
            yield "Remove the graph breaks before this part of the model (TORCH_LOGS=graph_breaks shows them)."
        if Cause.BETWEEN in weighty:
            yield (
                "Hold less between the blocks: what the code there makes or passes on is not planned. Let go of it "
                "earlier (del), or move that code into a module that is a block."
            )
        if self._share(*_OF_OPTIMIZER) >= _SHARE:
            yield 'Use an optimizer that keeps less: "sgd" keeps nothing, "sgd-momentum" half of what "adam" does.'
        if self._share(Cause.PARAMETERS, *_OF_OPTIMIZER) >= _SHARE:
            yield "Use a smaller model, a smaller dtype for its parameters, or train fewer of them."
        if self._another_planner_may_help():
            yield 'Search longer: planner="auto_thorough" may find a schedule that needs less.'

    def weighty(self) -> set[Cause]:
        """Return the causes that make up a third of the peak or more, and the largest."""
        return {part.cause for part in self.parts if self._share(part.cause) >= _SHARE or part is self.parts[0]}

    def _share(self, *causes: Cause) -> float:
        total = sum(part.bytes for part in self.parts)
        return sum(part.bytes for part in self.parts if part.cause in causes) / max(total, 1)

    def _alone(self, cause: Cause) -> str:
        alone = any(part.cause is cause and self._is_too_much(part) for part in self.parts)
        return " This alone is more than the budget leaves: no planner can help." if alone else ""

    def _is_too_much(self, part: Part) -> bool:
        return part.floor_bytes > max(self.left_bytes, 0)

    def _split(self) -> str:
        if self.unit == "block":
            return f"Divide this block into several: {self.op}."
        return f"Split this op into several that work on less at once: {self.op}."

    def _smaller_batch(self) -> str:
        what = "the inputs smaller" if self.least_batch else "the batch smaller"
        share = 100 * self._share(*_GROWS_WITH_BATCH)
        return f"Make {what}, sequences shorter or images smaller: {share:.1f} % of the peak may grow with them."

    def _another_planner_may_help(self) -> bool:
        above = any(map(self._is_too_much, self.parts))
        avoidable = sum(part.bytes for part in self.parts if part.cause in _AVOIDABLE) >= self.excess_bytes
        return self.planner not in _SEARCH_ALL and not self.proved and avoidable and not above


# Messages are wrapped at this width: they are read in terminals and in logs.
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
    peak = graph_peak(plan, unit)
    peak = replace(peak, parts=sort_parts([*peak.parts, earlier_part(asked.held_bytes)]))
    proof = "It is proved that there is none that runs the ops in the given order." if peak.proved else ""
    return budget_error(asked, peak, least_bytes=least, whole_bytes=whole, proof=proof, unit=unit)


def budget_error(
    asked: AskedBudget, peak: PeakFacts, *, least_bytes: int, whole_bytes: int, proof: str = "", unit: str = "op"
) -> InfeasibleBudgetError:
    """Return the error about a budget that no schedule keeps, in the words of all such errors.

    Args:
        asked: The budget as the user gave it.
        peak: The least peak known.
        least_bytes: The least budget known to work.
        whole_bytes: What the step takes without a plan.
        proof: What is proved, a sentence.
        unit: What ops are called: "op", or "block" in a chain.
    """
    situation = Situation(
        peak.parts, asked.left_bytes, least_bytes - asked.bytes, peak.planner, peak.op, unit, peak.proved
    )
    share = least_share(least_bytes, whole_bytes) if asked.is_share else None
    raised = f"Raise the budget to {least_bytes} bytes or more"
    raised += f' (budget="{share}").' if share else "."
    lines = [
        *_wrapped(f"No schedule within the budget of {asked} was found.", width=_FIRST_WIDTH),
        *_wrapped(proof),
        *_wrapped(
            f"The least budget known to work with planner {peak.planner!r} is {_size(least_bytes)}"
            f"{f', or {share}' if share else ''}."
        ),
        *_wrapped(
            f"It is {_percent(least_bytes, whole_bytes)} of the unplanned step, which takes {_size(whole_bytes)}."
        ),
        *_wrapped(f"{peak.moment} there are:"),
        *_table(peak.parts),
        *_help([raised, *situation.advice()]),
    ]
    return InfeasibleBudgetError("\n".join(lines), budget_bytes=asked.bytes, least_bytes=least_bytes, plan=peak.plan)


def infeasible_memory(
    account: MemoryAccount, peak: PeakFacts, memory_bytes: int, *, least_batch: bool = False
) -> InfeasibleBudgetError:
    """Return the error that says why training does not fit a memory.

    Args:
        account: Where the memory goes with the plan of least peak known.
        peak: The peak of that plan.
        memory_bytes: The memory.
        least_batch: Whether the batch cannot be smaller.
    """
    parts, needed = account_parts(account, peak), account.peak_bytes
    in_update = is_in_update(account)
    situation = Situation(
        parts,
        memory_bytes - account.resident_bytes,
        needed - memory_bytes,
        peak.planner,
        peak.op,
        # Another schedule does not make the update smaller.
        proved=in_update or peak.proved,
        least_batch=least_batch,
    )
    what = "A batch of one" if least_batch else "Training"
    lines = [
        *_wrapped(f"{what} does not fit the memory of {_size(memory_bytes)}.", width=_FIRST_WIDTH),
        *_wrapped(f"The least memory known to work with planner {peak.planner!r} is {_size(needed)}."),
        *_wrapped(f"{'At that peak, in the update by the optimizer,' if in_update else peak.moment} there are:"),
        *_table(parts),
        *_help([f"Use {needed} bytes of memory or more.", *situation.advice()]),
    ]
    return InfeasibleBudgetError("\n".join(lines), budget_bytes=memory_bytes, least_bytes=needed, plan=peak.plan)


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
