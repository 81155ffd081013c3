"""What `auto` does in each of its rounds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


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
