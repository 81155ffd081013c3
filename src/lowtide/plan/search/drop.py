"""Choosing what to drop: the gap in a value's life whose loss relieves most bytes per second of recomputation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lowtide.graph.ir import OpId, ValueId
from lowtide.plan.search.ledger import SHIFT, Event, Floats, Ints, Run
from lowtide.plan.search.timeline import Timeline

# Inputs of at most this share of the dropped value may be kept for its recomputation instead of being remade.
_SMALL = 0.5


@dataclass(frozen=True, slots=True)
class Taste:
    """How drops are scored.

    Attributes:
        area: Whether relief counts bytes over the limit in every stage, or only at the worst run.
        noise: Source of random factors on the scores, or None for none.
        spread: Largest logarithm of such a factor.
        leaning: For every value, a factor on the scores of its drops, or None for none.
        tries: How many candidates to look at closely at most, once one helps.
        alike: How many candidates to look at closely at most of those that seem equally good.
        daring: How high a recomputation may go, as a multiple of the worst stage; above 1, a later drop must mend it.
    """

    area: bool = True
    noise: np.random.Generator | None = None
    spread: float = 0.5
    leaning: Floats | None = None
    daring: float = 1.0
    tries: float = float("inf")
    alike: float = float("inf")


@dataclass(frozen=True, slots=True)
class Drop:
    """Run `ops` before the run `before`: a value lives in two pieces instead of one."""

    score: float
    before: Run
    ops: list[OpId]


@dataclass(frozen=True, slots=True)
class _Rerun:
    """A way to have a value again: ops to run, in order, and values that live on from an earlier time for them."""

    ops: list[OpId]
    extended: list[tuple[ValueId, int]]
    seconds: float


def best_drop(timeline: Timeline, peaks: Ints, limit: float, taste: Taste) -> Drop | None:
    """Return the drop with the best score at the worst run, or None if nothing helps there."""
    return _Scorer(timeline, peaks, limit, taste).best()


class _Scorer:
    """Scores drops in one timeline at its worst run."""

    def __init__(self, timeline: Timeline, peaks: Ints, limit: float, taste: Taste) -> None:
        self.timeline, self.facts, self.ledger = timeline, timeline.facts, timeline.ledger
        self.peaks, self.limit, self.taste = peaks, limit, taste
        self.stage = int(peaks.argmax())
        self.top = float(peaks[self.stage])
        self.ceiling = self.top * taste.daring
        self.time = timeline.time[timeline.worst_run(self.stage)]
        self._alive: dict[int, dict[Run, int]] = {}
        excess = np.maximum(peaks - limit, 0.0)
        self._excess = np.zeros(len(peaks) + 1)
        self._over = np.zeros(len(peaks) + 1)
        if taste.area:
            np.cumsum(excess, out=self._excess[1:])
            np.cumsum(excess > 0, out=self._over[1:])

    def best(self) -> Drop | None:
        timeline, taste = self.timeline, self.taste
        events, hopes = self._gaps()
        timeline.work += 40 + len(self.peaks) // 50 + len(self.ledger.gap_end) // 200
        factors = np.ones(len(events))
        if taste.noise is not None:
            factors = np.exp(taste.noise.uniform(-taste.spread, taste.spread, len(events)))
        if taste.leaning is not None:
            factors *= taste.leaning[self.ledger.gap_value[events]]
        hopes = hopes * factors
        best: Drop | None = None
        last_hope, seen, tried = -1.0, 0, 0
        for index in np.argsort(-hopes, kind="stable").tolist():
            hope = float(hopes[index])
            if best is not None and hope <= best.score:
                break
            if hope != last_hope:
                last_hope, seen = hope, 0
            seen += 1
            if seen > taste.alike:
                continue
            if best is not None and tried >= taste.tries:
                break
            tried += 1
            factor = float(factors[index])
            drop = self._drop(int(events[index]), best.score / factor if best else 0.0)
            if drop is not None and (best is None or drop.score * factor > best.score):
                best = Drop(drop.score * factor, drop.before, drop.ops)
        return best

    def _gaps(self) -> tuple[Ints, Floats]:
        """Return the gaps around the worst run of values that can be dropped, and an optimistic score of each.

        The score takes running the value's op again to need nothing else.
        """
        facts = self.facts
        events = np.flatnonzero((self.ledger.gap_start < self.time) & (self.ledger.gap_end > self.time))
        events = events[facts.droppable[self.ledger.gap_value[events]]]
        value = self.ledger.gap_value[events]
        size = facts.rerun_bytes[value]
        relief = np.minimum(size, self.top - self.limit)
        if self.taste.area:
            first, last = (self.ledger.gap_start[events] >> SHIFT) + 1, self.ledger.gap_end[events] >> SHIFT
            first = np.minimum(first, last)
            most = self._excess[last] - self._excess[first]
            relief = np.maximum(relief, np.minimum(most, size * (self._over[last] - self._over[first])))
        return events, relief / (self.ledger.gap_seconds[events] + facts.sliver)

    def _drop(self, event: Event, at_least: float) -> Drop | None:
        """Return the better of remaking everything that the gap's value needs and keeping the small part of it."""
        self.timeline.work += 10
        best = self._drop_with(event, 0.0, at_least)
        if best is not None and len(best.ops) == 1:
            return best
        small = _SMALL * self.facts.bytes[int(self.ledger.gap_value[event])]
        other = self._drop_with(event, small, max(at_least, best.score if best else 0.0))
        return other or best

    def _drop_with(self, event: Event, small: float, at_least: float) -> Drop | None:
        timeline, facts = self.timeline, self.facts
        value, before = int(self.ledger.gap_value[event]), self.ledger.run_at(event)
        op = facts.producer[value]
        rebate = self._rebate(event, op)
        max_seconds = float("inf")
        if at_least > 0:
            max_seconds = self._most(op, timeline.time[before]) / at_least + rebate
        rerun = self._rerun(op, timeline.time[before], small, max_seconds)
        if rerun is None:
            self.ledger.gap_seconds[event] = max(self.ledger.gap_seconds[event], max_seconds - rebate)
            return None
        self.ledger.gap_seconds[event] = max(0.0, rerun.seconds - rebate)
        relief = self._net_relief(rerun, before)
        if relief <= 0:
            return None
        score = relief / (max(0.0, rerun.seconds - rebate) + facts.sliver)
        return Drop(score, before, rerun.ops) if score > at_least else None

    def _rebate(self, event: Event, op: OpId) -> float:
        """Return the seconds saved because a repeated run that nothing read before the gap is no longer needed."""
        writer = self.ledger.writer_before(event)
        moved = writer >= self.facts.num_ops and len(self.facts.writes[op]) == 1
        return self.facts.seconds[op] if moved else 0.0

    def _most(self, op: OpId, time: int) -> float:
        """Return the relief of running `op` again if it adds nothing."""
        near, sizes = self.ledger.near, self.facts.bytes
        return sum(self._relief(near(value, time)[0], time, sizes[value]) for value in self.facts.writes[op])

    def _relief(self, last: int, before: int, size: int) -> float:
        """Return the excess that `size` fewer bytes between the times `last` and `before` would remove."""
        worst = min(float(size), self.top - self.limit) if last < self.time < before else 0.0
        if not self.taste.area:
            return worst
        start, stop = (last >> SHIFT) + 1, before >> SHIFT
        if stop <= start:
            return worst
        most = float(self._excess[stop] - self._excess[start])
        return max(worst, min(most, size * float(self._over[stop] - self._over[start])))

    def _net_relief(self, rerun: _Rerun, before: Run) -> float:
        """Return the relief of `rerun` before the run `before`, less what it adds; at most zero if it is of no use."""
        timeline, facts = self.timeline, self.facts
        time = timeline.time[before]
        relief, alive = 0.0, float(self._alive_before(before))
        staying: set[ValueId] = set()
        for op in rerun.ops:
            for value in facts.writes[op]:
                last, following = self.ledger.near(value, time)
                if following >= 0 and not facts.held[value]:
                    staying.add(value)
                    alive -= facts.bytes[value]
                    relief += self._relief(last, time, facts.bytes[value])
        for value, last in rerun.extended:
            alive += facts.bytes[value]
            if self.taste.area:
                start, stop = (last >> SHIFT) + 1, time >> SHIFT
                if stop > start:
                    relief -= facts.bytes[value] * float(self._over[stop] - self._over[start])
            elif last < self.time:
                relief -= facts.bytes[value]
        peak = self._transient(rerun.ops, staying, alive)
        if peak >= self.ceiling:
            return 0.0
        over = max(0.0, min(peak, self.top) - self.limit)
        return relief - over * (len(rerun.ops) if self.taste.area else 0.25)

    def _alive_before(self, run: Run) -> int:
        """Return the bytes alive just before `run`."""
        stage = self.timeline.stage[run]
        if stage not in self._alive:
            self._alive[stage] = self.timeline.alive_in(stage)
        return self._alive[stage][run]

    def _rerun(self, op: OpId, time: int, small: float, max_seconds: float) -> _Rerun | None:
        """Return what running `op` again at `time` takes, or None if it takes more than `max_seconds`.

        An input that is not alive there lives on from its last use if that keeps within the limit, if it cannot be
        made again, or if it has at most `small` bytes; otherwise it is made again too.
        """
        facts, near = self.facts, self.ledger.near
        order: list[OpId] = []
        extended: dict[ValueId, int] = {}
        done: set[OpId] = set()
        stack: list[OpId] = [op]
        seconds = 0.0
        while stack:
            current = stack.pop()
            if current < 0:
                order.append(~current)
                continue
            if current in done:
                continue
            done.add(current)
            seconds += facts.seconds[current]
            self.timeline.work += 4
            if seconds > max_seconds:
                return None
            stack.append(~current)
            for value in reversed(facts.reads[current]):
                producer = facts.producer[value]
                if producer in done or value in extended or facts.held[value]:
                    continue
                last, following = near(value, time)
                if following >= 0:
                    continue
                size = facts.bytes[value]
                if facts.lasting[value] or size <= small or self._highest(last, time) + size <= self.limit:
                    extended[value] = last
                else:
                    stack.append(producer)
        return _Rerun(order, list(extended.items()), seconds)

    def _highest(self, last: int, before: int) -> float:
        """Return the most bytes in the stages after that of `last` and before that of `before`."""
        start, stop = (last >> SHIFT) + 1, before >> SHIFT
        if start <= self.stage < stop:
            return self.top
        return float(self.peaks[start:stop].max()) if stop > start else 0.0

    def _transient(self, ops: list[OpId], staying: set[ValueId], alive: float) -> float:
        """Return the most bytes while `ops` run, with `alive` bytes beside them and the values `staying` kept."""
        facts = self.facts
        last_use: dict[ValueId, int] = {}
        for index, op in enumerate(ops):
            for value in facts.reads[op]:
                last_use[value] = index
        freed = [0] * len(ops)
        peak = 0.0
        for index, op in enumerate(ops):
            for value in facts.writes[op]:
                alive += facts.bytes[value]
                if value not in staying:
                    freed[last_use.get(value, index)] += facts.bytes[value]
            peak = max(peak, alive + facts.extra[op])
            alive -= freed[index]
        return peak
