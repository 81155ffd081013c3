"""What `auto` does for a problem, decided before it begins."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lowtide.plan.auto.policy import POLICY
from lowtide.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What `auto` does for one problem, and why.

    Attributes:
        num_ops: Number of ops of the graph.
        budget_bytes: The budget.
        baseline_bytes: The peak of plain training.
        least_peak_bytes: No schedule in the given order has a peak below this.
        effort: The option.
        gap: Gap to the bound at which it ends, before it is limited to a share of the overhead.
        time_limit: The option.
        asked: The planners that are asked first.
        asked_if_nothing_fits: The planners that are asked if neither these nor descents find something that fits.
        left_out: The planners that are not asked, each with the reason.
        descends_itself: Whether plain descents in all orders replace the planner `greedy`.
    """

    num_ops: int
    budget_bytes: int
    baseline_bytes: int
    least_peak_bytes: int
    effort: float
    gap: float
    time_limit: float | None
    asked: tuple[str, ...]
    asked_if_nothing_fits: tuple[str, ...]
    left_out: tuple[tuple[str, str], ...]
    descends_itself: bool

    @property
    def fits_already(self) -> bool:
        """Whether plain training fits, so that there is nothing to do."""
        return self.baseline_bytes <= self.budget_bytes

    @property
    def is_impossible(self) -> bool:
        """Whether no schedule in the given order fits."""
        return self.least_peak_bytes > self.budget_bytes

    @property
    def searches(self) -> bool:
        """Whether it searches and proves at all, beside asking planners."""
        return self.effort > 0

    @property
    def is_economical(self) -> bool:
        """Whether rounds are expensive and the user did not ask for thoroughness."""
        return self.effort <= 1 and self.num_ops > POLICY.sizes.large

    @property
    def may_end_early(self) -> bool:
        """Whether rounds that gain little are the last ones: they take long and no thoroughness is asked for."""
        return self.effort <= 1 and self.num_ops > POLICY.sizes.medium

    @property
    def other_orders(self) -> bool:
        """Whether other orders of first runs are searched, too."""
        return self.searches and self.num_ops <= POLICY.orders.max_ops

    @property
    def proves(self) -> bool:
        """Whether a bound is proved."""
        return self.searches and self.num_ops <= POLICY.proof.max_ops

    @property
    def own_process(self) -> bool:
        """Whether the proof runs in a process of its own, on another core."""
        hurried = self.time_limit is not None and self.time_limit <= POLICY.proof.process_min_seconds
        return self.proves and not hurried and self.num_ops > POLICY.proof.process_min_ops

    @property
    def proof_share(self) -> float:
        """The share of its usual work that the proof gets."""
        return POLICY.proof.large_share if self.is_economical else 1.0

    @property
    def work_scale(self) -> float:
        """How many times their usual work all searches and proofs get."""
        return max(1.0, self.effort / POLICY.rounds.effort_per_scale)

    @property
    def little_gap(self) -> float:
        """A gap with which it need not go on."""
        return POLICY.gaps.little_in_large if self.num_ops > POLICY.sizes.large else POLICY.gaps.little

    @property
    def num_polishes(self) -> int:
        """How many polishing searches there are at most."""
        if not self.searches:
            return 0
        return POLICY.polish.max_searches - (POLICY.polish.early_in_large if self.is_economical else 0)

    def stop_gap(self, overhead: float) -> float:
        """Return the gap to the bound with which a schedule of that overhead is good enough."""
        return min(self.gap, POLICY.gaps.share_of_overhead * overhead)

    def num_rounds(self, gap: float) -> int:
        """Return how many rounds there are at most with that gap so far, infinite while nothing fits."""
        if not self.searches:
            return 0
        if self.effort <= 1 and (self.num_ops > POLICY.sizes.huge or math.isinf(gap)):
            return 1
        usual = round(len(POLICY.rounds.rounds) * min(self.effort, POLICY.rounds.max_effort))
        return max(1, usual) + self.num_more_rounds(gap)

    def num_more_rounds(self, gap: float) -> int:
        """Return how many rounds more there are where the gap is far or wide, unless rounds are expensive."""
        if self.effort > 1 or self.is_economical:
            return 0
        return (gap > POLICY.gaps.far) + (gap > POLICY.gaps.wide)

    def __str__(self) -> str:
        """Return a few lines for people."""
        return "\n".join(f"{what:<10}{text}" for what, text in self._lines())

    def _lines(self) -> list[tuple[str, str]]:
        sizes = f"{format_bytes(self.budget_bytes)} of {format_bytes(self.baseline_bytes)}"
        lines = [("problem", f"{self.num_ops} ops within {sizes}")]
        if self.fits_already:
            return [*lines, ("answer", "plain training fits: nothing to do")]
        if self.is_impossible:
            least = format_bytes(self.least_peak_bytes)
            lines.append(("memory", f"the given order of ops needs at least {least}: only another order may fit"))
        lines.append(("asks", ", ".join(self.asked) or "no planner"))
        if self.asked_if_nothing_fits:
            lines.append(("", f"if nothing fits: {', '.join(self.asked_if_nothing_fits)}"))
        lines += [("", f"not {name}: {reason}") for name, reason in self.left_out]
        if not self.searches:
            return [*lines, ("search", "none: the effort is 0")]
        return [*lines, ("orders", self._orders()), ("search", self._search()), ("proof", self._proof()), self._end()]

    def _orders(self) -> str:
        if self.other_orders:
            return "the given one and the best other one, by turns while they are near each other"
        return f"the given one only: more than {POLICY.orders.max_ops:,} ops"

    def _search(self) -> str:
        usual, most = self.num_rounds(0.0), self.num_rounds(1.0)
        if self.is_economical:
            usual = most = min(usual, POLICY.rounds.max_in_large)
        rounds = f"up to {usual} round{'s' * (usual > 1)}"
        if most > usual:
            rounds += f" ({most} where the gap stays wide)"
        if self.may_end_early and most > 1:
            rounds += f", fewer once they gain little: more than {POLICY.sizes.medium:,} ops"
        return f"{rounds}; then up to {self.num_polishes} polishing searches"

    def _proof(self) -> str:
        if not self.proves:
            return f"none: more than {POLICY.proof.max_ops:,} ops"
        if self.own_process:
            return "in a process of its own"
        if self.num_ops <= POLICY.proof.process_min_ops:
            return f"in a thread: up to {POLICY.proof.process_min_ops} ops, a process would take too long to start"
        return "in a thread: the time limit is short"

    def _end(self) -> tuple[str, str]:
        share = POLICY.gaps.share_of_overhead
        limit = "" if self.time_limit is None else f", or after {self.time_limit:g} s"
        return "ends", f"within {self.gap:.2%} of a step of the proved bound, {share:.0%} of a small overhead{limit}"
