"""Improving a draft by taking a part out and mending it another way."""

from __future__ import annotations

import numpy as np

from lowtide.plan.search.draft import Draft, Facts
from lowtide.plan.search.drop import Taste, descend
from lowtide.plan.search.pricer import Pricer
from lowtide.plan.search.tidy import tidy

_SHARES = (0.05, 0.1, 0.2, 0.4)
# A mended draft this much slower than the best is not worth tidying.
_HOPELESS = 1.02
_DARING = (1.0, 1.1, 1.3)
_LOWER = 0.98


def improve(facts: Facts, pricer: Pricer, draft: Draft, limit: int, *, rng: np.random.Generator, work: int) -> Draft:
    """Return a draft within `limit` that is no slower than `draft`, after pricing about `work` steps."""
    best, best_seconds = draft, facts.total_seconds(draft)
    until = pricer.work + work
    while pricer.work < until:
        repeats = best.repeats()
        if not repeats:
            break
        broken = best.remove(_choose(repeats, rng))
        taste = Taste(area=rng.random() < 0.5, noise=rng, daring=float(rng.choice(_DARING)))
        mended, peak = descend(facts, pricer, broken, limit, taste)
        if peak > limit or facts.total_seconds(mended) > _HOPELESS * best_seconds:
            continue
        mended = tidy(facts, pricer, mended, limit)
        seconds = facts.total_seconds(mended)
        if seconds <= best_seconds:
            best, best_seconds = mended, seconds
    return best


def lower(
    facts: Facts, pricer: Pricer, draft: Draft, *, enough: int, rng: np.random.Generator, work: int
) -> tuple[Draft, float]:
    """Return a draft with a peak no higher than that of `draft`, and its peak, after pricing about `work` steps.

    It ends early at a peak of at most `enough`; apart from that, the way there does not depend on `enough`.
    """
    best, best_peak = draft, pricer.events(draft.steps, draft.split).peak
    until = pricer.work + work
    while pricer.work < until and best_peak > enough:
        repeats = best.repeats()
        broken = best.remove(_choose(repeats, rng)) if repeats else best
        taste = Taste(area=rng.random() < 0.5, noise=rng, daring=float(rng.choice(_DARING)))
        mended, peak = descend(facts, pricer, broken, _LOWER * best_peak, taste)
        if peak < best_peak:
            best, best_peak = tidy(facts, pricer, mended, peak), peak
    return best, best_peak


def _choose(repeats: list[int], rng: np.random.Generator) -> set[int]:
    """Return some of the repeated runs: neighbours in time, or any."""
    share = float(rng.choice(_SHARES))
    if rng.random() < 0.5:
        width = max(2, int(share * len(repeats)))
        start = int(rng.integers(1 - width, len(repeats)))
        return set(repeats[max(0, start) : start + width])
    chosen = {step for step, draw in zip(repeats, rng.random(len(repeats)).tolist(), strict=True) if draw < share}
    return chosen or {repeats[int(rng.integers(len(repeats)))]}
