"""The least budget for which a strategy exists, to the byte, and strategies without regard to time."""

from __future__ import annotations

import numpy as np

from lowtide.plan.planners.kusumoto_lower_sets.family import Ints
from lowtide.plan.planners.kusumoto_lower_sets.transitions import Transitions

_NEVER = np.int64(1) << 61


def is_feasible(transitions: Transitions, budget_bytes: int) -> bool:
    """Whether a strategy exists whose peak is at most `budget_bytes`."""
    return _Scan(transitions).reach(budget_bytes)[0] is not None


def minimum_budget(transitions: Transitions) -> int:
    """Return the least budget for which a strategy exists, exactly.

    The range of budgets is halved, but both ends move to values that occur: a strategy that is found lowers the upper
    end to its own peak, and a failure raises the lower end to the smallest peak that was refused, because with any
    budget below that the same steps would have been refused.
    """
    scan = _Scan(transitions)
    sizes, later = transitions.family.sizes, transitions.family.later_bytes
    low, high = 0, int(2 * sizes[-1] + later[-1])
    while low < high:
        peak, refused = scan.reach((low + high) // 2)
        if peak is None:
            low = refused
        else:
            high = peak
    return high


class _Scan:
    """The program without time: the least cached bytes at every set, one size of sets after the other."""

    def __init__(self, transitions: Transitions) -> None:
        family = transitions.family
        self._source, self._kept, self._start = transitions.source, transitions.kept_bytes, transitions.start
        self._taken = transitions.taken_bytes
        self._levels = [*np.unique(family.smaller).tolist(), len(family)]

    def reach(self, budget_bytes: int) -> tuple[int | None, int]:
        """Return the least peak found within the budget, or None, and the smallest peak that was refused.

        The peak is that of one strategy with the fewest cached bytes at every set, so not always the least there is.
        """
        cached = np.full(len(self._start) - 1, _NEVER, dtype=np.int64)
        peaks = np.zeros_like(cached)
        cached[0], refused = 0, int(_NEVER)
        for first, end in zip(self._levels[1:], self._levels[2:], strict=False):
            steps = slice(int(self._start[first]), int(self._start[end]))
            before = cached[self._source[steps]]
            peak = before + self._taken[steps]
            over = peak > budget_bytes
            refused = min(refused, int(peak[over & (before < _NEVER)].min(initial=_NEVER)))
            after = np.where(over, _NEVER, before + self._kept[steps])
            starts = self._start[first:end] - steps.start
            cached[first:end] = np.minimum.reduceat(after, starts)
            peaks[first:end] = self._lowest_peaks(steps, starts, after, np.maximum(peak, peaks[self._source[steps]]))
        found = cached[-1] < _NEVER
        return (int(peaks[-1]) if found else None), refused

    def _lowest_peaks(self, steps: slice, starts: Ints, after: Ints, peak: Ints) -> Ints:
        """Return for every set the lowest peak among the steps that lead to it with the fewest cached bytes."""
        counts = np.diff(np.append(starts, steps.stop - steps.start))
        best = np.repeat(np.minimum.reduceat(after, starts), counts)
        return np.minimum.reduceat(np.where(after == best, peak, _NEVER), starts)
