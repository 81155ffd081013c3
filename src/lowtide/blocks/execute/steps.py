"""The steps of a planned chain: what each run in the schedule keeps, stores and frees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.blocks.block.position import Position
from lowtide.blocks.profile.chain_graph import ChainOp, OpRole


@dataclass(frozen=True, slots=True)
class Step:
    """One run of a position.

    Attributes:
        position: Which one.
        back: Whether it goes backward.
        keep: Whether what its backward reads is kept.
        defer: Whether its graph is kept without what its backward reads; a later run fills that in.
        fill: Whether it runs only to fill in what its backward reads, and stops there.
        supply_state: Whether its graph does not hold the state before it, which a later run supplies for backward.
        again: Whether it has run before.
        last: Whether it does not run forward again.
        store: Whether the state after it is read by a later run.
        drop: Whether the state before it is not read any more.
    """

    position: int
    back: bool = False
    keep: bool = False
    defer: bool = False
    fill: bool = False
    supply_state: bool = False
    again: bool = False
    last: bool = True
    store: bool = False
    drop: bool = False


def steps_of(runs: Sequence[ChainOp], positions: Sequence[Position]) -> list[Step | None]:
    """Return the steps that `runs` mean; None for ops that have nothing to do."""
    found: list[Step | None] = [None] * len(runs)
    # From the end: states and graphs that later runs read, and positions that run forward later or are filled in.
    states: set[int] = set()
    graphs: set[int] = set()
    later: set[int] = set()
    filled: set[int] = set()
    first = {position: place for place, (role, position) in reversed(list(enumerate(runs))) if role is OpRole.FORWARD}
    supplied = _with_supplied_state(runs, positions)
    for place in reversed(range(len(runs))):
        role, position = runs[place]
        if role is OpRole.BACKWARD:
            supply = place in supplied
            found[place] = Step(position, back=True, supply_state=supply, drop=position not in states)
            graphs.add(position)
            if supply:
                states.add(position)
        elif role is OpRole.FORWARD:
            found[place] = Step(
                position,
                keep=position in graphs,
                defer=position in filled and first[position] == place,
                supply_state=place in supplied,
                again=first[position] != place,
                last=position not in later,
                store=position + 1 in states,
                drop=position not in states,
            )
            graphs.discard(position)
            states.discard(position + 1)
            states.add(position)
            later.add(position)
        elif role is OpRole.INSIDE and not _goes_on(runs, place):
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


def _goes_on(runs: Sequence[ChainOp], place: int) -> bool:
    """Return True if the run at `place`, which makes what is inside a position, goes on to the position's results."""
    return tuple(runs[place + 1 : place + 2]) == ((OpRole.FORWARD, runs[place].position),)


def _with_supplied_state(runs: Sequence[ChainOp], positions: Sequence[Position]) -> set[int]:
    """Return the runs whose graph does not hold the state before, and the backward runs that they serve.

    The position before runs once more in between and supplies the state.
    """
    found: set[int] = set()
    # The last run that made each position's results, and the last that made what is inside.
    forward: dict[int, int] = {}
    inside: dict[int, int] = {}
    for place, (role, position) in enumerate(runs):
        if role is OpRole.FORWARD:
            forward[position] = inside[position] = place
        elif role is OpRole.INSIDE:
            # If this is all that runs, the state is kept too.
            inside[position] = len(runs)
        elif (
            role is OpRole.BACKWARD
            and positions[position].reads_state
            and forward.get(position - 1, -1) > inside[position]
        ):
            found.update((place, inside[position]))
    return found
