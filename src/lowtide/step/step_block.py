"""A block of a step: something that runs forward and backward in one of several ways, each with a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lowtide.plan.core.problem import Problem
from lowtide.plan.core.result import Plan
from lowtide.plan.menu import Entry
from lowtide.schedule.simulate import Trace
from lowtide.step.plan_variant import plan_variant
from lowtide.step.problem import Block, Variant

# Takes what gradients come, as the layers above describe it.
PriceFor = Callable[[Any], Sequence[tuple[Problem, Trace]]]
# Tangents of at most so many bytes are those of scalars, which the caller of backward makes.
_SCALAR_BYTES = 16


@dataclass(frozen=True)
class StepBlock:
    """A captured graph with its menu.

    Attributes:
        name: The modules that it runs, for people.
        menu: Its plans, in the order of its lowered variants.
        price_for: Returns, for every variant, the problem and the trace of what runs if other gradients come than the
            menu expects; None if that makes no difference.
        gradient_bytes: The gradients of parameters that its backward makes.
    """

    name: str
    menu: tuple[Entry, ...]
    price_for: PriceFor | None = None
    gradient_bytes: int = 0

    @property
    def least(self) -> int:
        """The variant that keeps least."""
        return min(range(len(self.menu)), key=lambda index: self.menu[index].trace.saved_bytes)

    @property
    def tangent_bytes(self) -> int:
        """Bytes of the gradients that its backward takes, which a later block has made."""
        return sum(size for size in self.tangents if size > _SCALAR_BYTES)

    @property
    def input_bytes(self) -> int:
        """Bytes of the inputs that are no parameters, which it holds until its backward ends."""
        return sum(value.bytes for value in self.menu[0].plan.problem.graph.values if value.kind == "input")

    @property
    def own_output_bytes(self) -> int:
        """Bytes of the outputs that its own backward may read: they live until then, whoever else lets go of them."""
        graph = self.menu[0].plan.problem.graph
        read = {value for op in graph.backward for value in graph.reads[op]}
        outputs = {value for value in graph.outputs if graph.values[value].kind != "gradient"}
        return sum(graph.values[value].bytes for value in outputs & read)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans of its menu."""
        return tuple(entry.plan for entry in self.menu)

    def as_block(self, arrived: Any = None) -> Block:
        """Return it as the step planner sees it, if `arrived` are the gradients that come, or those it was made for."""
        if arrived is None or self.price_for is None:
            return Block(self.name, tuple(self._variant(index) for index in range(len(self.menu))))
        priced = [plan_variant(*each) for each in self.price_for(arrived)]
        return Block(self.name, tuple(_arriving(self._variant(index), each) for index, each in enumerate(priced)))

    @property
    def tangents(self) -> list[int]:
        """Bytes of the gradients that its backward takes."""
        values = self.menu[0].plan.problem.graph.values
        return [value.bytes for value in values if value.kind == "tangent"]

    def _variant(self, index: int) -> Variant:
        entry = self.menu[index]
        own = plan_variant(entry.plan.problem, entry.trace)
        lower = [other.trace.saved_bytes for other in self.menu if other.trace.saved_bytes < own.forward_after]
        return replace(
            own,
            bound_seconds=min(self._bound(own.forward_after), own.seconds),
            floor_bytes=max(lower, default=0) + (1 if lower else 0),
        )

    def _bound(self, kept: int) -> float:
        """Return proved seconds that every plan takes that keeps at most `kept` bytes."""
        proofs = [e.bound * e.plan.problem.baseline.seconds for e in self.menu if (e.kept_at_most or -1) >= kept]
        return max(proofs, default=0.0)


def _arriving(planned: Variant, priced: Variant) -> Variant:
    """Return what a variant takes whose backward is given other gradients than were planned for.

    Forward does not know which gradients will come, so it keeps what was planned. What this backward does not read of
    it is taken to be there until it ends. Seconds are those of the plan, of which the rest of backward is a part.
    """
    return replace(
        priced,
        forward_peak=planned.forward_peak,
        forward_after=planned.forward_after,
        backward_after=priced.net - planned.forward_after,
        seconds=planned.seconds,
    )
