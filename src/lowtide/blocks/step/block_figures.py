"""What each block of a step takes: as planned, for the gradients that come, and with what its runs took beyond that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lowtide.capture.arrived_gradients import AS_TRACED, Arrived
from lowtide.step.problem import Block, Variant
from lowtide.step.step_block import StepBlock

# A variant of a block, and what its forward and its backward took beyond their predictions.
BlockVariant = tuple[int, int]
Excess = tuple[int, int]


class BlockFigures:
    """Figures of the blocks of one model, which follow its runs.

    Args:
        blocks: The blocks, by number; whoever has the list may add to it.
    """

    def __init__(self, blocks: Sequence[StepBlock]) -> None:
        self._blocks = blocks
        self._arrived: dict[int, set[Arrived]] = {}
        self._excess: dict[BlockVariant, Excess] = {}
        self._made: dict[int, Block] = {}
        self._changes = 0

    @property
    def changes(self) -> int:
        """A number that grows with every change."""
        return self._changes

    def of(self, number: int) -> Block:
        """Return a block as the step planner sees it."""
        if number not in self._made:
            # Until a backward has shown which gradients come, all of them are expected.
            seen = self._arrived.get(number, {AS_TRACED})
            priced = [self._blocks[number].as_block(None if each == AS_TRACED else each) for each in seen]
            menus = zip(*(each.variants for each in priced), strict=True)
            variants = [_raised(_highest(each), self._excess_of((number, k))) for k, each in enumerate(menus)]
            planned = self._blocks[number].as_block()
            as_run = planned.variants != tuple(variants)
            self._made[number] = Block(planned.name, tuple(variants), as_run=as_run)
        return self._made[number]

    def was_recorded(self, run: BlockVariant) -> bool:
        """Return True if it is known what this variant takes beyond its prediction."""
        return run in self._excess

    def renew(self, number: int) -> None:
        """Make the figures of a block again: its menu has changed."""
        self._made.pop(number, None)
        self._changes += 1

    def note_arrived(self, number: int, arrived: Arrived) -> None:
        """Note which gradients the backward of a block was given."""
        seen = self._arrived.setdefault(number, set())
        if arrived not in seen:
            seen.add(arrived)
            self.renew(number)

    def note_excess(self, runs: Sequence[BlockVariant], found: Sequence[Excess], *, recorded: bool) -> None:
        """Raise the figures of the variants that took more than predicted in the runs of a call."""
        most: dict[BlockVariant, Excess] = {}
        for run, more in zip(runs, found, strict=False):
            known = most.get(run, (0, 0))
            most[run] = max(known[0], more[0]), max(known[1], more[1])
        for run, more in most.items():
            known = self._excess_of(run)
            if more != (0, 0) or (recorded and run not in self._excess):
                self._excess[run] = known[0] + more[0], known[1] + more[1]
                self.renew(run[0])

    def clear(self) -> None:
        """Forget everything: the blocks are gone."""
        for known in (self._made, self._arrived, self._excess):
            known.clear()
        self._changes += 1

    def _excess_of(self, run: BlockVariant) -> Excess:
        """Return what a variant took beyond its prediction; before it was recorded, the most of any of its block."""
        known: Mapping[BlockVariant, Excess] = self._excess
        if run in known:
            return known[run]
        others = [more for (block, _), more in known.items() if block == run[0]]
        return max((more[0] for more in others), default=0), max((more[1] for more in others), default=0)


def _highest(variants: Sequence[Variant]) -> Variant:
    """Return the figures of a variant that needs at least as much as each of these."""
    return replace(
        variants[0],
        forward_peak=max(each.forward_peak for each in variants),
        forward_after=max(each.forward_after for each in variants),
        backward_peak=max(each.backward_peak for each in variants),
        backward_after=max(each.backward_after for each in variants),
        bound_seconds=min(each.bound_seconds for each in variants),
        floor_bytes=min(each.floor_bytes for each in variants),
    )


def _raised(variant: Variant, more: Excess) -> Variant:
    forward, backward = variant.forward_peak + more[0], variant.backward_peak + more[1]
    return replace(variant, forward_peak=forward, backward_peak=backward)
