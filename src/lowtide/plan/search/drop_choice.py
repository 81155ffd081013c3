"""Choosing what to drop: the gap in a value's life whose loss relieves most bytes per second of recomputation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lowtide.graph.ir import OpId, ValueId
from lowtide.plan.search.edited_schedule import EditedSchedule
from lowtide.plan.search.ledger import NOTHING, SHIFT, Event, Floats, Ints, Run
from lowtide.plan.search.policy import DESCENT


@dataclass(frozen=True, slots=True)
class DropPolicy:
    """How drops are scored.

    Attributes:
        area: Whether relief counts bytes over the limit in every stage, or only at the worst run.
        noise: Source of random factors on the scores, or None for none.
        spread: Largest logarithm of such a factor.
        bias: For every value, a factor on the scores of its drops, or None for none.
        tries: How many candidates to look at closely at most, once one helps.
        alike: How many candidates to look at closely at most of those that seem equally good.
        overshoot: How high a recomputation may go, as a multiple of the worst stage; above 1, a later drop must
            repair it.
    """

    area: bool = True
    noise: np.random.Generator | None = None
    spread: float = 0.0
    bias: Floats | None = None
    overshoot: float = 1.0
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
    same: bool


@dataclass(frozen=True, slots=True)
class _Gap:
    """A gap in a value's life: the event and the run that end it, when, and what to run again instead."""

    event: Event
    before: Run
    time: int
    op: OpId
    rebate: float


def best_drop(edited: EditedSchedule, peaks: Ints, limit: float, policy: DropPolicy) -> Drop | None:
    """Return the drop with the best score at the worst run, or None if nothing helps there."""
    return _Scorer(edited, peaks, limit, policy).best()


