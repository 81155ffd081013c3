"""A step in words: its moments, and its block runs grouped to a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from lowtide.step.problem import Choice, StepProblem
from lowtide.step.simulate import Moment


@dataclass(frozen=True, slots=True)
class RunGroup:
    """Runs one after the other of the same block with the same variant.

    Attributes:
        first: The first of them.
        count: Their number.
        block: The block.
        variant: The variant.
        name: The block for people: "decoder.layers x 12".
    """

    first: int
    count: int
    block: int
    variant: int
    name: str


def run_groups(problem: StepProblem, choice: Choice) -> tuple[RunGroup, ...]:
    """Return the runs of a step, neighbours that are equal as one group."""
    return tuple(_groups(problem, choice))


def _groups(problem: StepProblem, choice: Choice) -> Iterator[RunGroup]:
    first = 0
    for (block, variant), runs in groupby(zip(problem.instances, choice, strict=True)):
        count = sum(1 for _ in runs)
        yield RunGroup(first, count, block, variant, _group_name(problem.blocks[block].name, count))
        first += count


def _group_name(name: str, count: int) -> str:
    if count == 1:
        return name
    # Equal layers of a list have one block, which is named after the first of them.
    parts = name.split(".")
    number = next((place for place in reversed(range(1, len(parts))) if parts[place].isdigit()), len(parts))
    return f"{'.'.join(parts[:number]) or '(top)'} x {count}"


def moment_in_words(names: Sequence[str], moment: Moment) -> str:
    """Return where a moment is: "the backward of head (block run 3 of 3)"; `names` are those of the block runs."""
    count = len(names)
    if moment.kind != "gap":
        return f"the {moment.kind} of {_run(names, moment.index)}"
    if moment.index < count:
        return f"the code before the forward of {_run(names, moment.index)}"
    if moment.index == count:
        return f"the code after the forward of {_run(names, count - 1)}"
    # Backward runs from the last block to the first.
    left = 2 * count + 1 - moment.index
    if left:
        return f"the code before the backward of {_run(names, left - 1)}"
    return f"the code after the backward of {_run(names, 0)}"


def _run(names: Sequence[str], number: int) -> str:
    return f"{names[number] or 'the model'} (block run {number + 1} of {len(names)})"
