"""What is proved about which order of first runs.

The proof is about the given order at first. Once the best schedule, in an order of its own, is faster than any in the
given order can be, or seems to be, or none in the given order fits, it is about that of the best schedule. What was
proved before still holds, and counts if the best schedule turns out not to be as fast.
"""

from __future__ import annotations

import math

from lowtide.graph.ir import OpId
from lowtide.plan.orders.reordered_problem import View

# Overheads this close count as equal: the proof rounds each op's cost down to a millionth of the step.
EQUAL = 1e-5


class Claims:
    """Bounds on the overheads of all schedules in an order; an overhead is infinite while no schedule fits.

    Attributes:
        about: The problem in the order that the proof is about.
        impossible: Whether it is proved that nothing fits in the given order.
        num_turns: How often the proof has turned to another order.
    """

    def __init__(self, given: View, *, impossible: bool) -> None:
        self._given = self.about = given
        self.impossible = impossible
        self.num_turns = 0
        self._of_given = self._of_other = 0.0

    @property
    def is_about_given(self) -> bool:
        """Whether the proof is about the given order."""
        return self.about is self._given

    @property
    def latest(self) -> float:
        """What is proved about the order that the proof is about."""
        return self._of_given if self.is_about_given else self._of_other

    def note(self, bound: float) -> None:
        """Take `bound`, proved about that order, if it is higher than what was known."""
        if self.is_about_given:
            self._of_given = max(self._of_given, bound)
            self.impossible |= math.isinf(bound)
        else:
            self._of_other = max(self._of_other, bound)

    def turn(self, view: View) -> None:
        """Let the proof be about the order of `view` from now on."""
        self.about, self._of_other = view, 0.0
        self.num_turns += 1

    def beats_given(self, overhead: float) -> bool:
        """Whether nothing in the given order can be faster than `overhead`, or nothing in it fits."""
        return self.impossible or overhead - self._of_given <= EQUAL

    def bound(self, order: tuple[OpId, ...], overhead: float) -> float:
        """Return what is proved for a schedule with that order and `overhead`, or 0 if nothing is about such ones.

        What is proved about another order counts only where the given one is beaten: else it may have better schedules.
        """
        if not self.beats_given(overhead) or order == self._given.order:
            return min(self._of_given, overhead)
        return min(self._of_other, overhead) if order == self.about.order else 0.0

    @property
    def given_bound(self) -> float | None:
        """What is proved of all schedules in the given order; None if it is that none fits."""
        return None if self.impossible else self._of_given

    def is_optimal(self, order: tuple[OpId, ...], overhead: float) -> bool:
        """Whether no schedule in the given order, which `order` is, has less than `overhead`."""
        return order == self._given.order and self.beats_given(overhead)
