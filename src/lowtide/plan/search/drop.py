"""Choosing what to drop: the gap in a value's life whose loss relieves most bytes per second of recomputation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lowtide.graph.ir import OpId, ValueId
from lowtide.plan.search.draft import Draft, Facts, strip
from lowtide.plan.search.pricer import Pricer
from lowtide.plan.search.survey import Gap, Rerun, Survey

# Inputs of at most this share of the dropped value may be kept for its recomputation instead of being remade.
_SMALL = 0.5


@dataclass(frozen=True, slots=True)
class Taste:
    """How drops are scored.

    Attributes:
        area: Whether relief counts bytes over the limit at every step, or only at the worst one.
        noise: Source of random factors on the scores, or None for none.
        spread: Largest logarithm of such a factor.
        daring: How high a recomputation may go, as a multiple of the worst step; above 1, a later drop must mend it.
    """

    area: bool = True
    noise: np.random.Generator | None = None
    spread: float = 0.5
    daring: float = 1.0


@dataclass(frozen=True, slots=True)
class _Drop:
    """Run `ops` before step `before`: the value lives in two pieces instead of one."""

    score: float
    before: int
    ops: list[OpId]


def descend(facts: Facts, pricer: Pricer, draft: Draft, limit: float, taste: Taste) -> tuple[Draft, float]:
    """Return a draft with a peak within `limit`, or the one with the least peak on the way there; and that peak.

    Each round drops one value at the worst step. It ends when nothing can be dropped there, when the peak has not
    fallen for many rounds, or when the schedule has become very long.
    """
    patience = 60 + len(facts.reads) // 10
    longest = 8 * len(facts.reads) + 100
    best, best_peak, stalled = draft, float("inf"), 0
    while True:
        draft, events = strip(facts, pricer, draft)
        peak = events.peak
        stalled += 1
        if peak < best_peak:
            best, best_peak, stalled = draft, peak, 0
        if peak <= limit or stalled > patience or len(draft.steps) > longest:
            return best, best_peak
        drop = _best_drop(Survey(facts, draft, events, limit), taste)
        if drop is None:
            return best, best_peak
        draft = draft.insert([(drop.before, drop.ops)])


def _best_drop(survey: Survey, taste: Taste) -> _Drop | None:
    """Return the drop with the best score at the worst step; ties go to the earlier gap."""
    worst = int(np.argmax(survey.events.during))
    scorer = _Scorer(survey, worst, taste)
    gaps, hopes = survey.gaps_over(worst, area=taste.area)
    factors = np.ones(len(gaps))
    if taste.noise is not None:
        factors = np.exp(taste.noise.uniform(-taste.spread, taste.spread, len(gaps)))
    hopes = hopes * factors
    best: _Drop | None = None
    for index in np.argsort(-hopes, kind="stable").tolist():
        if best is not None and hopes[index] <= best.score:
            break
        factor = float(factors[index])
        drop = scorer.drop(gaps[index], best.score / factor if best else 0.0)
        if drop is not None and (best is None or drop.score * factor > best.score):
            best = _Drop(drop.score * factor, drop.before, drop.ops)
    return best


class _Scorer:
    """Scores drops in one draft at its worst step."""

    def __init__(self, survey: Survey, worst: int, taste: Taste) -> None:
        self.survey, self.worst, self.area = survey, worst, taste.area
        self.ceiling = survey.during[worst] * taste.daring

    def drop(self, gap: Gap, at_least: float) -> _Drop | None:
        """Return the better of remaking everything that `gap`'s value needs and keeping the small part of it."""
        best = self._drop(gap, 0.0, at_least)
        if best is not None and len(best.ops) == 1:
            return best
        small = _SMALL * self.survey.facts.bytes[gap[0]]
        other = self._drop(gap, small, max(at_least, best.score if best else 0.0))
        return other or best

    def _drop(self, gap: Gap, small: float, at_least: float) -> _Drop | None:
        survey, facts = self.survey, self.survey.facts
        value, last, before = gap
        op = facts.producer[value]
        rebate = self._rebate(op, last)
        max_seconds = self._most(op, gap) / at_least + rebate if at_least > 0 else float("inf")
        rerun = survey.rerun(op, before, small=small, max_seconds=max_seconds)
        if rerun is None:
            return None
        relief = self._net_relief(rerun, before)
        if relief <= 0:
            return None
        score = relief / (max(0.0, rerun.seconds - rebate) + facts.sliver)
        return _Drop(score, before, rerun.ops) if score > at_least else None

    def _most(self, op: OpId, gap: Gap) -> float:
        """Return the relief of running `op` again if it adds nothing."""
        facts, (_, last, before) = self.survey.facts, gap
        if len(facts.writes[op]) == 1:
            return self._relief(last, before, facts.bytes[gap[0]])
        return sum(self._relief(self.survey.near(v, before).last, before, facts.bytes[v]) for v in facts.writes[op])

    def _rebate(self, op: OpId, last: int) -> float:
        """Return the seconds saved because a repeated run that nothing read before the gap is no longer needed."""
        facts = self.survey.facts
        moved = self.survey.again[last] and self.survey.draft.steps[last] == op and len(facts.writes[op]) == 1
        return facts.seconds[op] if moved else 0.0

    def _relief(self, last: int, before: int, size: int) -> float:
        if self.area:
            return self.survey.relief(last + 1, before, size)
        over = self.survey.during[self.worst] - self.survey.limit
        return min(size, over) if last < self.worst < before else 0.0

    def _net_relief(self, rerun: Rerun, before: int) -> float:
        """Return the relief of `rerun` before step `before`, less what it adds; at most zero if it is of no use."""
        survey, facts = self.survey, self.survey.facts
        relief, alive = 0.0, survey.after[before - 1]
        staying: set[ValueId] = set()
        for op in rerun.ops:
            for value in facts.writes[op]:
                near = survey.near(value, before)
                if near.next_read >= 0 and not facts.held[value]:
                    staying.add(value)
                    alive -= facts.bytes[value]
                    relief += self._relief(near.last, before, facts.bytes[value])
        for value, last in rerun.extended:
            alive += facts.bytes[value]
            if self.area:
                relief -= facts.bytes[value] * survey.steps_over(last + 1, before)
            elif last < self.worst:
                relief -= facts.bytes[value]
        peak = survey.transient(rerun, staying, alive)
        if peak >= self.ceiling:
            return 0.0
        over = max(0.0, min(peak, survey.during[self.worst]) - survey.limit)
        return relief - over * (len(rerun.ops) if self.area else 0.25)
