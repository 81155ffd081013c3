"""The dynamic program over lower sets: for every set and every amount of saved time, the least cached bytes.

A strategy's state at a lower set L is the time it has saved (the ticks of what is cached) and the bytes it has cached.
Only the least bytes for each saved time matter, so the table has one row per set and one column per tick. A step from
L to L' may be taken by the states whose peak stays within the budget:

    cached bytes + 2 * bytes of L' outside L + what backward through L' holds from later blocks <= budget.

One table answers every question asked of it: the state at the set of all vertices with the most saved time is the
time-centric strategy, the one with the least is the memory-centric one by its definition, and the one with the fewest
cached bytes is what the paper's released program calls memory-centric.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from lowtide.errors import InvalidOptionError, PlannerRefusedError
from lowtide.plan.planners.kusumoto_lower_sets.dag import VertexSet
from lowtide.plan.planners.kusumoto_lower_sets.family import Ints
from lowtide.plan.planners.kusumoto_lower_sets.strategy import Strategy
from lowtide.plan.planners.kusumoto_lower_sets.transitions import Transitions

# Bytes of states that cannot be reached. Sums with it stay below the largest number.
_NEVER = np.int64(1) << 61

# Sets times ticks, that is table entries of 8 bytes each.
MAX_ENTRIES = 1 << 28

# Entries that are handled at once.
_CHUNK = 1 << 20

OBJECTIVES = ("time", "memory", "cache")


@dataclass(frozen=True)
class Table:
    """The least cached bytes at every set for every saved time, under one budget.

    Attributes:
        transitions: The steps of the program.
        budget_bytes: The budget, in the paper's memory model.
        cached: One row per set, one column per tick; large where there is no state. The last row is not filled.
        least: Smallest entry of each row.
        most: Largest entry of each row that is a state.
        width: For each row, one more than the last column with a state.
    """

    transitions: Transitions
    budget_bytes: int
    cached: Ints
    least: Ints
    most: Ints
    width: Ints

    def best(self, objective: str, *, keep_last: bool = False) -> Strategy | None:
        """Return the best strategy, or None if none is within the budget.

        Args:
            objective: "time" for the most saved time, "memory" for the least, "cache" for the fewest cached bytes and,
                among those, the most saved time.
            keep_last: Whether the last block is kept for backward instead of being recomputed, so that its whole time
                counts as saved. The peak is the same.
        """
        if objective not in OBJECTIVES:
            raise InvalidOptionError(f"The objective is {objective!r}; it must be one of {', '.join(OBJECTIVES)}.")
        row = self.ends(keep_last=keep_last)
        reached = np.flatnonzero(row < _NEVER)
        if not len(reached):
            return None
        if objective == "cache":
            saved = reached[len(reached) - 1 - int(np.argmin(row[reached][::-1]))]
        else:
            saved = reached[-1 if objective == "time" else 0]
        return self._strategy(int(saved), row, keep_last)

    def between(self, count: int, *, keep_last: bool = False) -> list[Strategy]:
        """Return up to `count` strategies whose saved times are spread evenly between the least and the most."""
        row = self.ends(keep_last=keep_last)
        reached = np.flatnonzero(row < _NEVER)
        places = [(len(reached) - 1) * part // (count + 1) for part in range(1, count + 1)] if len(reached) else []
        chosen = sorted(set(places) - {0, len(reached) - 1})
        return [self._strategy(int(reached[place]), row, keep_last) for place in chosen]

    def _strategy(self, saved: int, row: Ints, keep_last: bool) -> Strategy:
        return Strategy(self.transitions.family.dag, self._trace(saved, int(row[saved]), keep_last))

    def ends(self, *, keep_last: bool = False) -> Ints:
        """Return the least cached bytes at the set of all vertices, for every saved time."""
        last = len(self.transitions.family) - 1
        row = np.full(self.cached.shape[1], _NEVER, dtype=np.int64)
        if last == 0:
            row[0] = 0
        else:
            self._advance(last, self._gain(last, keep_last), row)
        return row

    def fill(self) -> None:
        """Compute all rows but the last."""
        self.cached[0, 0] = self.least[0] = self.most[0] = 0
        self.width[0] = 1
        for target in range(1, len(self.transitions.family) - 1):
            row = self.cached[target]
            self._advance(target, self._gain(target, False), row)
            reached = np.flatnonzero(row < _NEVER)
            if len(reached):
                self.least[target] = row.min()
                self.most[target] = row[reached].max()
                self.width[target] = reached[-1] + 1

    def _gain(self, target: int, keep_last: bool) -> Ints:
        """Return the ticks that each step to `target` saves."""
        steps = self.transitions.into(target)
        times = self.transitions.family.times
        if keep_last and target == len(times) - 1:
            whole: Ints = times[-1] - times[self.transitions.source[steps]]
            return whole
        return self.transitions.kept_ticks[steps]

    def _room(self, steps: slice) -> Ints:
        """Return the most bytes that may be cached before each step."""
        return self.budget_bytes - self.transitions.taken_bytes[steps]

    def _advance(self, target: int, gain: Ints, row: Ints) -> None:
        """Take all steps to `target` from all states, and lower the entries of `row` accordingly."""
        steps = self.transitions.into(target)
        source, room, kept = self.transitions.source[steps], self._room(steps), self.transitions.kept_bytes[steps]
        taken = np.flatnonzero(self.least[source] <= room)
        if not len(taken):
            return
        if target == len(self.least) - 1:
            taken = taken[np.argsort(gain[taken], kind="stable")]
        source, room, kept, gain = source[taken], room[taken], kept[taken], gain[taken]
        # Steps that add the same to the cache are neighbours, and are taken together.
        changes = np.flatnonzero((gain[1:] != gain[:-1]) | (kept[1:] != kept[:-1])) + 1
        bounds = [0, *changes.tolist(), len(source)]
        for begin, end in pairwise(bounds):
            width = int(self.width[source[begin:end]].max())
            stride = max(1, _CHUNK // width)
            place = row[gain[begin] : gain[begin] + width]
            for first in range(begin, end, stride):
                part = slice(first, min(end, first + stride))
                states = self.cached[source[part], :width]
                if (self.most[source[part]] > room[part]).any():
                    # All bits of the sign where there is no room: much quicker than choosing entry by entry.
                    states |= ((room[part, None] - states) >> 63) & _NEVER
                lowest = states.min(axis=0)[: len(place)]
                lowest += kept[begin]
                np.minimum(place, lowest, out=place)
        np.minimum(row, _NEVER, out=row)

    def _trace(self, saved: int, cached: int, keep_last: bool) -> tuple[VertexSet, ...]:
        """Return the chain that ends with `saved` ticks and `cached` bytes."""
        family = self.transitions.family
        target, chain = len(family) - 1, []
        while target:
            chain.append(family.sets[target])
            steps = self.transitions.into(target)
            source = self.transitions.source[steps]
            earlier = saved - self._gain(target, keep_last)
            value = self.cached[source, np.maximum(earlier, 0)]
            fits = (earlier >= 0) & (value <= self._room(steps))
            fits &= value + self.transitions.kept_bytes[steps] == cached
            step = int(np.flatnonzero(fits)[0])
            target, saved, cached = int(source[step]), int(earlier[step]), int(value[step])
        return tuple(reversed(chain))


def solve(transitions: Transitions, budget_bytes: int) -> Table:
    """Return the table for `budget_bytes`; raise `PlannerRefusedError` if it has more than 2^28 entries."""
    family = transitions.family
    shape = (len(family), int(family.times[-1]) + 1)
    if shape[0] * shape[1] > MAX_ENTRIES:
        raise PlannerRefusedError(
            f"The table of {shape[0]:,} lower sets and {shape[1]:,} ticks has {shape[0] * shape[1]:,} entries; "
            f"{MAX_ENTRIES:,} are allowed. Use coarser ticks."
        )
    states = np.full(shape, _NEVER, dtype=np.int64)
    least = np.full(len(family), _NEVER, dtype=np.int64)
    table = Table(transitions, budget_bytes, states, least, least.copy(), np.zeros(len(family), dtype=np.int64))
    table.fill()
    return table
