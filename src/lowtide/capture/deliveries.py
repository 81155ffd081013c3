"""Gradients that leave backward before it ends, because somebody waits for them: the buckets of another engine.

In the graph a delivery is an op of its own that reads gradients. It runs once, and in no time. A gradient that its
receiver copies is free behind it; one that becomes the parameter's `.grad` lives to the end of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

TARGET = "lowtide.deliver"


@dataclass(frozen=True)
class DeliveryPolicy:
    """Numbers of deliveries.

    Attributes:
        most_groups: A delivery takes two calls of Python by autograd, some 40 microseconds; 32 of them are not felt in
            a step of 100 ms, and nothing waits longer than for the 32nd part of all gradients.
    """

    most_groups: int = 32


POLICY = DeliveryPolicy()


@dataclass(frozen=True)
class Deliveries:
    """Which gradients leave together, and what becomes of them.

    Attributes:
        groups: Positions of inputs whose gradients leave together, in the order in which plain training has them.
        kept: Whether they live to the end of the step; else they die when they are delivered.
        copied_share: Bytes that their receiver takes to the end of the step, for every byte of them.
    """

    groups: tuple[tuple[int, ...], ...]
    kept: bool
    copied_share: float = 0.0

    @property
    def positions(self) -> frozenset[int]:
        """The positions of all of them."""
        return frozenset(position for group in self.groups for position in group)


def group(order: Sequence[int], size_of: Mapping[int, int]) -> tuple[tuple[int, ...], ...]:
    """Return the positions in `order`, cut wherever a fair share of the bytes is together."""
    share = max(1, -(-sum(size_of[position] for position in order) // POLICY.most_groups))
    groups: list[tuple[int, ...]] = []
    now: list[int] = []
    for position in order:
        now.append(position)
        if sum(size_of[each] for each in now) >= share:
            groups.append(tuple(now))
            now = []
    return (*groups, tuple(now)) if now else tuple(groups)
