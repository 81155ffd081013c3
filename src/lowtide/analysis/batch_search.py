"""The largest batch that fits: a search that asks as rarely as it can, and what it found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lowtide.plan.core.account import MemoryAccount
from lowtide.plan.core.result import Plan
from lowtide.plan.diagnose.infeasible import infeasible_memory
from lowtide.step.peak import peak_facts
from lowtide.step.plan import StepPlan
from lowtide.text_table import text_table
from lowtide.units import format_bytes

MOST = 2**20


@dataclass(frozen=True, slots=True)
class Trial:
    """One batch size that was tried.

    Attributes:
        batch: The size.
        fits: Whether training takes no more than the memory there is.
        plan: The plan; if it does not fit, the one of least peak known.
        account: Where the memory goes.
    """

    batch: int
    fits: bool
    plan: Plan | StepPlan
    account: MemoryAccount

    @property
    def needed_bytes(self) -> int:
        """Peak of training."""
        return self.account.peak_bytes


@dataclass(frozen=True, slots=True)
class BatchFit:
    """What `max_batch` returns; `int(fit)` is the batch size.

    Attributes:
        batch: The largest batch that trains within the memory.
        memory_bytes: The memory.
        plan: The plan for this batch; pass it to `lowtide.wrap(model, plan=...)`.
        account: Where the memory goes.
        trials: All sizes that were planned, in the order in which they were tried.
    """

    batch: int
    memory_bytes: int
    plan: Plan | StepPlan
    account: MemoryAccount
    trials: tuple[Trial, ...]

    @property
    def is_limit(self) -> bool:
        """Whether larger batches were not tried because the limit was reached."""
        return all(trial.fits for trial in self.trials)

    def __int__(self) -> int:
        """Return the batch size."""
        return self.batch

    __index__ = __int__

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the schedule as numbers and strings, for JSON."""
        plan = self.plan
        return {
            "format": "lowtide-max-batch",
            "version": 1,
            "batch": self.batch,
            "is_limit": self.is_limit,
            "memory_bytes": self.memory_bytes,
            "peak_bytes": self.account.peak_bytes,
            "overhead": plan.overhead,
            "planner": plan.planner,
            "costs": plan.costs_source,
            "account": self.account.to_dict(),
            "trials": [
                {"batch": trial.batch, "fits": trial.fits, "needed_bytes": trial.needed_bytes} for trial in self.trials
            ],
        }

    def __str__(self) -> str:
        """Return the answer, where the memory goes, and what was tried."""
        plan, peak = self.plan, self.account.peak_bytes
        limit = " (larger ones were not tried)" if self.is_limit else ""
        rows = [
            (str(trial.batch), format_bytes(trial.needed_bytes), "fits" if trial.fits else "does not fit")
            for trial in sorted(self.trials, key=lambda trial: trial.batch)
        ]
        return "\n".join(
            [
                f"Largest batch: {self.batch}{limit}, with a peak of {format_bytes(peak)} of "
                f"{format_bytes(self.memory_bytes)} and {100 * plan.overhead:.2f} % more time.",
                "",
                *self.account.lines(),
                "",
                *text_table(("batch", "needs", ""), rows, left=(2,)),
            ]
        )


def search(attempt: Callable[[int], Trial], memory_bytes: int, *, most: int = MOST) -> BatchFit:
    """Return the largest batch up to `most` for which `attempt` finds a plan.

    Sizes are taken to need more memory the larger they are. What does not fit says how much it would need; the next
    guess is on the line through what two of them would need.
    """
    trials: dict[int, Trial] = {}

    def fits(batch: int) -> bool:
        trials[batch] = attempt(batch)
        return trials[batch].fits

    if not fits(1):
        raise infeasible_memory(trials[1].account, peak_facts(trials[1].plan), memory_bytes, least_batch=True)
    low, high = 1, _first_guess(trials[1], memory_bytes, most)
    while low < most and fits(high):
        low, high = high, min(most, 2 * high)
    slow = 0
    while low < most and high - low > 1:
        span = high - low
        # A guess at the edge tries a neighbour, which is what remains when the line is right; if it is not, halve.
        guess = (low + high) // 2 if slow > 1 else _guess(trials, memory_bytes)
        guess = min(max(guess, low + 1), high - 1)
        low, high = (guess, high) if fits(guess) else (low, guess)
        slow = slow + 1 if 2 * (high - low) > span else 0
    best = trials[low]
    return BatchFit(low, memory_bytes, best.plan, best.account, tuple(trials.values()))


def _first_guess(trial: Trial, memory_bytes: int, most: int) -> int:
    """Return a size that fills the memory if what a batch of one needs on top of the model were all it needed."""
    fixed = trial.account.resident_bytes - trial.account.batch_bytes + trial.account.gradient_bytes
    each = max(1, trial.account.batch_bytes + trial.plan.baseline_peak_bytes - trial.account.gradient_bytes)
    return max(2, min(most, (memory_bytes - fixed) // each))


def _guess(trials: Mapping[int, Trial], memory_bytes: int) -> int:
    """Return where the line through the two least sizes that do not fit meets the memory.

    Sizes that fit say nothing: a plan uses the memory there is. With one size that does not, the line begins at what
    is resident without a batch.
    """
    near, *others = sorted((trial for trial in trials.values() if not trial.fits), key=lambda trial: trial.batch)
    account = near.account
    batch, needed = (
        (others[0].batch, others[0].needed_bytes) if others else (0, account.resident_bytes - account.batch_bytes)
    )
    each = max(1.0, (near.needed_bytes - needed) / (near.batch - batch))
    return int(near.batch - (near.needed_bytes - memory_bytes) / each)
