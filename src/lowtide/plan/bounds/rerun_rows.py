"""Memory rows of repeated runs: what is alive all through the time in which an op runs again is alive while it does.

When a repeated run happens is open, but between which two instants is not: between two neighbouring points of a value
that is alive at the second and not carried there, or somewhere in an interval. Values that are carried from before the
first instant to behind the second are alive beside the run, and with what the op itself reads, writes and uses they are
within the budget. Few of these rows matter, but where an op needs much of the budget they do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from lowtide.graph.ir import OpId, ValueId
from lowtide.plan.bounds.integer_program import Row
from lowtide.plan.bounds.lifetimes import Floats, Timeline

# The variable of what is always 1.
SURE = -1
# Rows are loosened by this share of the budget, so that a solution that just fits is inside every tolerance.
LOOSE = 1e-6
# A row counts as broken if it is exceeded by this share of the budget; one of a run that hardly happens does not count.
_BROKEN = 1e-3
_HARDLY = 0.05


@dataclass(frozen=True, slots=True)
class Life:
    """A value that is alive all the way between two instants if a variable is 1."""

    value: ValueId
    variable: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Again:
    """An op that runs again between two instants if a sum of variables, each with a coefficient, is 1."""

    op: OpId
    start: int
    end: int
    terms: tuple[tuple[int, float], ...]


class Reruns:
    """The memory rows of the repeated runs of a window."""

    def __init__(self, timeline: Timeline, lives: Sequence[Life], runs: Iterable[Again]) -> None:
        self._timeline = timeline
        self._runs = list(runs)
        self._value = np.array([life.value for life in lives], dtype=np.int64)
        self._variable = np.array([life.variable for life in lives], dtype=np.int64)
        self._start = np.array([life.start for life in lives], dtype=np.int64)
        self._end = np.array([life.end for life in lives], dtype=np.int64)
        self._bytes = np.array([timeline.bytes[life.value] for life in lives], dtype=np.float64)

    def broken(self, point: Floats, known: Iterable[int], count: int) -> dict[int, Row]:
        """Return up to `count` rows that `point` breaks most and that are not `known`, by number, one for each time."""
        share = np.ones(len(self._variable))
        is_open = self._variable != SURE
        share[is_open] = point[self._variable[is_open]]
        size = share * self._bytes
        budget, known = self._timeline.budget_bytes, set(known)
        beside: dict[tuple[int, int], float] = {}
        worst: dict[tuple[int, int], tuple[float, int]] = {}
        for number, run in enumerate(self._runs):
            happens = sum(c * (1.0 if v == SURE else float(point[v])) for v, c in run.terms)
            if happens < _HARDLY or number in known:
                continue
            time = (run.start, run.end)
            if time not in beside:
                beside[time] = float(size[self._through(run)].sum())
            own = self._own(run) * happens
            # Most are within the budget even if what the op touches is counted twice.
            if own + beside[time] <= (1 + _BROKEN) * budget:
                continue
            excess = own + float(size[self._beside(run)].sum()) - budget
            if excess > _BROKEN * budget and (time not in worst or excess > worst[time][0]):
                worst[time] = excess, number
        chosen = sorted(worst.values(), key=lambda found: (-found[0], found[1]))[:count]
        return {number: self._row(self._runs[number]) for _, number in chosen}

    def _own(self, run: Again) -> float:
        timeline = self._timeline
        stays = timeline.lasting_bytes if run.start > timeline.forward_end else 0
        return float(timeline.own_again[run.op] + stays)

    def _through(self, run: Again) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Return which lives last all through the time of `run`."""
        return (self._start <= run.start) & (self._end >= run.end)

    def _beside(self, run: Again) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Return which of these are of values that the op of `run` does not touch."""
        return self._through(run) & ~np.isin(self._value, self._timeline.touched_again[run.op])

    def _row(self, run: Again) -> Row:
        beside, budget = self._beside(run), self._timeline.budget_bytes
        sure = beside & (self._variable == SURE)
        high = budget - float(self._bytes[sure].sum())
        coefficients: dict[int, float] = {}
        for life in np.flatnonzero(beside & (self._variable != SURE)).tolist():
            variable = int(self._variable[life])
            coefficients[variable] = coefficients.get(variable, 0.0) + float(self._bytes[life])
        for variable, coefficient in run.terms:
            if variable == SURE:
                high -= coefficient * self._own(run)
            else:
                coefficients[variable] = coefficients.get(variable, 0.0) + coefficient * self._own(run)
        shares = [coefficient / budget for coefficient in coefficients.values()]
        return Row(list(coefficients), shares, -float("inf"), high / budget + LOOSE)
