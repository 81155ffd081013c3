"""Improving a draft by taking a part out and mending it another way."""

from __future__ import annotations

import numpy as np

from lowtide.plan.search.draft import Draft, Facts
from lowtide.plan.search.drop import Taste, descend
from lowtide.plan.search.pricer import Pricer
from lowtide.plan.search.tidy import tidy

_SHARES = (0.05, 0.1, 0.2, 0.4, 1.0)
# A mended draft this much slower than the best is not worth tidying.
_HOPELESS = 1.02
_SPREADS = (0.3, 0.7, 1.5)
_DARING = (1.0, 1.1, 1.3)
_LOWER = 0.98


def improve(facts: Facts, pricer: Pricer, draft: Draft, limit: int, *, rng: np.random.Generator, work: int) -> Draft:
    """Return a draft within `limit` that is no slower than `draft`, after pricing about `work` steps at most.

    It ends early when many rounds have brought nothing.
    """
    best, best_seconds, idle = draft, facts.total_seconds(draft), 0
    until = pricer.work + work
    while pricer.work < until:
        repeats = best.repeats()
        if not repeats or idle > _patience(repeats):
            break
        idle += 1
        mended, peak = descend(facts, pricer, best.remove(_choose(repeats, rng)), limit, _disturbed(rng))
        if peak > limit or facts.total_seconds(mended) > _HOPELESS * best_seconds:
            continue
        mended = tidy(facts, pricer, mended, limit)
        seconds = facts.total_seconds(mended)
        if seconds <= best_seconds:
            idle = 0 if seconds < best_seconds else idle
            best, best_seconds = mended, seconds
    return best


def lower(
    facts: Facts, pricer: Pricer, draft: Draft, *, enough: int, rng: np.random.Generator, work: int
) -> tuple[Draft, float]:
    """Return a draft with a peak no higher than that of `draft`, and its peak, after pricing about `work` steps.

    It ends early at a peak of at most `enough`; apart from that, the way there does not depend on `enough`.
    """
    best, best_peak, idle = draft, pricer.events(draft.steps, draft.split).peak, 0
    until = pricer.work + work
    while pricer.work < until and best_peak > enough:
        repeats = best.repeats()
        if idle > _patience(repeats):
            break
        idle += 1
        broken = best.remove(_choose(repeats, rng)) if repeats else best
        mended, peak = descend(facts, pricer, broken, _LOWER * best_peak, _disturbed(rng))
        if peak < best_peak:
            best, best_peak, idle = tidy(facts, pricer, mended, peak), peak, 0
    return best, best_peak


def _patience(repeats: list[int]) -> int:
    return 60 + 10 * len(repeats)


def _disturbed(rng: np.random.Generator) -> Taste:
    return Taste(
        area=rng.random() < 0.5,
        noise=rng,
        spread=float(rng.choice(_SPREADS)),
        daring=float(rng.choice(_DARING)),
    )


def _choose(repeats: list[int], rng: np.random.Generator) -> set[int]:
    """Return some of the repeated runs: neighbours in time, or any."""
    share = float(rng.choice(_SHARES))
    if rng.random() < 0.5:
        width = max(2, int(share * len(repeats)))
        start = int(rng.integers(1 - width, len(repeats)))
        return set(repeats[max(0, start) : start + width])
    chosen = {step for step, draw in zip(repeats, rng.random(len(repeats)).tolist(), strict=True) if draw < share}
    return chosen or {repeats[int(rng.integers(len(repeats)))]}
