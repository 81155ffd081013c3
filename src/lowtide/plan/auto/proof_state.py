"""What is being proved about which order of first runs.

The proof is about the given order at first. Once the best schedule, in an order of its own, is faster than any in the
given order can be, or seems to be, or none in the given order fits, the proof switches to the order of the best
schedule. What was proved before still holds, and counts if the best schedule turns out not to be as fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from lowtide.graph.ir import OpId
from lowtide.plan.auto.policy import POLICY
from lowtide.plan.bounds.integer_program import Limits
from lowtide.plan.bounds.moment_selection import Proof
from lowtide.plan.bounds.prover import Prover
from lowtide.plan.orders.reordering import ReorderedProblem
from lowtide.schedule.steps import Schedule

EQUAL = POLICY.gaps.equal


class ProofState:
    """The bounds proved on the overheads of all schedules in an order, and the prover that raises them.

    An overhead is infinite while no schedule fits.

    Attributes:
        about: The problem in the order that the proof is about.
        impossible: Whether it is proved that nothing fits in the given order.
        gaps: The gap left after each round with this order.
    """

    def __init__(self, given: ReorderedProblem, prover: Prover, *, impossible: bool) -> None:
        self._given = self.about = given
        self._prover = prover
        self.impossible = impossible
        self.gaps: list[float] = []
        self._num_switches = 0
        self._bound_of_given = self._bound_of_other = 0.0
        self._under_way: Callable[[], Proof] | None = None

    # Bounds.

    @property
    def is_about_given(self) -> bool:
        """Whether the proof is about the given order."""
        return self.about is self._given

    @property
    def bound(self) -> float:
        """What is proved about the order that the proof is about."""
        return self._bound_of_given if self.is_about_given else self._bound_of_other

    @property
    def given_bound(self) -> float | None:
        """What is proved of all schedules in the given order; None if it is that none fits."""
        return None if self.impossible else self._bound_of_given

    @property
    def is_hopeless(self) -> bool:
        """Whether it is proved that nothing fits in the order that the proof is about."""
        return math.isinf(self.bound) or (self.impossible and self.is_about_given)

    def add_bound(self, bound: float) -> None:
        """Take `bound`, proved about the order that the proof is about, if it is higher than what was known."""
        if self.is_about_given:
            self._bound_of_given = max(self._bound_of_given, bound)
            self.impossible |= math.isinf(bound)
        else:
            self._bound_of_other = max(self._bound_of_other, bound)

    def beats_given(self, overhead: float) -> bool:
        """Return whether nothing in the given order can be faster than `overhead`, or nothing in it fits."""
        return self.impossible or overhead - self._bound_of_given <= EQUAL

    def bound_for(self, order: tuple[OpId, ...], overhead: float) -> float:
        """Return what is proved for a schedule with that order and `overhead`, or 0 if nothing is proved.

        What is proved about another order counts only where the given one is beaten: else it may have better schedules.
        """
        if not self.beats_given(overhead) or order == self._given.order:
            return min(self._bound_of_given, overhead)
        return min(self._bound_of_other, overhead) if order == self.about.order else 0.0

    def is_optimal(self, order: tuple[OpId, ...], overhead: float) -> bool:
        """Return whether no schedule in the given order, which `order` is, has less than `overhead`."""
        return order == self._given.order and self.beats_given(overhead)

    # The order.

    def should_switch(self, best: ReorderedProblem, overhead: float) -> bool:
        """Return whether nothing is left to prove about this order, but something is about that of the best schedule.

        Args:
            best: The problem in the order of the best schedule.
            overhead: That of the best schedule.
        """
        if self.about is best or self._num_switches == POLICY.proof.max_switches:
            return False
        settled = self.is_about_given or overhead - self._bound_of_other <= EQUAL
        return settled and self.beats_given(overhead)

    def switch_to(self, best: ReorderedProblem) -> None:
        """Let the proof be about the order of `best` from now on."""
        self.about, self._bound_of_other = best, 0.0
        self._num_switches += 1
        self._prover.set_problem(None)
        self.gaps.clear()

    # The prover.

    def begin_quick_bound(self, seconds: float) -> bool:
        """Begin a first, quick bound of this order, unless it has begun; return whether it is under way."""
        if self._under_way is None and not self.impossible:
            self._prover.set_problem(self.about.problem)
            self._under_way = self._prover.quick_bound(seconds=seconds)
        return self._under_way is not None

    def begin(self) -> None:
        """Let the prover work on this order if it works on none."""
        if self._prover.problem is None:
            self._prover.set_problem(self.about.problem)

    def begin_stage(self, limits: Limits, known: Schedule | None) -> None:
        """Begin another stage of the proof, unless there is nothing to prove; `known` is the best schedule."""
        if self._prover.problem is not None and not self._prover.done:
            self._under_way = self._prover.advance(limits, None if known is None else self.about.from_given(known))

    def finish(self) -> bool:
        """Wait for what was begun and take its bound; return whether something was."""
        if self._under_way is None:
            return False
        proof, self._under_way = self._under_way(), None
        self.add_bound(proof.bound)
        return True

    @property
    def rerun_ops(self) -> frozenset[OpId]:
        """The ops, of the problem as given, that run again in the solution behind the proof."""
        return self.about.ops_to_given(self._prover.rerun_ops)

    @property
    def suggested_schedule(self) -> Schedule | None:
        """What the solution behind the proof does, as a schedule of `about`, if there is one; it may not fit."""
        return self._prover.suggested_schedule
