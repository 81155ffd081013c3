"""`revolve`: binomial checkpointing, the fewest recomputations of a uniform chain with a given number of checkpoints.

Papers: Griewank, "Achieving logarithmic growth of temporal and spatial complexity in reverse automatic
differentiation", 1992; Griewank and Walther, "Algorithm 799: revolve", 2000. Memory model: layers of equal size; s
checkpoints hold inputs of layers, that of the first among them, and one layer at a time is run forward and backward at
once. Optimal: no other way to go backward through n layers runs fewer of them again. Cost: linear in the runs.

With b(s, r) = (s + r)! / (s! r!), s checkpoints can reverse b(s, r) layers if every layer may run r times before its
own turn. For the r with b(s, r - 1) < n <= b(s, r) the least number of such runs is t(n, s) = r n - b(s + 1, r - 1).
The next checkpoint goes k layers ahead: the rest is done with s - 1 checkpoints, then the k layers before it with s.
Several k are optimal; the one of the published program, which also writes the fewest checkpoints, is taken.

On a graph the layers are the links of its chain, whatever their sizes, merged into at most `max_pieces`. The number of
checkpoints is scanned, and the simulator chooses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import comb

from lowtide.errors import InvalidOptionError
from lowtide.plan.core.best_schedule import best_of
from lowtide.plan.core.options import check_numbers
from lowtide.plan.core.planner import AbstractPlanner, Proposal
from lowtide.plan.core.problem import Problem
from lowtide.plan.planners.chain_dp.emit import emit
from lowtide.plan.planners.chain_dp.layers import no_chain
from lowtide.plan.planners.chain_dp.operations import Action, Operation
from lowtide.plan.planners.chain_dp.pieces import chain_length, pieces_of
from lowtide.progress import Progress, silent

_TRIES = 40
_MOST_RUNS = 30


@dataclass(frozen=True, kw_only=True)
class Revolve(AbstractPlanner):
    """Reverse the chain with the fewest recomputations for some number of checkpoints.

    Attributes:
        checkpoints: Number of inputs of layers that are held at once, or 0 to try many and take the fastest that fits.
        max_pieces: Largest number of layers; longer chains are merged.
    """

    checkpoints: int = 0
    max_pieces: int = 150

    def __post_init__(self) -> None:
        """Check the options."""
        check_numbers(self)
        if self.checkpoints < 0 or self.max_pieces < 2:
            raise InvalidOptionError(
                f"There are {self.checkpoints} checkpoints and at most {self.max_pieces} pieces; there must be at "
                "least 0 and 2."
            )

    def supports(self, problem: Problem) -> str | None:
        """Return why there is no chain to cut, or None."""
        if problem.graph.boundary is None:
            return "it needs a graph with a forward and a backward phase"
        return no_chain(chain_length(problem.graph, problem.costs))

    def propose(self, problem: Problem, progress: Progress = silent) -> Proposal:
        """Return the fastest schedule found that fits, else the one with the least peak found."""
        del progress
        pieces = pieces_of(problem.graph, problem.costs, self.max_pieces)
        numbers = [self.checkpoints] if self.checkpoints else checkpoint_numbers(len(pieces))
        schedules = (emit(pieces, revolve_operations(len(pieces), number)) for number in numbers)
        return Proposal(best_of(problem, schedules))


def checkpoint_numbers(layers: int) -> list[int]:
    """Return the numbers of checkpoints to try, at most 40: those with which no layer runs more than 30 times."""
    least = next(s for s in range(1, layers + 1) if repetitions(layers, s) <= _MOST_RUNS)
    numbers = range(least, layers + 1)
    if len(numbers) <= _TRIES:
        return list(numbers)
    # Few checkpoints change much from one to the next, many change little.
    ratio = (layers / least) ** (1 / (_TRIES - 1))
    return sorted({round(least * ratio**k) for k in range(_TRIES)})


def repetitions(layers: int, checkpoints: int) -> int:
    """Return r, the most often that a layer is run before its own turn: the least one with b(s, r) >= n."""
    _check(layers, checkpoints)
    count = 0
    while _b(checkpoints, count) < layers:
        count += 1
    return count


def recomputations(layers: int, checkpoints: int) -> int:
    """Return t(n, s), the least number of runs beside those at each layer's own turn.

    Example:
        ```python
        recomputations(10, 3)
        #> 15
        ```
    """
    count = repetitions(layers, checkpoints)
    return count * layers - _b(checkpoints + 1, count - 1)


def best_split(layers: int, checkpoints: int) -> int:
    """Return how many layers ahead the next checkpoint goes, for at least two layers and two checkpoints."""
    _check(layers, checkpoints)
    s, r = checkpoints, repetitions(layers, checkpoints)
    if layers <= _b(s, r - 1) + _b(s - 2, r - 1):
        return max(1, _b(s, r - 2))
    if layers >= _b(s, r) - _b(s - 3, r):
        return _b(s, r - 1)
    return max(1, layers - _b(s - 1, r - 1) - _b(s - 2, r - 1))


def revolve_operations(layers: int, checkpoints: int) -> list[Operation]:
    """Return the operations that go through `layers` with `checkpoints`, the input of the first layer being one."""
    _check(layers, checkpoints)
    done: list[Operation] = []
    # What is still to do, the next on top: operations, and (first layer, number of layers, checkpoints) of stretches.
    stack: list[Operation | tuple[int, int, int]] = [(0, layers, checkpoints)]
    while stack:
        todo = stack.pop()
        if isinstance(todo, Operation):
            done.append(todo)
        else:
            stack += reversed(list(_steps(*todo)))
    return done


def _steps(first: int, layers: int, checkpoints: int) -> Iterator[Operation | tuple[int, int, int]]:
    """Yield how to do a stretch: operations, and smaller stretches."""
    if layers == 1:
        yield from (Operation(Action.KEEP_ALL, first), Operation(Action.BACKWARD, first))
        return
    # Without another checkpoint, the last layer's turn is next.
    ahead = layers - 1 if checkpoints == 1 else best_split(layers, checkpoints)
    yield Operation(Action.KEEP_INPUT, first)
    yield from (Operation(Action.PASS, layer) for layer in range(first + 1, first + ahead))
    yield first + ahead, layers - ahead, max(checkpoints - 1, 1)
    yield first, ahead, checkpoints


def _b(s: int, r: int) -> int:
    """Return the binomial b(s, r), and 0 where it is not defined."""
    return comb(s + r, s) if s >= 0 and r >= 0 else 0


def _check(layers: int, checkpoints: int) -> None:
    if layers < 1 or checkpoints < 1:
        raise InvalidOptionError(
            f"There are {layers} layers and {checkpoints} checkpoints; there must be at least one of each."
        )
