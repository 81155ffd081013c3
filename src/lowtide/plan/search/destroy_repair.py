"""Destroy and repair with annealing: take some repeated runs out, repair the schedule by a descent, keep good results.

A result that is slightly slower is kept, too, within a temperature that falls with the work left. The random numbers
are the same for the same seed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable

import numpy as np

from lowtide.plan.search.descent import descend, tidy
from lowtide.plan.search.drop_choice import DropPolicy
from lowtide.plan.search.edited_schedule import EditedSchedule
from lowtide.plan.search.ledger import Run
from lowtide.plan.search.policy import REPAIR
from lowtide.schedule.steps import Schedule


class SearchRandom:
    """The random choices of a search, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._scalars = random.Random(seed)
        self._arrays = np.random.default_rng(seed)

    def share(self) -> float:
        """Return a number between 0 and 1."""
        return self._scalars.random()

    def coin(self) -> bool:
        """Return True every other time."""
        return self.share() < 0.5

    def drop_policy(self, num_values: int) -> DropPolicy:
        """Return a random policy, whose factors are drawn for every score or once for every value."""
        choice, spread = self._scalars.choice, self._scalars.choice(REPAIR.spreads)
        per_value = self.coin()
        return DropPolicy(
            area=self.coin(),
            noise=None if per_value else self._arrays,
            spread=spread,
            bias=np.exp(self._arrays.uniform(-spread, spread, num_values)) if per_value else None,
            overshoot=choice(REPAIR.overshoots),
            tries=choice(REPAIR.tries),
        )

    def some(self, repeats: list[Run]) -> list[Run]:
        """Return some of the repeated runs: neighbours in time, or any."""
        share = min(self._scalars.choice(REPAIR.destroyed_shares), REPAIR.max_destroyed / max(1, len(repeats)))
        if self.coin():
            width = max(2, int(share * len(repeats)))
            start = self._scalars.randrange(1 - width, len(repeats))
            return repeats[max(0, start) : start + width]
        return [run for run in repeats if self.share() < share] or [self._scalars.choice(repeats)]


def improve(
    edited: EditedSchedule, limit: int, *, rng: SearchRandom, work: int, deadline: float = float("inf")
) -> Schedule:
    """Return a schedule within `limit` that is no slower than `edited`, which must be within it, and changes.

    The search ends after about `work` units of work, when many rounds have gained nothing, or at the `deadline`, a time
    of `time.perf_counter`.
    """
    best, best_seconds, without_gain = edited.schedule(), edited.seconds, 0
    most, plain = edited.work + work, sum(edited.arrays.seconds)
    high = best_seconds > (1 + REPAIR.high_overhead) * plain
    temperature = REPAIR.high_temperature if high else REPAIR.temperature
    max_slowdown = REPAIR.high_max_slowdown if high else REPAIR.max_slowdown
    edited.commit()
    while edited.work < most and time.perf_counter() < deadline:
        repeats = edited.repeats()
        if not repeats or without_gain > REPAIR.patience_extra + REPAIR.patience * len(repeats):
            break
        without_gain += 1
        edited.work += _round_work(edited)
        slower = temperature * plain * rng.share() * (most - edited.work) / work
        allowed = edited.seconds * (1 + 1e-12) + slower
        _take_out(edited, rng.some(repeats))
        too_slow = max_slowdown * best_seconds
        peak = descend(edited, limit, rng.drop_policy(len(edited.arrays.bytes)), max_seconds=too_slow)
        if peak <= limit and edited.seconds <= too_slow:
            tidy(edited, limit, thorough=False)
            if edited.seconds <= allowed:
                edited.commit()
                if edited.seconds < best_seconds * (1 - 1e-9):
                    best, best_seconds, without_gain = edited.schedule(), edited.seconds, 0
                continue
        edited.undo()
    return best


def lower_peak(edited: EditedSchedule, *, enough: int, rng: SearchRandom, work: int) -> int:
    """Bring the peak of `edited` down as far as about `work` units of work allow; return the peak.

    The search ends early at a peak of at most `enough`; nothing else depends on `enough`.
    """
    best_peak, without_gain = edited.peak(), 0
    most = edited.work + work
    edited.commit()
    while edited.work < most and best_peak > enough:
        repeats = edited.repeats()
        if without_gain > REPAIR.patience_extra + REPAIR.patience * len(repeats):
            break
        without_gain += 1
        edited.work += _round_work(edited)
        _take_out(edited, rng.some(repeats) if repeats else ())
        peak = descend(edited, REPAIR.peak_step * best_peak, rng.drop_policy(len(edited.arrays.bytes)))
        if peak < best_peak:
            best_peak, without_gain = peak, 0
            tidy(edited, peak)
            edited.commit()
        else:
            edited.undo()
    return best_peak


def _take_out(edited: EditedSchedule, runs: Iterable[Run]) -> None:
    """Take out `runs`, and those that are redundant without them."""
    for run in runs:
        if edited.exists(run):
            edited.delete(run)
            edited.prune()


def _round_work(edited: EditedSchedule) -> int:
    """Return about the microseconds that a round takes beside its edits."""
    return 20 + len(edited.rows) // 20
