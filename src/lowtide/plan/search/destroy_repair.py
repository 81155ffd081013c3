"""Improving a timeline by taking a part out and mending it another way."""

from __future__ import annotations

import random
import time

import numpy as np

from lowtide.plan.search.descent import descend, tidy
from lowtide.plan.search.drop_choice import Taste
from lowtide.plan.search.edited_schedule import Timeline
from lowtide.plan.search.ledger import Run
from lowtide.schedule.steps import Schedule

# The share of the repeated runs that is taken out at once, and about how many at most.
_SHARES = (0.03, 0.05, 0.1, 0.2)
_MOST_RUNS = 60
# By how much slower than before a mended schedule may be at first, as a share of plain training: less and less. And how
# many times slower than the best it must be not to be worth tidying. Both are more if the overhead is above a share.
_WARMTH, _HOPELESS = 0.01, 1.02
_WARMTH_ABOVE, _HOPELESS_ABOVE = 0.02, 1.03
_ABOVE = 0.15
_SPREADS = (0.3, 0.7, 1.5)
_DARING = (1.0, 1.1, 1.3)
_TRIES = (12, 40)
_LOWER = 0.98


class Dice:
    """The random numbers of a search, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self.few = random.Random(seed)
        self.many = np.random.default_rng(seed)

    def taste(self, num_values: int) -> Taste:
        """Return a random taste: each look at a value is disturbed by itself, or all looks at it in the same way."""
        few, spread = self.few, self.few.choice(_SPREADS)
        lasting = few.random() < 0.5
        return Taste(
            area=few.random() < 0.5,
            noise=None if lasting else self.many,
            spread=spread,
            leaning=np.exp(self.many.uniform(-spread, spread, num_values)) if lasting else None,
            daring=few.choice(_DARING),
            tries=few.choice(_TRIES),
        )

    def some(self, repeats: list[Run]) -> list[Run]:
        """Return some of the repeated runs: neighbours in time, or any."""
        few, share = self.few, min(self.few.choice(_SHARES), _MOST_RUNS / max(1, len(repeats)))
        if few.random() < 0.5:
            width = max(2, int(share * len(repeats)))
            start = few.randrange(1 - width, len(repeats))
            return repeats[max(0, start) : start + width]
        return [run for run in repeats if few.random() < share] or [few.choice(repeats)]


def improve(
    timeline: Timeline, limit: int, *, dice: Dice, work: int, patience: float = 10.0, until: float = float("inf")
) -> Schedule:
    """Return a schedule within `limit` that is no slower than `timeline`, which must be within it, and changes.

    Steps up are taken, too, ever smaller ones. It ends after about `work` units of work, or when many rounds have
    brought nothing: `patience` per repeated run, or when the clock shows `until`.
    """
    best, best_seconds, idle = timeline.schedule(), timeline.seconds, 0
    most, plain = timeline.work + work, sum(timeline.facts.seconds)
    above = best_seconds > (1 + _ABOVE) * plain
    warmth, too_slow = (_WARMTH_ABOVE, _HOPELESS_ABOVE) if above else (_WARMTH, _HOPELESS)
    timeline.commit()
    while timeline.work < most and time.perf_counter() < until:
        repeats = timeline.repeats()
        if not repeats or idle > 6 * patience + patience * len(repeats):
            break
        idle += 1
        timeline.work += 20 + len(timeline.rows) // 20
        allowed = timeline.seconds * (1 + 1e-12) + warmth * plain * dice.few.random() * (most - timeline.work) / work
        for run in dice.some(repeats):
            if timeline.exists(run):
                timeline.delete(run)
                timeline.prune()
        peak = descend(timeline, limit, dice.taste(len(timeline.facts.bytes)), hopeless=too_slow * best_seconds)
        if peak <= limit and timeline.seconds <= too_slow * best_seconds:
            tidy(timeline, limit, thorough=False)
            if timeline.seconds <= allowed:
                timeline.commit()
                if timeline.seconds < best_seconds * (1 - 1e-9):
                    best, best_seconds, idle = timeline.schedule(), timeline.seconds, 0
                continue
        timeline.undo()
    return best


def lower(timeline: Timeline, *, enough: int, dice: Dice, work: int) -> int:
    """Bring the peak of `timeline` down as far as about `work` units of work allow; return the peak.

    It ends early at a peak of at most `enough`; apart from that, the way there does not depend on `enough`.
    """
    best_peak, idle = timeline.peak(), 0
    until = timeline.work + work
    timeline.commit()
    while timeline.work < until and best_peak > enough:
        repeats = timeline.repeats()
        if idle > 60 + 10 * len(repeats):
            break
        idle += 1
        timeline.work += 20 + len(timeline.rows) // 20
        for run in dice.some(repeats) if repeats else ():
            if timeline.exists(run):
                timeline.delete(run)
                timeline.prune()
        peak = descend(timeline, _LOWER * best_peak, dice.taste(len(timeline.facts.bytes)))
        if peak < best_peak:
            best_peak, idle = peak, 0
            tidy(timeline, peak)
            timeline.commit()
        else:
            timeline.undo()
    return best_peak
