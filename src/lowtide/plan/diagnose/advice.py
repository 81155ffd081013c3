"""What would help where a budget is not met, chosen from what holds the peak up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lowtide.plan.diagnose.causes import Cause, Part

# A cause is worth advice from this share of the peak on.
_SHARE = 1 / 3
_GROWS_WITH_BATCH = (Cause.OP, Cause.KEPT, Cause.PASSING, Cause.OUTPUTS, Cause.BATCH)
_OF_OPTIMIZER = (Cause.OPTIMIZER, Cause.UPDATE)
# What another schedule may hold less of.
_AVOIDABLE = (Cause.KEPT, Cause.PASSING, Cause.STATES, Cause.EARLIER)
_SEARCH_ALL = ("auto_thorough", "brute_force")


@dataclass(frozen=True, slots=True)
class Situation:
    """A budget that is not met.

    Attributes:
        parts: What is there at the least peak known.
        left_bytes: What the budget leaves for the step.
        excess_bytes: By how much the peak is above the budget.
        planner: Name of the planner that found the least peak.
        op: What runs at the peak, in words.
        unit: What ops are called: "op", or "block" in a chain.
        proved: Whether it is proved that no schedule in the given order fits.
        least_batch: Whether the batch cannot be smaller.
    """

    parts: Sequence[Part]
    left_bytes: int
    excess_bytes: int
    planner: str
    op: str
    unit: str = "op"
    proved: bool = False
    least_batch: bool = False

    def advice(self) -> list[str]:
        """Return what would help, one sentence or two each."""
        return [words for words in self._all() if words]

    def _all(self) -> Iterator[str]:
        weighty = self.weighty()
        if Cause.GRADIENTS in weighty:
            yield (
                "Train fewer parameters: a smaller model, frozen parts (requires_grad_(False)) or adapters. "
                "Gradients stay to the end of the step, whatever is recomputed and however small the batch is."
                f"{self._alone(Cause.GRADIENTS)}"
            )
        if Cause.OUTPUTS in weighty:
            yield (
                "Return only the loss: compute it inside the model. What a call returns stays as long as the caller "
                f"holds it.{self._alone(Cause.OUTPUTS)}"
            )
        if Cause.OP in weighty:
            yield f"{self._split()}{self._alone(Cause.OP)}"
        if self._share(*_GROWS_WITH_BATCH) >= _SHARE:
            yield self._smaller_batch()
        if Cause.EARLIER in weighty:
            yield "Remove the graph breaks before this part of the model (TORCH_LOGS=graph_breaks shows them)."
        if self._share(*_OF_OPTIMIZER) >= _SHARE:
            yield 'Use an optimizer that keeps less: "sgd" keeps nothing, "sgd-momentum" half of what "adam" does.'
        if self._share(Cause.PARAMETERS, *_OF_OPTIMIZER) >= _SHARE:
            yield "Use a smaller model, a smaller dtype for its parameters, or train fewer of them."
        if self._another_planner_may_help():
            yield 'Search longer: planner="auto_thorough" may find a schedule that needs less.'

    def weighty(self) -> set[Cause]:
        """Return the causes that make up a third of the peak or more, and the largest."""
        return {part.cause for part in self.parts if self._share(part.cause) >= _SHARE or part is self.parts[0]}

    def _share(self, *causes: Cause) -> float:
        total = sum(part.bytes for part in self.parts)
        return sum(part.bytes for part in self.parts if part.cause in causes) / max(total, 1)

    def _alone(self, cause: Cause) -> str:
        alone = any(part.cause is cause and self._is_too_much(part) for part in self.parts)
        return " This alone is more than the budget leaves: no planner can help." if alone else ""

    def _is_too_much(self, part: Part) -> bool:
        return part.floor_bytes > max(self.left_bytes, 0)

    def _split(self) -> str:
        if self.unit == "block":
            return f"Divide this block into several: {self.op}."
        return f"Split this op into several that work on less at once: {self.op}."

    def _smaller_batch(self) -> str:
        what = "the inputs smaller" if self.least_batch else "the batch smaller"
        share = 100 * self._share(*_GROWS_WITH_BATCH)
        return f"Make {what}, sequences shorter or images smaller: {share:.1f} % of the peak may grow with them."

    def _another_planner_may_help(self) -> bool:
        above = any(map(self._is_too_much, self.parts))
        avoidable = sum(part.bytes for part in self.parts if part.cause in _AVOIDABLE) >= self.excess_bytes
        return self.planner not in _SEARCH_ALL and not self.proved and avoidable and not above
