"""`rotor`: the fastest nested schedule of a chain under a memory bound; pieces may be recomputed any number of times.

Paper: Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing for heterogeneous chains: how to train
deep neural networks with limited memory", 2019 (the rotor tool). Memory model: for each layer the bytes of its output,
of what its backward reads, of its gradient, and the most that its forward and backward take. Optimal in that model
among persistent schedules: what is kept stays until its backward has run.

1. C(s, t, m) is the least time to run backward from layer t to layer s with m bytes if the input of s is there.
2. Either s keeps all that its backward reads: run it, solve C(s + 1, t, m less what it keeps), run its backward.
3. Or s keeps its input only: run forward to some layer r, keep that one's input, solve C(r, t, m less that input),
   then begin again from the input of s with C(s, r - 1, m).
4. A single layer is run forward and backward at once.

Cost: O(L^3 M) for L layers and M slots of memory, as array operations; all bounds up to M are solved together. Chains
of more than `max_pieces` links are merged into as many pieces. The model does not know the true peak of a graph: the
schedules of many bounds are priced by the simulator, and the fastest that fits is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from math import ceil

import numpy as np
from numpy.typing import NDArray

from lowtide.errors import InvalidOptionError
from lowtide.plan.core.best_schedule import best_priced
from lowtide.plan.core.options import check_numbers
from lowtide.plan.core.planner import AbstractPlanner, Proposal
from lowtide.plan.core.problem import Problem
from lowtide.plan.diagnose.infeasible import infeasible_chain
from lowtide.plan.planners.chain_dp.emit import emit
from lowtide.plan.planners.chain_dp.layers import no_chain
from lowtide.plan.planners.chain_dp.operations import Action, Operation, keep_everything
from lowtide.plan.planners.chain_dp.pieces import Pieces, chain_length, pieces_of
from lowtide.plan.planners.chain_dp.profile import profile
from lowtide.plan.planners.chain_dp.stages import Stages, operations_seconds
from lowtide.progress import Progress, silent
from lowtide.schedule.simulate import Trace
from lowtide.schedule.steps import Schedule

# Tables for the whole range of bounds, and for its lower parts with finer slots.
_ZOOMS = (1, 4, 16)
# Bounds to try whatever the budget is; fewer for large graphs, whose schedules take longer to price.
_COARSE, _LEAST_COARSE, _COARSE_STEPS = 12, 4, 60_000
_MOST_SLOTS = 4000
# Bounds to try above the highest that fits.
_NEAR = 12
# By how much rounding may make the least bound of a table too large.
_MARGIN = 1.25
# Half the memory and twice the speed of double precision; what is returned is added up again.
_TIME = np.float32
_NEVER = _TIME(np.inf)
# Any chain can be done in this many slots if each is as large as its largest figure of bytes.
_LEAST_SLOTS = 8
_STRIDE = 1.1
Candidate = tuple[Schedule, Trace]


@dataclass(frozen=True, kw_only=True)
class Rotor(AbstractPlanner):
    """Solve the chain for many memory bounds and take the fastest schedule that fits.

    Attributes:
        slots: Number of slots into which a range of memory bounds is divided if there are `max_pieces` layers; fewer
            layers leave time for more slots, up to 4,000.
        max_pieces: Largest number of layers; longer chains are merged.
    """

    slots: int = 500
    max_pieces: int = 150

    def __post_init__(self) -> None:
        """Check the options."""
        check_numbers(self)
        if self.slots < 1 or self.max_pieces < 2:
            raise InvalidOptionError(
                f"There are {self.slots} slots and at most {self.max_pieces} pieces; there must be at least 1 and 2."
            )

    def supports(self, problem: Problem) -> str | None:
        """Return why there is no chain to cut, or None."""
        if problem.graph.boundary is None:
            return "it needs a graph with a forward and a backward phase"
        return no_chain(chain_length(problem.graph, problem.costs))

    def propose(self, problem: Problem, progress: Progress = silent) -> Proposal:
        """Return the fastest schedule found that fits, else the one with the least peak found."""
        pieces = pieces_of(problem.graph, problem.costs, self.max_pieces)
        stages = profile(pieces, problem.costs)
        plain = emit(pieces, keep_everything(len(pieces)))
        found: list[Candidate] = [(plain, problem.price(plain))]
        slots = min(_MOST_SLOTS, round(self.slots * max(1.0, self.max_pieces / len(pieces)) ** 2))
        for zoom, following in zip(_ZOOMS, (*_ZOOMS[1:], None), strict=True):
            progress(f"rotor: {len(pieces)} pieces, memory up to 1/{zoom} in {slots} slots")
            # Rounding up adds at most one slot for every piece, so that plain training still fits into the first table.
            unit = max(stages.plain_bytes, 1) / zoom / max(slots - len(pieces) - 2, slots / 2)
            table = RotorTable(stages.rounded_up(unit), slots)
            bound, candidates = _scan(problem, pieces, table)
            found += candidates
            if following is None or _done(table.bounds(), bound, slots * zoom / following):
                break
        return Proposal(best_priced(problem, found))


def _done(bounds: list[int], fitting: int | None, reach: float) -> bool:
    """Whether a table of bounds up to `reach` would add nothing: it has only slower schedules, or none at all."""
    return (fitting is not None and fitting > reach) or (bool(bounds) and bounds[0] > _MARGIN * reach)


def _scan(problem: Problem, pieces: Pieces, table: RotorTable) -> tuple[int | None, list[Candidate]]:
    """Return the highest bound found whose schedule fits, and all schedules tried.

    These are those of bounds spread over the table, whatever the budget is, and, if one of them fits, of bounds between
    the highest such and the next, and a few above. So a budget equal to the least peak that is found leads to a
    schedule that fits it.
    """
    bounds = table.bounds()
    tried: list[Candidate] = []

    def fits(index: int) -> bool:
        schedule = emit(pieces, table.operations(bounds[index]))
        tried.append((schedule, problem.price(schedule)))
        return problem.fits(tried[-1][1])

    most = min(max(_COARSE_STEPS // len(problem.graph.ops), _LEAST_COARSE), _COARSE)
    coarse = _spread(range(len(bounds)), most)
    fitting = [index for index in coarse if fits(index)]
    if not fitting:
        return None, tried
    low, high = fitting[-1], next((index for index in coarse if index > fitting[-1]), len(bounds))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    # The table rounds up and does not know the true peak: a schedule that seems too large may fit all the same.
    near = range(low + 1, min(len(bounds), low + 1 + min(_NEAR, most)))
    return bounds[max((index for index in near if fits(index)), default=low)], tried


def _spread(indices: range, most: int) -> list[int]:
    """Return at most `most` of `indices`, evenly spread, both ends among them."""
    if len(indices) <= most:
        return list(indices)
    return [indices[round(k * (len(indices) - 1) / (most - 1))] for k in range(most)]


def rotor_operations(stages: Stages, memory: int, *, slots: int = 500) -> tuple[list[Operation], float]:
    """Return the fastest persistent operations whose bytes stay within `memory`, and their seconds.

    The bytes are those beyond the chain's input. With more than `slots` bytes they are counted in slots, rounded up, so
    that the answer keeps within `memory` but may be slower than the best. Raises `InfeasibleBudgetError` if there is
    none.
    """
    if memory < 1 or slots < _LEAST_SLOTS:
        raise InvalidOptionError(
            f"A memory of {memory} bytes and {slots} slots are given; there must be at least 1 and {_LEAST_SLOTS}."
        )
    table = _rounded_up_table(stages, memory, slots)
    if not table.bounds():
        least = memory
        while not _rounded_up_table(stages, least, slots).bounds():
            least = ceil(least * _STRIDE)
        raise infeasible_chain(memory, least)
    operations = table.operations(table.bounds()[-1])
    return operations, operations_seconds(stages, operations)


def _rounded_up_table(stages: Stages, memory: int, slots: int) -> RotorTable:
    slots = min(slots, memory)
    return RotorTable(stages.rounded_up(memory / slots), slots)


class RotorTable:
    """C(s, t, m) for all s <= t and all whole m from 0 to `slots`; the bytes in `stages` are slots."""

    def __init__(self, stages: Stages, slots: int) -> None:
        self._stages, self._last = stages, len(stages) - 1
        self._slots = np.arange(slots + 1)
        self._again = np.array([0.0, *accumulate(stages.pass_seconds)], dtype=_TIME)
        self._first = np.array([0.0, *accumulate(stages.first_seconds)], dtype=_TIME)
        self._through = _through(stages)
        size = (len(stages), len(stages), slots + 1)
        # Indexed by s, t, m; and by t, s, m for the same with the input of s counted too.
        self._costs: NDArray[np.float32] = np.full(size, np.inf, dtype=_TIME)
        self._right: NDArray[np.float32] = np.full(size, np.inf, dtype=_TIME)
        for length in range(len(stages)):
            for s in range(len(stages) - length):
                t = s + length
                self._costs[s, t] = self._leaf(s) if s == t else self._inner(s, t)
                self._right[t, s] = _less(self._costs[s, t], stages.outputs[s])

    def bounds(self) -> list[int]:
        """Return the least memory for every time that some memory reaches, ascending."""
        seconds = self._costs[0, self._last]
        before = np.concatenate([np.array([np.inf], dtype=_TIME), seconds[:-1]])
        return [int(bound) for bound in np.flatnonzero(seconds < before)]

    def operations(self, memory: int) -> list[Operation]:
        """Return the fastest operations within `memory` slots, of which one of `bounds` must be at most that."""
        done: list[Operation] = []
        # What is still to do, the next on top: operations, and ranges of layers with the memory they have.
        stack: list[Operation | tuple[int, int, int]] = [(0, self._last, memory)]
        while stack:
            todo = stack.pop()
            if isinstance(todo, Operation):
                done.append(todo)
            else:
                stack += reversed(list(self._steps(*todo)))
        return done

    def _steps(self, s: int, t: int, memory: int) -> Iterator[Operation | tuple[int, int, int]]:
        """Yield the best way to do layers `s` to `t`: operations, and smaller ranges."""
        if s == t:
            yield from (Operation(Action.KEEP_ALL, s), Operation(Action.BACKWARD, s))
            return
        splits = self._splits(s, t, memory)
        if self._keep(s, t)[memory] <= splits.min():
            yield from (Operation(Action.KEEP_ALL, s), (s + 1, t, memory - self._stages.saved[s]))
            yield Operation(Action.BACKWARD, s)
            return
        r = s + 1 + int(splits.argmin())
        yield Operation(Action.KEEP_INPUT, s)
        yield from (Operation(Action.PASS, layer) for layer in range(s + 1, r))
        yield r, t, memory - self._stages.outputs[r]
        yield s, r - 1, memory

    def _leaf(self, s: int) -> NDArray[np.float32]:
        stages = self._stages
        seconds = (stages.first_seconds if s == self._last else stages.leaf_seconds)[s] + stages.backward_seconds[s]
        return np.where(self._slots >= stages.leaf_bytes[s], _TIME(seconds), _NEVER)

    def _inner(self, s: int, t: int) -> NDArray[np.float32]:
        best: NDArray[np.float32] = np.minimum(self._splits(s, t, slice(None)).min(axis=0), self._keep(s, t))
        return best

    def _keep(self, s: int, t: int) -> NDArray[np.float32]:
        """Return the time for every memory if `s` keeps all."""
        stages = self._stages
        seconds = (stages.first_seconds if t == self._last else stages.keep_seconds)[s] + stages.backward_seconds[s]
        least = max(stages.gradients[t + 1] + stages.keep_bytes[s], stages.backward_bytes[s])
        rest = _less(self._costs[s + 1, t], stages.saved[s]) + _TIME(seconds)
        times: NDArray[np.float32] = np.where(self._slots >= least, rest, _NEVER)
        return times

    def _splits(self, s: int, t: int, memory: int | slice) -> NDArray[np.float32]:
        """Return the times if `s` keeps its input only, for every layer from `s + 1` to `t` that keeps its own next."""
        run = self._first if t == self._last else self._again
        ahead, needs = run[s + 1 : t + 1] - run[s], self._stages.gradients[t + 1] + self._through[s, s:t]
        times: NDArray[np.float32] = self._costs[s, s:t, memory] + self._right[t, s + 1 : t + 1, memory]
        if isinstance(memory, int):
            times += ahead
            times[needs > memory] = np.inf
            return times
        times += ahead[:, None]
        np.copyto(times, np.inf, where=self._slots < needs[:, None])
        return times


def _through(stages: Stages) -> NDArray[np.int64]:
    """Return, for every s and r, the most bytes beyond the input of s while layers s to r run and keep nothing."""
    n = len(stages)
    inputs, passing = np.array(stages.outputs[:n], dtype=np.int64), np.array(stages.pass_bytes, dtype=np.int64)
    found = np.zeros((n, n), dtype=np.int64)
    for s in range(n):
        row = inputs[s:] + passing[s:]
        row[0] = passing[s]
        found[s, s:] = np.maximum.accumulate(row)
    return found


def _less(row: NDArray[np.float32], used: int) -> NDArray[np.float32]:
    """Return `row`, the times for every memory, for when `used` of the memory is taken."""
    if not used:
        return row
    after = np.full_like(row, np.inf)
    after[used:] = row[: len(row) - used] if used < len(row) else np.inf
    return after
