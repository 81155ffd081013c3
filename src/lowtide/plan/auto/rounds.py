"""What `auto` does in each of its rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

# Above this number of ops, rounds are dear enough to end early, and planners that win only where memory is very scarce
# are asked only if nothing fits; above the second, not at all.
MEDIUM, MANY = 300, 1_000
# A gap with which there is one more round, and a last search that has closed less is forgiven once; twice if wide.
FAR = 0.03
# The share of the gap that a round must at least have closed for another to be worth its time, and that the third must
# have where much is left.
_NEXT_TO_NOTHING, _LITTLE_CLOSED = 0.05, 0.15
# A gap that is not worth a third round; and one that is not worth a second if rounds take long.
_LITTLE_GAP, _SMALL_GAP = 0.01, 0.03


class Start(Enum):
    """Where a search begins."""

    BEST = auto()
    PLAIN = auto()
    PROOF = auto()


@dataclass(frozen=True, slots=True)
class Round:
    """Searches one after the other, with the work of each, in about microseconds, and of the proof, in about seconds.

    Beside the proof they must not depend on what it finds meanwhile: the answer is to be the same every time.
    """

    searches: tuple[tuple[Start, int], ...]
    proof: float


ROUNDS = (
    Round(((Start.BEST, 500_000),), 1.5),
    Round(((Start.PROOF, 1_000_000), (Start.PLAIN, 900_000), (Start.PROOF, 900_000)), 1.5),
    Round(((Start.PROOF, 900_000), (Start.BEST, 1_200_000)), 1.5),
)


def searches_in_large_graphs(planned: Round, *, wide: bool) -> list[tuple[Start, int]]:
    """Return the searches of a round in a large graph.

    To begin at plain training takes long there and wins rarely. Where the gap is `wide`, beginning at the solution of
    the proof does not pay either: such graphs are searched too slowly to be caught.
    """
    kept = (each for each in planned.searches if each[0] is not Start.PLAIN)
    return [(Start.BEST if wide else start, work) for start, work in kept]


def little_gap(num_ops: int) -> float:
    """Return a gap with which one need not go on in a graph of that size."""
    return _SMALL_GAP if num_ops > MANY else _LITTLE_GAP


def has_stalled(left: Sequence[float], num_ops: int, *, turned: bool) -> bool:
    """Whether one more round is not worth its time: the last of several brought or left little, or it is dear.

    In large graphs there are two at most, for the proof takes long, and one of a proof that has turned from the given
    order to another; the last searches go on.

    Args:
        left: The gap after each round.
        num_ops: The size of the graph.
        turned: Whether the proof is about another order than the given one.
    """
    if num_ops <= MEDIUM or not left:
        return False
    if len(left) == 1:
        return num_ops > MANY and (turned or left[0] <= _SMALL_GAP)
    if num_ops > MANY:
        return True
    before, after = left[-2:]
    if after > FAR:
        return len(left) > 2 and before - after < _LITTLE_CLOSED * before
    return after <= _LITTLE_GAP or before - after < _NEXT_TO_NOTHING * before
