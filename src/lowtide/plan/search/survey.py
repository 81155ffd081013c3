"""Lookups in one draft: who is alive where, how far above a limit, and what running an op again would take."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lowtide.graph.ir import OpId, ValueId
from lowtide.plan.search.draft import Draft, Facts
from lowtide.plan.search.pricer import Events, Floats


class Gap(NamedTuple):
    """A stretch of a value's life without a use: after step `last`, until step `before` reads it."""

    value: ValueId
    last: int
    before: int


@dataclass(frozen=True, slots=True)
class Near:
    """The events of a value around a step: the last before it, and the next one if that is a read, else -1."""

    last: int
    next_read: int


@dataclass(frozen=True, slots=True)
class Rerun:
    """A way to have a value again: ops to run, in order, and values that live on from an earlier step for them."""

    ops: list[OpId]
    extended: list[tuple[ValueId, int]]
    seconds: float


class Survey:
    """Answers about one draft under one limit; never changes."""

    def __init__(self, facts: Facts, draft: Draft, events: Events, limit: float) -> None:
        self.facts, self.draft, self.events, self.limit = facts, draft, events, limit
        self.again: list[bool] = events.again.tolist()
        self.during: list[float] = events.during.tolist()
        self.after: list[float] = events.after.tolist()
        self._step: list[int] = events.step.tolist()
        self._write: list[bool] = events.write.tolist()
        self._start: list[int] = np.searchsorted(events.value, np.arange(len(facts.bytes) + 1)).tolist()
        excess = np.maximum(events.during - limit, 0.0)
        self._excess_sum = np.concatenate(([0.0], np.cumsum(excess)))
        self._over_sum = np.concatenate(([0], np.cumsum(excess > 0)))
        self._excess: list[float] = self._excess_sum.tolist()
        self._over: list[int] = self._over_sum.tolist()
        self._maxima = [events.during]
        width = 1
        while 2 * width <= len(draft.steps):
            before = self._maxima[-1]
            self._maxima.append(np.maximum(before[:-width], before[width:]))
            width *= 2

    def near(self, value: ValueId, step: int) -> Near:
        """Return the events of `value` around the moment just before `step`."""
        low, high = self._start[value], self._start[value + 1]
        index = bisect_left(self._step, step, low, high)
        alive = low < index < high and not self._write[index]
        return Near(self._step[index - 1] if index > low else -1, self._step[index] if alive else -1)

    def highest(self, start: int, stop: int) -> float:
        """Return the most bytes during the steps from `start` to before `stop`."""
        if stop - start <= 8:
            return max(self.during[start:stop], default=0.0)
        level = (stop - start).bit_length() - 1
        row = self._maxima[level]
        return float(max(row[start], row[stop - (1 << level)]))

    def steps_over(self, start: int, stop: int) -> int:
        """Return how many steps from `start` to before `stop` are over the limit."""
        return self._over[stop] - self._over[start] if stop > start else 0

    def relief(self, start: int, stop: int, size: int) -> float:
        """Return the byte-steps over the limit that `size` fewer bytes from `start` to before `stop` would remove."""
        if stop <= start:
            return 0.0
        return min(self._excess[stop] - self._excess[start], size * self.steps_over(start, stop))

    def gaps_over(self, step: int, *, area: bool) -> tuple[list[Gap], Floats]:
        """Return the gaps of droppable values at `step`, and an optimistic score of each.

        A gap lies between two uses of a value that is alive at `step` but not used there. The score takes running the
        value's op again to need nothing else: relief in all steps (`area`) or at `step`, per second.
        """
        events, facts = self.events, self.facts
        spans = (events.value[:-1] == events.value[1:]) & ~events.write[1:]
        spans &= (events.step[:-1] < step) & (events.step[1:] > step)
        where = np.flatnonzero(spans)
        where = where[facts.droppable[events.value[where]]]
        value, last, before = events.value[where], events.step[where], events.step[where + 1]
        size = facts.rerun_bytes[value]
        if area:
            most = self._excess_sum[before] - self._excess_sum[last + 1]
            relief = np.minimum(most, size * (self._over_sum[before] - self._over_sum[last + 1]))
        else:
            relief = np.minimum(size, self.during[step] - self.limit)
        moved = events.write[where] & events.again[last]
        score = relief / (np.where(moved, 0.0, facts.rerun_seconds[value]) + facts.sliver)
        gaps = [Gap(*gap) for gap in zip(value.tolist(), last.tolist(), before.tolist(), strict=True)]
        return gaps, score

    def rerun(self, op: OpId, before: int, *, small: float, max_seconds: float) -> Rerun | None:
        """Return what running `op` again before step `before` takes, or None if it takes more than `max_seconds`.

        An input that is not alive there lives on from its last use if that keeps within the limit, if it cannot be
        made again, or if it has at most `small` bytes; otherwise it is made again too.
        """
        facts = self.facts
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
            if seconds > max_seconds:
                return None
            stack.append(~current)
            for value in reversed(facts.reads[current]):
                producer = facts.producer[value]
                if producer in done or value in extended or facts.held[value]:
                    continue
                near = self.near(value, before)
                if near.next_read >= 0:
                    continue
                size = facts.bytes[value]
                if facts.lasting[value] or size <= small or self.highest(near.last + 1, before) + size <= self.limit:
                    extended[value] = near.last
                else:
                    stack.append(producer)
        return Rerun(order, list(extended.items()), seconds)

    def transient(self, rerun: Rerun, staying: set[ValueId], alive: float) -> float:
        """Return the most bytes while `rerun` runs, with `alive` bytes beside it and the values `staying` kept."""
        facts = self.facts
        last_use: dict[ValueId, int] = {}
        for index, op in enumerate(rerun.ops):
            for value in facts.reads[op]:
                last_use[value] = index
        freed = [0] * len(rerun.ops)
        peak = 0.0
        for index, op in enumerate(rerun.ops):
            for value in facts.writes[op]:
                alive += facts.bytes[value]
                if value not in staying:
                    freed[last_use.get(value, index)] += facts.bytes[value]
            peak = max(peak, alive + facts.workspace[op])
            alive -= freed[index]
        return peak
