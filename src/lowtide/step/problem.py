"""The nouns: variants of a block, the code between blocks, and the step in which one variant per block is chosen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.errors import InvalidInputError
from lowtide.step.policy import POLICY

Choice = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Variant:
    """One plan of a block; bytes are relative to the level when its forward or its backward begins.

    Attributes:
        forward_peak: Highest level inside forward.
        forward_after: What forward leaves: saved values and outputs.
        backward_peak: Highest level inside backward.
        backward_after: What backward adds; usually negative, since it frees what was saved.
        seconds: Time of recomputation.
        bound_seconds: No plan of the block that leaves from `floor_bytes` to `forward_after` recomputes for less.
        floor_bytes: The least `forward_after` for which `bound_seconds` is charged.
    """

    forward_peak: int
    forward_after: int
    backward_peak: int
    backward_after: int
    seconds: float
    bound_seconds: float
    floor_bytes: int

    def __post_init__(self) -> None:
        """Check that the figures can be those of a plan."""
        if not 0 <= self.floor_bytes <= self.forward_after <= self.forward_peak:
            raise InvalidInputError(
                f"Forward leaves {self.forward_after} bytes; this must be from the floor {self.floor_bytes}, which is "
                f"not negative, to its peak {self.forward_peak}."
            )
        _check_peak("A backward", self.backward_peak, self.backward_after)
        if not (0 <= self.bound_seconds <= self.seconds and math.isfinite(self.seconds)):
            raise InvalidInputError(
                f"A variant takes {self.seconds} s and at least {self.bound_seconds} s; times must be finite, not "
                "negative, and not below their bound."
            )

    @property
    def net(self) -> int:
        """What forward and backward together leave."""
        return self.forward_after + self.backward_after


@dataclass(frozen=True, slots=True)
class Block:
    """A block and its menu.

    Attributes:
        name: The block, for people.
        variants: What it may be.
        as_run: Whether peaks are those that runs have shown, and not those that follow from the plans.
    """

    name: str
    variants: tuple[Variant, ...]
    as_run: bool = False

    def __post_init__(self) -> None:
        """Check that there is something to choose."""
        if not self.variants:
            raise InvalidInputError(f"Block {self.name!r} has no variants; it needs at least one.")


@dataclass(frozen=True, slots=True)
class Gap:
    """What the code between two blocks does to the level: the highest and the last, relative to its beginning."""

    peak: int
    after: int

    def __post_init__(self) -> None:
        """Check that the peak is one."""
        _check_peak("A gap", self.peak, self.after)


def with_scalars(forward_gaps: Sequence[Gap]) -> tuple[Gap, ...]:
    """Return the gaps of forward with room for scalars: conditions, losses, the gradient that backward begins with."""
    room = POLICY.scalar_bytes
    first = Gap(forward_gaps[0].peak + room, forward_gaps[0].after + room)
    return (first, *forward_gaps[1:])


def holding(forward_gaps: Sequence[Gap], held_bytes: int) -> tuple[Gap, ...]:
    """Return the gaps of forward with so many bytes more, which are let go of when forward has ended."""
    first, *others = forward_gaps
    raised = (Gap(first.peak + held_bytes, first.after + held_bytes), *others)
    return (*raised[:-1], Gap(raised[-1].peak, raised[-1].after - held_bytes))


@dataclass(frozen=True, slots=True)
class StepProblem:
    """A training step: the instances run forward in order, then backward in reverse.

    Attributes:
        blocks: The distinct blocks.
        instances: Which block each instance runs.
        forward_gaps: Gap k is before the forward of instance k, the last one after all of them.
        backward_gaps: Gap 0 is before the backward of the last instance, the last one after that of instance 0.
        budget_bytes: What no level may exceed; the level is 0 when the step begins.
        fixed: The variants already chosen, None where free; empty if all are free.
    """

    blocks: tuple[Block, ...]
    instances: tuple[int, ...]
    forward_gaps: tuple[Gap, ...]
    backward_gaps: tuple[Gap, ...]
    budget_bytes: int
    fixed: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        """Check that the parts fit each other."""
        self._check_instances()
        self._check_fixed()
        for what, gaps in (("forward", self.forward_gaps), ("backward", self.backward_gaps)):
            if len(gaps) != len(self.instances) + 1:
                raise InvalidInputError(
                    f"There are {len(gaps)} {what} gaps for {len(self.instances)} instances; one more than instances "
                    "is needed."
                )

    def _check_instances(self) -> None:
        if not self.instances:
            raise InvalidInputError("The step has no instances; it needs at least one.")
        for instance, block in enumerate(self.instances):
            if not 0 <= block < len(self.blocks):
                raise InvalidInputError(
                    f"Instance {instance} runs block {block}; blocks are 0 to {len(self.blocks) - 1}."
                )

    def _check_fixed(self) -> None:
        if self.fixed and len(self.fixed) != len(self.instances):
            raise InvalidInputError(
                f"There are {len(self.fixed)} fixed variants for {len(self.instances)} instances; give one for each, "
                "or none."
            )
        for instance, variant in enumerate(self.fixed):
            if variant is not None and not 0 <= variant < len(self.menu(instance)):
                raise InvalidInputError(
                    f"Instance {instance} is fixed to variant {variant}; its block has "
                    f"{len(self.menu(instance))} variants."
                )

    def menu(self, instance: int) -> tuple[Variant, ...]:
        """Return the variants of the block of `instance`."""
        return self.blocks[self.instances[instance]].variants

    def allowed(self, instance: int) -> tuple[int, ...]:
        """Return the variants that `instance` may still have."""
        fixed = self.fixed[instance] if self.fixed else None
        return tuple(range(len(self.menu(instance)))) if fixed is None else (fixed,)


def _check_peak(what: str, peak: int, after: int) -> None:
    if peak < max(0, after):
        raise InvalidInputError(f"{what} ends at {after} bytes and peaks at {peak}; the peak is at least both ends.")
