"""The step as rows of integers: what each option adds, and what room each moment leaves.

The level before instance k is the constant of the gaps plus `after` of the instances before it. In the backward of
instance k the instances behind it have left their `net`. So every row is a prefix of `after`, a suffix of `net`, and
one peak.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from lowtide.step.policy import POLICY
from lowtide.step.problem import Choice, StepProblem, Variant


@dataclass(frozen=True, slots=True)
class Option:
    """A variant in the units of the rows."""

    variant: int
    forward_peak: int
    after: int
    backward_peak: int
    net: int
    cost: int


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a step.

    Attributes:
        options: What each instance may be.
        forward: Room for the prefix before instance k and its forward peak.
        backward: Room for the prefix with instance k, the suffix behind it, and its backward peak.
        level: Room for the prefix of k instances: the gaps of forward.
        turn: Room for the prefix of k instances and the suffix of the others: the gaps of backward.
        unit_bytes: Bytes of one unit.
        unit_seconds: Seconds of one unit of cost.
        exact: Whether no byte was rounded.
    """

    options: tuple[tuple[Option, ...], ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    level: tuple[int, ...]
    turn: tuple[int, ...]
    unit_bytes: int
    unit_seconds: float
    exact: bool

    def least_nets(self) -> tuple[int, ...]:
        """Return the least suffix of `net` from each instance on, and 0 at the end."""
        nets = [min(option.net for option in options) for options in self.options]
        return (*reversed(list(accumulate(reversed(nets)))), 0)

    def cost(self, choice: Choice) -> int:
        """Return the cost of `choice`."""
        return sum(o.cost for k, options in enumerate(self.options) for o in options if o.variant == choice[k])


def rows_of(problem: StepProblem, *, optimistic: bool = False, bytewise: bool = False) -> Rows:
    """Return the rows of `problem`; what must be rounded is rounded against the choice, or for it if `optimistic`.

    With `bytewise` the unit is one byte, however large the sizes.
    """
    common, unit = (1, 1) if bytewise else _units(problem)
    room = _Room(problem.budget_bytes, unit, optimistic)
    rising = list(accumulate((gap.after for gap in problem.forward_gaps), initial=0))
    falling = list(accumulate((gap.after for gap in problem.backward_gaps), initial=rising[-1]))
    count = len(problem.instances)
    seconds = _unit_seconds(problem)
    keys = [(block, problem.allowed(k)) for k, block in enumerate(problem.instances)]
    menus = {key: tuple(_options(problem, *key, room, seconds)) for key in dict.fromkeys(keys)}
    return Rows(
        options=tuple(menus[key] for key in keys),
        forward=tuple(room.below(rising[k + 1]) for k in range(count)),
        backward=tuple(room.below(falling[count - k]) for k in range(count)),
        level=tuple(room.below(rising[k] + gap.peak) for k, gap in enumerate(problem.forward_gaps)),
        turn=tuple(room.below(falling[count - k] + problem.backward_gaps[count - k].peak) for k in range(count + 1)),
        unit_bytes=unit,
        unit_seconds=seconds,
        exact=unit == common,
    )


@dataclass(frozen=True, slots=True)
class _Room:
    budget_bytes: int
    unit: int
    optimistic: bool

    def size(self, size: int) -> int:
        return size // self.unit if self.optimistic else -(-size // self.unit)

    def below(self, constant: int) -> int:
        room = self.budget_bytes - constant
        return -(-room // self.unit) if self.optimistic else room // self.unit


def _options(
    problem: StepProblem, block: int, allowed: tuple[int, ...], room: _Room, unit_seconds: float
) -> Iterator[Option]:
    whole = math.floor if room.optimistic else round
    for variant in allowed:
        v = problem.blocks[block].variants[variant]
        rising, after, falling, net = map(room.size, _sizes(v))
        yield Option(variant, rising, after, falling, net, whole(v.seconds / unit_seconds))


def _units(problem: StepProblem) -> tuple[int, int]:
    """Return the largest unit of bytes that all sizes are multiples of, and the one in which they are small enough."""
    sizes = {block: [abs(s) for v in problem.blocks[block].variants for s in _sizes(v)] for block in problem.instances}
    common = max(1, math.gcd(*(size for block in sizes.values() for size in block)))
    total = sum(max(sizes[block]) for block in problem.instances)
    return common, common * max(1, -(-total // (common * POLICY.byte_limit)))


def _sizes(variant: Variant) -> tuple[int, int, int, int]:
    return variant.forward_peak, variant.forward_after, variant.backward_peak, variant.net


def _unit_seconds(problem: StepProblem) -> float:
    total = math.fsum(max(v.seconds for v in problem.menu(k)) for k in range(len(problem.instances)))
    return total / POLICY.cost_limit if total else 1.0