class _Scorer:
    """Scores drops in one edited schedule at its worst run."""

    def __init__(self, edited: EditedSchedule, peaks: Ints, limit: float, policy: DropPolicy) -> None:
        self.edited, self.arrays, self.ledger = edited, edited.arrays, edited.ledger
        self.peaks, self.limit, self.policy = peaks, limit, policy
        self.stage = int(peaks.argmax())
        self.top = float(peaks[self.stage])
        self.ceiling = self.top * policy.overshoot
        self.time = edited.time[edited.worst_run(self.stage)]
        self._alive: dict[int, dict[Run, int]] = {}
        excess = np.maximum(peaks - limit, 0.0)
        self._excess = np.zeros(len(peaks) + 1)
        self._over = np.zeros(len(peaks) + 1)
        if policy.area:
            np.cumsum(excess, out=self._excess[1:])
            np.cumsum(excess > 0, out=self._over[1:])

    def best(self) -> Drop | None:
        edited, policy = self.edited, self.policy
        events, hopes = self._gaps()
        edited.work += 40 + len(self.peaks) // 50 + len(self.ledger.gap_end) // 200
        factors = np.ones(len(events))
        if policy.noise is not None:
            factors = np.exp(policy.noise.uniform(-policy.spread, policy.spread, len(events)))
        if policy.bias is not None:
            factors *= policy.bias[self.ledger.gap_value[events]]
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
            if seen > policy.alike:
                continue
            if best is not None and tried >= policy.tries:
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
        arrays = self.arrays
        events = np.flatnonzero((self.ledger.gap_start < self.time) & (self.ledger.gap_end > self.time))
        events = events[arrays.droppable[self.ledger.gap_value[events]]]
        value = self.ledger.gap_value[events]
        size = arrays.rerun_bytes[value]
        relief = np.minimum(size, self.top - self.limit)
        if self.policy.area:
            first, last = (self.ledger.gap_start[events] >> SHIFT) + 1, self.ledger.gap_end[events] >> SHIFT
            first = np.minimum(first, last)
            most = self._excess[last] - self._excess[first]
            relief = np.maximum(relief, np.minimum(most, size * (self._over[last] - self._over[first])))
        return events, relief / (self.ledger.gap_seconds[events] + arrays.sliver)

    def _drop(self, event: Event, at_least: float) -> Drop | None:
        """Return the best of remaking all that the value needs, keeping the small part of that, and remaking early."""
        self.edited.work += 10
        value, before = int(self.ledger.gap_value[event]), self.ledger.run_at(event)
        op = self.arrays.producer[value]
        gap = _Gap(event, before, self.edited.time[before], op, self._rebate(event, op))
        small = DESCENT.small_input_share * self.arrays.bytes[value]
        best, same = self._drop_with(gap, 0.0, small, at_least)
        if best is not None and len(best.ops) == 1:
            return best
        if not same:
            other, _ = self._drop_with(gap, small, small, max(at_least, best.score if best else 0.0))
            best = other or best
        return self._early(gap, max(at_least, best.score if best else 0.0)) or best

    def _drop_with(self, gap: _Gap, small: float, smaller: float, at_least: float) -> tuple[Drop | None, bool]:
        """Return the drop if it scores more than `at_least`; see `_rerun` for what else."""
        max_seconds = float("inf")
        if at_least > 0:
            max_seconds = self._most(gap.op, gap.time) / at_least + gap.rebate
        gap_seconds = self.ledger.gap_seconds
        rerun = self._rerun(gap.op, gap.time, small, smaller, max_seconds)
        if rerun is None:
            gap_seconds[gap.event] = max(gap_seconds[gap.event], max_seconds - gap.rebate)
            return None, False
        seconds = max(0.0, rerun.seconds - gap.rebate)
        gap_seconds[gap.event] = seconds
        score = self._net_relief(rerun, gap.before, at_least * (seconds + self.arrays.sliver)) / (
            seconds + self.arrays.sliver
        )
        return Drop(score, gap.before, rerun.ops) if score > at_least else None, rerun.same

    def _early(self, gap: _Gap, at_least: float) -> Drop | None:
        """Return the drop that remakes the gap's value earlier than needed, where all that its op reads is still there.

        That is the last such moment behind the worst run; None if there is none or it scores at most `at_least`.
        """
        before = self._moment_before(gap.op, gap.time)
        if before == NOTHING:
            return None
        seconds = max(0.0, self.arrays.seconds[gap.op] - gap.rebate)
        self.ledger.gap_seconds[gap.event] = min(self.ledger.gap_seconds[gap.event], seconds)
        rerun = _Rerun([gap.op], [], seconds, same=True)
        seconds += self.arrays.sliver
        score = self._net_relief(rerun, before, at_least * seconds) / seconds
        return Drop(score, before, rerun.ops) if score > at_least else None

    def _moment_before(self, op: OpId, time: int) -> Run:
        """Return the last run behind the worst one and before `time` at which all that `op` reads is there, or -1."""
        held, near, last_read = self.arrays.held, self.ledger.near, self.ledger.last_read
        reads = [value for value in self.arrays.reads[op] if not held[value]]
        run = NOTHING
        for _ in range(len(reads)):
            ends = [last_read(value, time) for value in reads if near(value, time)[1] < 0]
            if not ends:
                break
            time, run = min(ends)
            self.edited.work += 2 * len(reads)
            if time <= self.time:
                return NOTHING
        return run if all(near(value, time)[1] >= 0 for value in reads) else NOTHING

    def _rebate(self, event: Event, op: OpId) -> float:
        """Return the seconds saved because a repeated run that nothing read before the gap is no longer needed."""
        writer = self.ledger.writer_before(event)
        moved = writer >= self.arrays.num_ops and len(self.arrays.writes[op]) == 1
        return self.arrays.seconds[op] if moved else 0.0

    def _most(self, op: OpId, time: int) -> float:
        """Return the relief of running `op` again if it adds nothing."""
        near, sizes = self.ledger.near, self.arrays.bytes
        return sum(self._relief(near(value, time)[0], time, sizes[value]) for value in self.arrays.writes[op])

    def _relief(self, last: int, before: int, size: int) -> float:
        """Return the excess that `size` fewer bytes between the times `last` and `before` would remove."""
        worst = min(float(size), self.top - self.limit) if last < self.time < before else 0.0
        if not self.policy.area:
            return worst
        start, stop = (last >> SHIFT) + 1, before >> SHIFT
        if stop <= start:
            return worst
        most = float(self._excess[stop] - self._excess[start])
        return max(worst, min(most, size * float(self._over[stop] - self._over[start])))

    def _net_relief(self, rerun: _Rerun, before: Run, at_least: float) -> float:
        """Return the relief of `rerun` before the run `before`, less what it adds; 0 unless it exceeds `at_least`."""
        arrays, sizes, near = self.arrays, self.arrays.bytes, self.ledger.near
        time = self.edited.time[before]
        relief, freed = 0.0, 0
        staying: set[ValueId] = set()
        for op in rerun.ops:
            for value in arrays.writes[op]:
                last, following = near(value, time)
                if following >= 0 and not arrays.held[value]:
                    staying.add(value)
                    freed += sizes[value]
                    relief += self._relief(last, time, sizes[value])
        for value, last in rerun.extended:
            freed -= sizes[value]
            if self.policy.area:
                start, stop = (last >> SHIFT) + 1, time >> SHIFT
                if stop > start:
                    relief -= sizes[value] * float(self._over[stop] - self._over[start])
            elif last < self.time:
                relief -= sizes[value]
        if relief <= max(0.0, at_least):
            return 0.0
        peak = self._transient(rerun.ops, staying, float(self._alive_before(before) - freed))
        if peak >= self.ceiling:
            return 0.0
        over = max(0.0, min(peak, self.top) - self.limit)
        return relief - over * (len(rerun.ops) if self.policy.area else DESCENT.overshoot_penalty)

    def _alive_before(self, run: Run) -> int:
        """Return the bytes alive just before `run`."""
        stage = self.edited.stage[run]
        if stage not in self._alive:
            self._alive[stage] = self.edited.alive_in(stage)
        return self._alive[stage][run]

    def _rerun(self, op: OpId, time: int, small: float, smaller: float, max_seconds: float) -> _Rerun | None:
        """Return what running `op` again at `time` takes, or None if it takes more than `max_seconds`.

        An input that is not alive there lives on from its last use if that keeps within the limit, if it cannot be
        made again, or if it has at most `small` bytes; otherwise it is made again too. It says whether the same holds
        with `smaller` in place of `small`.
        """
        arrays, near, peaks, limit = self.arrays, self.ledger.near, self.peaks, self.limit
        reads, producers, sizes, held, lasting = (
            arrays.reads,
            arrays.producer,
            arrays.bytes,
            arrays.held,
            arrays.lasting,
        )
        stage, stop = self.stage, time >> SHIFT
        order: list[OpId] = []
        extended: dict[ValueId, int] = {}
        done: set[OpId] = set()
        stack: list[OpId] = [op]
        seconds, same = 0.0, True
        while stack:
            current = stack.pop()
            if current < 0:
                order.append(~current)
                continue
            if current in done:
                continue
            done.add(current)
            seconds += arrays.seconds[current]
            if seconds > max_seconds:
                break
            stack.append(~current)
            for value in reversed(reads[current]):
                producer = producers[value]
                if producer in done or held[value] or value in extended:
                    continue
                last, following = near(value, time)
                if following >= 0:
                    continue
                size = sizes[value]
                if lasting[value] or size <= small:
                    extended[value] = last
                    continue
                start = (last >> SHIFT) + 1
                # Within reach of the worst run there is no room; elsewhere, for what is highest in between.
                if not start <= stage < stop and (stop <= start or peaks[start:stop].max() + size <= limit):
                    extended[value] = last
                else:
                    same = same and size > smaller
                    stack.append(producer)
        self.edited.work += 4 * len(done)
        return None if seconds > max_seconds else _Rerun(order, list(extended.items()), seconds, same)

    def _transient(self, ops: list[OpId], staying: set[ValueId], alive: float) -> float:
        """Return the most bytes while `ops` run, with `alive` bytes beside them and the values `staying` kept."""
        arrays = self.arrays
        last_use: dict[ValueId, int] = {}
        for index, op in enumerate(ops):
            for value in arrays.reads[op]:
                last_use[value] = index
        freed = [0] * len(ops)
        peak = 0.0
        for index, op in enumerate(ops):
            for value in arrays.writes[op]:
                alive += arrays.bytes[value]
                if value not in staying:
                    freed[last_use.get(value, index)] += arrays.bytes[value]
            peak = max(peak, alive + arrays.extra[op])
            alive -= freed[index]
        return peak
