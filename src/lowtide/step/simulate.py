"""Exact price of a choice: the level along the step, its peak and where it is, and seconds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from lowtide.step.problem import Choice, StepProblem

Kind = Literal["forward", "backward", "gap"]


@dataclass(frozen=True, slots=True)
class Moment:
    """A part of the step.

    Attributes:
        kind: What runs.
        index: The instance; of a gap its number, forward gaps first and backward gaps after them.
    """

    kind: Kind
    index: int


@dataclass(frozen=True, slots=True)
class StepTrace:
    """What a step with a choice takes.

    Attributes:
        peak_bytes: The highest level.
        peak_moment: Where it is first reached.
        moments: All parts of the step in order.
        peaks: The highest level in each.
        levels: The level after each.
        seconds: Time of recomputation.
    """

    peak_bytes: int
    peak_moment: Moment
    moments: tuple[Moment, ...]
    peaks: tuple[int, ...]
    levels: tuple[int, ...]
    seconds: float


def simulate_step(problem: StepProblem, choice: Choice) -> StepTrace:
    """Return the `StepTrace` of `choice`, in time linear in the number of instances."""
    moments, peaks, levels, level = [], [], [], 0
    for moment, peak, after in _parts(problem, choice):
        moments.append(moment)
        peaks.append(level + peak)
        level += after
        levels.append(level)
    top = max(peaks)
    return StepTrace(
        peak_bytes=top,
        peak_moment=moments[peaks.index(top)],
        moments=tuple(moments),
        peaks=tuple(peaks),
        levels=tuple(levels),
        seconds=math.fsum(problem.menu(k)[variant].seconds for k, variant in enumerate(choice)),
    )


def _parts(problem: StepProblem, choice: Choice) -> Iterator[tuple[Moment, int, int]]:
    """Yield every part of the step with its peak and what it leaves, relative to its beginning."""
    count = len(problem.instances)
    chosen = [problem.menu(k)[variant] for k, variant in enumerate(choice)]
    for k, gap in enumerate(problem.forward_gaps):
        yield Moment("gap", k), gap.peak, gap.after
        if k < count:
            yield Moment("forward", k), chosen[k].forward_peak, chosen[k].forward_after
    for k, gap in enumerate(problem.backward_gaps):
        yield Moment("gap", count + 1 + k), gap.peak, gap.after
        if k < count:
            at = count - 1 - k
            yield Moment("backward", at), chosen[at].backward_peak, chosen[at].backward_after
