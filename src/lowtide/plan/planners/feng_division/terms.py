"""The candidate max terms, and the search among them.

The answer's largest segment lies between two vertices of some row, so its cost is one of finitely many sums. There are
quadratically many; they are never listed for a search, because the nearest one below or above a number is found in one
pass over the rows. What must be kept never grows with the threshold, so two evaluated thresholds bound all between
them, and whole stretches that cannot win are skipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Plan = TypeVar("Plan")
Evaluate = Callable[[int], tuple[int, Plan]]


class Terms:
    """The sums of what lies strictly between two vertices of the same row, over many rows; 0 is left out.

    Rows are laid end to end, so far apart that a sum over the border between two of them is larger than any sum within
    one; so one sorted array serves them all.
    """

    def __init__(self, rows: Iterable[tuple[Sequence[int], Sequence[int]]]) -> None:
        """Take for every row the costs before each vertex, and the cost of each vertex inside a segment."""
        kept = [(ends, inside) for ends, inside in rows]
        self.largest = max((ends[-1] for ends, _ in kept), default=0)
        placed, cleared, place = [], [], 0
        for ends, inside in kept:
            placed.append(np.asarray(ends, dtype=np.int64) + place)
            cleared.append(placed[-1] + np.asarray(inside, dtype=np.int64))
            place = int(placed[-1][-1]) + self.largest + 1
        none = np.zeros(0, dtype=np.int64)
        self._ends: NDArray[np.int64] = np.concatenate([none, *placed])
        self._starts: NDArray[np.int64] = np.concatenate([none, *cleared])
        self._places = np.arange(len(self._ends))

    def at_most(self, limit: int) -> int:
        """Return the largest term of at most `limit`, or 0 if there is none."""
        reach = np.searchsorted(self._ends, self._starts + min(limit, self.largest), side="right") - 1
        found = (self._ends[reach] - self._starts)[reach > self._places]
        return int(found.max(initial=0))

    def above(self, limit: int) -> int | None:
        """Return the smallest term above `limit`, or None if there is none."""
        if limit >= self.largest:
            return None
        reach = np.searchsorted(self._ends, self._starts + limit, side="right")
        inner = reach < len(self._ends)
        found = self._ends[reach[inner]] - self._starts[inner]
        return int(found.min(initial=self.largest))

    def all(self) -> list[int]:
        """Return every term, ascending; quadratically many in the length of a row."""
        found: set[int] = set()
        for start in range(len(self._ends)):
            sums = self._ends[start + 1 :] - self._starts[start]
            found.update(sums[: int(np.searchsorted(sums, self.largest, side="right"))].tolist())
        return sorted(found - {0})


def minimise(terms: Terms, evaluate: Evaluate[Plan], least: int = 0) -> tuple[int, int, Plan]:
    """Return the least sum of threshold and cost over all terms, with that threshold and the plan it gives.

    Of equal sums the one with the smallest threshold is returned.

    Args:
        terms: The candidates.
        evaluate: Returns the cost of what a threshold keeps, which never grows with the threshold, and the plan.
        least: A term, or 0, which stands for keeping all that costs anything; smaller terms are not tried.
    """
    low, high = least, terms.largest
    known = {limit: evaluate(limit) for limit in (low, high)}
    best = min((known[limit][0] + limit, limit) for limit in known)
    stretches: list[tuple[int, int, int, int]] = []

    def push(low: int, high: int) -> None:
        """Note the stretch between two evaluated thresholds, unless one of its ends is as good as all of it."""
        begin = terms.above(low)
        if begin is not None and begin < high and known[low][0] > known[high][0]:
            heappush(stretches, (known[high][0] + begin, begin, low, high))

    push(low, high)
    while stretches:
        least, begin, low, high = heappop(stretches)
        if (least, begin) >= best:
            break
        middle = max(terms.at_most((low + high) // 2), begin)
        known[middle] = evaluate(middle)
        best = min(best, (known[middle][0] + middle, middle))
        push(low, middle)
        push(middle, high)
    return *best, known[best[1]][1]


def spread(terms: Terms, evaluate: Evaluate[Plan], count: int, least: int = 0) -> list[Plan]:
    """Return the plans of up to `count` terms, by rising threshold, that differ in cost and are spread evenly.

    Evenly means by ratio: the widest stretch between two thresholds whose costs differ is halved first. At least the
    plans of the smallest and the largest threshold are returned. The arguments are those of `minimise`.
    """
    low, high = least, terms.largest
    known = {limit: evaluate(limit) for limit in (low, high)}
    stretches: list[tuple[float, int, int]] = []

    def push(low: int, high: int) -> None:
        if known[low][0] > known[high][0]:
            heappush(stretches, (low / high, low, high))

    push(low, high)
    while stretches and len(known) < count:
        _, low, high = heappop(stretches)
        middle = terms.at_most(max(low, math.isqrt(low * high)))
        if middle <= low:
            middle = terms.above(low) or high
        if middle < high:
            known[middle] = evaluate(middle)
            push(low, middle)
            push(middle, high)
    plans: dict[int, Plan] = {}
    for limit in sorted(known):
        plans.setdefault(known[limit][0], known[limit][1])
    return list(plans.values())
