"""The moment program: an integer program whose minimum no schedule can beat.

It says what is alive at some chosen moments and what runs again between them.

The *moments* are first runs of ops. They cut the step into intervals; interval 0 ends at the first moment. Variables,
all 0 or 1:

- `alive[i, v]`: value `v` is alive at moment `i`. Fixed to 1 if `v` is due there.
- `carried[v, a, b]`: from point `a` to point `b`, neighbouring points of `v`, no repeated run makes `v`, so it is alive
  all the way. Points of `v` are the instants at which it is due and the moments between them, or after them as needed.
- `rerun[i, k]`: op `k` runs again in interval `i`. `count[i, k]`: how often, at least.

Rows, each of them true in every schedule whose first runs are in the given order:

- A value that is alive at `b` was carried from `a`, or its op ran again in between; carried means alive at both ends.
  For one value, what happens between different neighbouring points are different runs: `count` adds them up.
- An op that runs again in interval `i` reads values that were alive at the interval's beginning, or are due or produced
  in the interval, or whose op runs again in it.
- [Memory] At every first run the bytes carried across it, beside what it reads, writes and uses itself, are within the
  budget; at moments those of all values alive. So they are at repeated runs (see `RepeatedRunRows`).
- [Ranges] The first and second also hold for neighbouring intervals taken together: all from one on, and those that
  were one interval before a later moment divided it. Integers obey this anyway; the linear relaxation is much
  stronger with it, and a further moment hardly ever weakens it.

The sum of seconds of repeated runs is minimised. One moment gives the simplest program: what is alive at that moment
against what runs again after it, with the memory rows of all other instants added.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from lowtide.graph.ir import OpId, ValueId
from lowtide.plan.bounds.integer_program import IntegerProgram, Row
from lowtide.plan.bounds.lifetimes import Floats, Lifetimes
from lowtide.plan.bounds.policy import ROWS

# The variable of what is always 1.
SURE = -1
# Rows are loosened by this share of the budget, so that a solution that just fits is inside every tolerance.
LOOSE = 1e-6


@dataclass(frozen=True, slots=True)
class Life:
    """A value that is alive all the way between two instants if a variable is 1."""

    value: ValueId
    variable: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class RepeatedRun:
    """An op that runs again between two instants if a sum of variables, each with a coefficient, is 1."""

    op: OpId
    start: int
    end: int
    terms: tuple[tuple[int, float], ...]


class RepeatedRunRows:
    """The memory rows of the repeated runs of a moment program."""

    def __init__(self, lifetimes: Lifetimes, lives: Sequence[Life], runs: Iterable[RepeatedRun]) -> None:
        self._lifetimes = lifetimes
        self._runs = list(runs)
        self._value = np.array([life.value for life in lives], dtype=np.int64)
        self._variable = np.array([life.variable for life in lives], dtype=np.int64)
        self._start = np.array([life.start for life in lives], dtype=np.int64)
        self._end = np.array([life.end for life in lives], dtype=np.int64)
        self._bytes = np.array([lifetimes.bytes[life.value] for life in lives], dtype=np.float64)

    def violated(self, point: Floats, known: Iterable[int], count: int) -> dict[int, Row]:
        """Return up to `count` rows, none `known`, that `point` violates most, by number, one for each time."""
        share = np.ones(len(self._variable))
        is_open = self._variable != SURE
        share[is_open] = point[self._variable[is_open]]
        size = share * self._bytes
        budget, known = self._lifetimes.budget_bytes, set(known)
        beside: dict[tuple[int, int], float] = {}
        worst: dict[tuple[int, int], tuple[float, int]] = {}
        for number, run in enumerate(self._runs):
            happens = sum(c * (1.0 if v == SURE else float(point[v])) for v, c in run.terms)
            if happens < ROWS.min_share or number in known:
                continue
            time = (run.start, run.end)
            if time not in beside:
                beside[time] = float(size[self._through(run)].sum())
            own = self._own(run) * happens
            # Most are within the budget even if what the op touches is counted twice.
            if own + beside[time] <= (1 + ROWS.repeated_tolerance) * budget:
                continue
            excess = own + float(size[self._beside(run)].sum()) - budget
            if excess > ROWS.repeated_tolerance * budget and (time not in worst or excess > worst[time][0]):
                worst[time] = excess, number
        chosen = sorted(worst.values(), key=lambda found: (-found[0], found[1]))[:count]
        return {number: self._row(self._runs[number]) for _, number in chosen}

    def _own(self, run: RepeatedRun) -> float:
        lifetimes = self._lifetimes
        stays = lifetimes.lasting_bytes if run.start > lifetimes.forward_end else 0
        return float(lifetimes.own_again[run.op] + stays)

    def _through(self, run: RepeatedRun) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Return which lives last all through the time of `run`."""
        return (self._start <= run.start) & (self._end >= run.end)

    def _beside(self, run: RepeatedRun) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Return which of these are of values that the op of `run` does not touch."""
        return self._through(run) & ~np.isin(self._value, self._lifetimes.touched_again[run.op])

    def _row(self, run: RepeatedRun) -> Row:
        beside, budget = self._beside(run), self._lifetimes.budget_bytes
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


class MomentProgram:
    """The program for given moments.

    Attributes:
        program: The program without its memory rows.
        history: The ops during whose first runs the alive values are variables, in the order in which they were given.
        moments: The same in the order in which they run.
        alive: For a moment's index and a value, the variable that says whether it is alive there.
        rerun: For an interval and an op, the variable that says whether it runs again there.
        carried: For a value and one of its points, the variable that says whether it is carried to its next point.
    """

    def __init__(self, lifetimes: Lifetimes, moments: Iterable[OpId]) -> None:
        self.lifetimes = lifetimes
        self.history = tuple(dict.fromkeys(moments))
        self.moments = tuple(sorted(self.history))
        self.program = IntegerProgram()
        self.alive: dict[tuple[int, ValueId], int] = {}
        self.rerun: dict[tuple[int, OpId], int] = {}
        self.carried: dict[tuple[ValueId, int], int] = {}
        self._instants = [2 * op for op in self.moments]
        self._tight = _TightRows(lifetimes)
        self._lives: list[Life] = []
        # Those of them with first runs between whose memory is scarce.
        self._counting: list[Life] = []
        self._again: list[RepeatedRun] = []
        self._gains: dict[tuple[int, OpId], dict[ValueId, list[tuple[int, int]]]] = {}
        self._todo: list[tuple[int, OpId]] = []
        self._ranged: dict[tuple[int, int, OpId], int] = {}
        for value, due in enumerate(lifetimes.due):
            if due:
                self._follow(value, due)
        self._feed()
        self._add_ranges()
        self._price()
        own_lives = [(life.variable, life.start, life.end, lifetimes.bytes[life.value]) for life in self._counting]
        self._memory = _Memory(lifetimes, [*own_lives, *self._moment_lives()])
        self._reruns = RepeatedRunRows(lifetimes, self._lives, [*self._again, *self._runs_in_intervals()])

    @property
    def intervals(self) -> range:
        """The intervals, of which each but the first begins at a moment."""
        return range(len(self.moments) + 1)

    def during(self, point: Floats) -> Floats:
        """Return the bytes at the first run of every op in the solution `point`."""
        return self._memory.during(point)

    def memory_row(self, op: OpId) -> Row | None:
        """Return the memory row at the first run of `op`, or None if no solution violates it."""
        return self._memory.row(op)

    def rows_again(self, point: Floats, known: Iterable[int], count: int) -> dict[int, Row]:
        """Return up to `count` memory rows of repeated runs that `point` violates, by number, but no `known` one."""
        return self._reruns.violated(point, known, count)

    # [Values] points of every value and what happens between them

    def _follow(self, value: ValueId, due: Sequence[int]) -> None:
        first, last = bisect_right(self._instants, due[0]), bisect_left(self._instants, due[-1])
        for start, end in pairwise(sorted({*due, *self._instants[first:last]})):
            self._add_life(value, start, end)

    def _alive(self, value: ValueId, instant: int) -> int:
        """Return the variable that says whether `value` is alive at `instant`, one of its points."""
        if self.lifetimes.is_fixed(value, instant):
            return SURE
        key = (bisect_left(self._instants, instant), value)
        if key not in self.alive:
            self.alive[key] = self.program.variable()
            last = self.lifetimes.due[value][-1]
            if instant > last:
                # Kept, or made again, for the sake of repeated runs only.
                before = self._instants[key[0] - 1] if key[0] else -1
                self._add_life(value, max(last, before), instant)
        return self.alive[key]

    def _add_life(self, value: ValueId, start: int, end: int) -> None:
        """Add what can happen to `value` between two neighbouring points of it."""
        at_start, at_end = self._alive(value, start), self._alive(value, end)
        lifetimes, add = self.lifetimes, self.program.at_least
        free = not self._tight.between(start, end)
        if not lifetimes.again[value]:
            if at_start != SURE:
                add(*((1.0, (at_start, 1.0)) if at_end == SURE else (0.0, (at_start, 1.0), (at_end, -1.0))))
            carried = at_end
        elif free and at_start == SURE:
            return
        else:
            carried = self.carried[value, start] = self.program.variable()
            for other in (at_start, at_end):
                if other != SURE:
                    add(0.0, (other, 1.0), (carried, -1.0))
            self._add_gain(value, start, at_end, carried)
            self._again.append(RepeatedRun(lifetimes.producer[value], start, end, ((at_end, 1.0), (carried, -1.0))))
        self._lives.append(Life(value, carried, start, end))
        if not free:
            self._counting.append(self._lives[-1])

    def _add_gain(self, value: ValueId, start: int, at_end: int, carried: int) -> None:
        """Note that the op of `value` runs again after `start` if the value is alive in the end but not carried."""
        key = (bisect_right(self._instants, start), self.lifetimes.producer[value])
        rerun = self._rerun(*key)
        self._gains.setdefault(key, {}).setdefault(value, []).append((at_end, carried))
        low, terms = _gain([(at_end, carried)])
        self.program.at_least(low, (rerun, 1.0), *terms)

    # [Inputs] what a repeated run reads

    def _rerun(self, interval: int, op: OpId) -> int:
        key = (interval, op)
        if key not in self.rerun:
            self.rerun[key] = self.program.variable()
            self._todo.append(key)
        return self.rerun[key]

    def _feed(self) -> None:
        """Add the rows of the inputs of repeated runs that have none yet."""
        while self._todo:
            interval, op = self._todo.pop()
            if not interval:
                continue
            start = self._instants[interval - 1]
            end = self._end(interval)
            for value in self.lifetimes.reads[op]:
                due = self.lifetimes.due[value]
                later = bisect_left(due, start)
                if later < len(due) and due[later] < end:
                    continue
                self._need(value, start, self.rerun[interval, op], partial(self._rerun, interval))

    def _need(self, value: ValueId, start: int, reader: int, rerun: Callable[[OpId], int]) -> None:
        """Demand that `value` is alive at `start` or made by a later `rerun` if the variable `reader` is 1."""
        if 2 * self.lifetimes.producer[value] > start:
            return
        alive = self._alive(value, start)
        if alive == SURE:
            return
        terms = [(alive, 1.0)]
        if self.lifetimes.again[value]:
            terms.append((rerun(self.lifetimes.producer[value]), 1.0))
        if reader == SURE:
            self.program.at_least(1.0, *terms)
        else:
            self.program.at_least(0.0, *terms, (reader, -1.0))

    # [Ranges] the same for several intervals in a row

    def _add_ranges(self) -> None:
        """Say for ranges of intervals what holds in each of them."""
        ranges = self._ranges()
        for first, last in ranges:
            start, end = self._instants[first - 1], self._end(last)
            for value, due in enumerate(self.lifetimes.due):
                if due and 2 * self.lifetimes.producer[value] <= start:
                    later = bisect_right(due, start)
                    if later < len(due) and due[later] <= end:
                        self._need(value, start, SURE, partial(self._ever, first, last))
        seen, done = 0, 0
        while True:
            self._feed()
            for interval, op in list(self.rerun)[seen:]:
                seen += 1
                for first, last in ranges:
                    if first <= interval <= last and 2 * op <= self._instants[first - 1]:
                        self._ever(first, last, op)
            fresh = list(self._ranged.items())[done:]
            if not fresh:
                return
            done += len(fresh)
            for (first, last, op), variable in fresh:
                start = self._instants[first - 1]
                for value in self.lifetimes.reads[op]:
                    self._need(value, start, variable, partial(self._ever, first, last))

    def _ranges(self) -> list[tuple[int, int]]:
        """Return ranges of at least two intervals: the first and the last of each."""
        last = len(self.moments)
        ranges = {(first, last) for first in range(1, last)}
        places: list[int] = []
        for place in map(self.moments.index, self.history):
            # The interval that this moment divides lies between the nearest moments that were there before.
            before = [other for other in places if other < place]
            if before:
                ranges.add((max(before) + 1, min((other for other in places if other > place), default=last)))
            places.append(place)
        return sorted(ranges)

    def _end(self, interval: int) -> int:
        """Return the instant at which `interval` ends."""
        return self._instants[interval] if interval < len(self._instants) else self.lifetimes.end

    def _ever(self, first: int, last: int, op: OpId) -> int:
        """Return the variable that says whether `op` runs again in the intervals `first` to `last`."""
        if first == last:
            return self._rerun(first, op)
        key = (first, last, op)
        if key not in self._ranged:
            self._ranged[key] = ever = self.program.variable()
            runs = [self._rerun(interval, op) for interval in range(first, last + 1)]
            self.program.at_least(0.0, *((run, 1.0) for run in runs), (ever, -1.0))
            for run in runs:
                self.program.at_least(0.0, (ever, 1.0), (run, -1.0))
        return self._ranged[key]

    def _runs_in_intervals(self) -> Iterable[RepeatedRun]:
        """Yield the repeated runs that happen somewhere in an interval; in the first, nothing is alive all through."""
        for (interval, op), variable in self.rerun.items():
            if interval:
                yield RepeatedRun(op, self._instants[interval - 1], self._end(interval), ((variable, 1.0),))

    # [Cost] seconds of repeated runs

    def _price(self) -> None:
        for key, rerun in self.rerun.items():
            cost = self.lifetimes.cost[key[1]]
            several = [lives for lives in self._gains.get(key, {}).values() if len(lives) > 1]
            if not several:
                self.program.cost[rerun] = cost
                continue
            count = self.program.variable(cost, top=float(max(map(len, several))))
            self.program.at_least(0.0, (count, 1.0), (rerun, -1.0))
            for lives in several:
                low, terms = _gain(lives)
                self.program.at_least(low, (count, 1.0), *terms)

    def _moment_lives(self) -> Iterable[tuple[int, int, int, float]]:
        """Yield what counts at the moments alone: values alive, and generator states of later repeated runs."""
        for (moment, value), variable in self.alive.items():
            instant = self._instants[moment]
            yield variable, instant - 1, instant + 1, self.lifetimes.bytes[value]
        for (interval, op), variable in self.rerun.items():
            if interval and self.lifetimes.replay[op] and op <= self.moments[interval - 1]:
                instant = self._instants[interval - 1]
                yield variable, instant - 1, instant + 1, self.lifetimes.replay[op]


def _gain(lives: Sequence[tuple[int, int]]) -> tuple[float, list[tuple[int, float]]]:
    """Return the constant and the terms of a row `variable + terms >= constant` that counts the runs in `lives`."""
    low, terms = 0.0, []
    for at_end, carried in lives:
        if at_end == SURE:
            low += 1.0
        else:
            terms.append((at_end, -1.0))
        terms.append((carried, 1.0))
    return low, terms


class _TightRows:
    """Which first runs exceed the budget if everything is kept that is due later: the others have no memory row."""

    def __init__(self, lifetimes: Lifetimes) -> None:
        lives = [
            (SURE, start, end, float(lifetimes.bytes[value]))
            for value, due in enumerate(lifetimes.due)
            for start, end in pairwise(due)
        ]
        during = _Memory(lifetimes, lives).during(np.empty(0))
        self._before = np.concatenate(([0], np.cumsum(during > lifetimes.budget_bytes)))

    def between(self, start: int, end: int) -> bool:
        """Whether there is such a row strictly between two instants."""
        return bool(self._before[(end + 1) // 2] > self._before[start // 2 + 1])

    def __contains__(self, op: OpId) -> bool:
        return bool(self._before[op + 1] > self._before[op])


class _Memory:
    """Bytes at every first run as a function of a solution."""

    def __init__(self, lifetimes: Lifetimes, lives: Sequence[tuple[int, int, int, float]]) -> None:
        self._lifetimes = lifetimes
        self._variable = np.array([life[0] for life in lives], dtype=np.int64)
        # A life counts at the first runs strictly between its two instants.
        self._first = np.array([life[1] // 2 + 1 for life in lives], dtype=np.int64)
        self._stop = np.array([(life[2] + 1) // 2 for life in lives], dtype=np.int64)
        self._bytes = np.array([life[3] for life in lives], dtype=np.float64)

    def during(self, point: Floats) -> Floats:
        """Return the bytes at the first run of every op."""
        share = np.ones(len(self._variable))
        open_lives = self._variable != SURE
        share[open_lives] = point[self._variable[open_lives]]
        size = share * self._bytes
        change = np.zeros(self._lifetimes.num_ops + 1)
        np.add.at(change, self._first, size)
        np.subtract.at(change, self._stop, size)
        during: Floats = self._lifetimes.own + np.cumsum(change)[:-1]
        return during

    def row(self, op: OpId) -> Row | None:
        """Return the row that keeps the bytes at the first run of `op` within the budget, in shares of the budget."""
        here = (self._first <= op) & (op < self._stop)
        sure = here & (self._variable == SURE)
        left = self._lifetimes.budget_bytes - self._lifetimes.own[op] - float(self._bytes[sure].sum())
        here &= self._variable != SURE
        if float(self._bytes[here].sum()) <= left:
            return None
        variables: list[int] = self._variable[here].tolist()
        coefficients: list[float] = (self._bytes[here] / self._lifetimes.budget_bytes).tolist()
        return Row(variables, coefficients, -float("inf"), float(left) / self._lifetimes.budget_bytes + LOOSE)
