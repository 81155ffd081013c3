"""What each run in a schedule of a chain has to do: what it keeps, and what it lets go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.blocks.block.position import Position

FORWARD, INSIDE, BACKWARD = "forward", "inside", "backward"


@dataclass(frozen=True, slots=True)
class Step:
    """One run of a position.

    Attributes:
        position: Which one.
        back: Whether it goes backward.
        keep: Whether what its backward reads is kept.
        blank: Whether the way back is kept without what its backward reads; a later run fills it in.
        fill: Whether it runs only to fill in what its backward reads, and stops there.
        apart: Whether the state before it is not kept with that, and is supplied by a later run.
        again: Whether it has run before.
        last: Whether it does not run forward again.
        store: Whether the state after it is read by a later run.
        drop: Whether the state before it is not read any more.
    """

    position: int
    back: bool = False
    keep: bool = False
    blank: bool = False
    fill: bool = False
    apart: bool = False
    again: bool = False
    last: bool = True
    store: bool = False
    drop: bool = False


def steps_of(runs: Sequence[tuple[str, int]], positions: Sequence[Position]) -> list[Step | None]:
    """Return the steps that `runs` mean; None for ops that have nothing to do."""
    found: list[Step | None] = [None] * len(runs)
    # Seen from the end: states and graphs that later runs read, and positions that run forward later or are filled in.
    states: set[int] = set()
    graphs: set[int] = set()
    later: set[int] = set()
    filled: set[int] = set()
    first = {position: place for place, (kind, position) in reversed(list(enumerate(runs))) if kind == FORWARD}
    apart = _kept_apart(runs, positions)
    for place in reversed(range(len(runs))):
        kind, position = runs[place]
        if kind == BACKWARD:
            supply = place in apart
            found[place] = Step(position, back=True, apart=supply, drop=position not in states)
            graphs.add(position)
            if supply:
                states.add(position)
        elif kind == FORWARD:
            found[place] = Step(
                position,
                keep=position in graphs,
                blank=position in filled and first[position] == place,
                apart=place in apart,
                again=first[position] != place,
                last=position not in later,
                store=position + 1 in states,
                drop=position not in states,
            )
            graphs.discard(position)
            states.discard(position + 1)
            states.add(position)
            later.add(position)
        elif kind == INSIDE and not _is_begun(runs, place):
            found[place] = Step(
                position,
                fill=True,
                again=True,
                last=position not in later,
                drop=position not in states,
            )
            graphs.discard(position)
            states.add(position)
            later.add(position)
            filled.add(position)
    return found


def _is_begun(runs: Sequence[tuple[str, int]], place: int) -> bool:
    """Whether the run at `place`, which makes what is inside a position, goes on to the position's results."""
    return tuple(runs[place + 1 : place + 2]) == ((FORWARD, runs[place][1]),)


def _kept_apart(runs: Sequence[tuple[str, int]], positions: Sequence[Position]) -> set[int]:
    """Return the runs that keep what is inside but not the state before, and the backward runs that they serve.

    The state is there again by then: the position before runs once more in between.
    """
    found: set[int] = set()
    # The last run that made each position's results, and the last that made what is inside.
    forward: dict[int, int] = {}
    inside: dict[int, int] = {}
    for place, (kind, position) in enumerate(runs):
        if kind == FORWARD:
            forward[position] = inside[position] = place
        elif kind == INSIDE:
            # If this is all that runs, the state is kept too.
            inside[position] = len(runs)
        elif kind == BACKWARD and positions[position].reads_state and forward.get(position - 1, -1) > inside[position]:
            found.update((place, inside[position]))
    return found
