"""What is known of the code between blocks, by the blocks before and behind it.

A call shows it in one of two ways. Its tensors are watched from border to border (estimated), or all of its allocations
are recorded. What was recorded takes the place of estimates. Of several recordings the highest figures count; a
sequence that was recorded as a whole has its own figures, others are put together from pairs of neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from lowtide.step.problem import Gap
from lowtide.step.surroundings import Gaps

Runs = tuple[int, ...]
Pair = tuple[int, int]
# Before the first block and behind the last one.
EDGE = -1


class Basis(IntEnum):
    """What gaps are known from; more takes the place of less."""

    EXPECTED = 0
    """Forward was watched, and backward follows from what it has shown."""
    WATCHED = 1
    RECORDED = 2


@dataclass
class _Pairs:
    recorded: dict[Pair, Gap] = field(default_factory=dict)
    estimated: dict[Pair, Gap] = field(default_factory=dict)

    def note(self, pair: Pair, gap: Gap, *, recorded: bool) -> None:
        known = self.recorded if recorded else self.estimated
        known[pair] = highest(known.get(pair, gap), gap)

    def find(self, pair: Pair) -> Gap | None:
        return self.recorded.get(pair, self.estimated.get(pair))

    def all(self) -> list[tuple[Pair, Gap]]:
        return [*self.recorded.items(), *self.estimated.items()]


class GapBook:
    """Gaps of sequences that were seen, and of pairs of blocks for those that were not."""

    def __init__(self) -> None:
        self._forward, self._backward = _Pairs(), _Pairs()
        self._sequences: dict[Runs, tuple[Gaps, Basis]] = {}
        self._expected: dict[Runs, Gaps] = {}
        self._changes = 0

    @property
    def changes(self) -> int:
        """A number that grows with every change."""
        return self._changes

    def is_recorded(self, sequence: Runs) -> bool:
        """Return True if this very sequence was recorded."""
        return sequence in self._sequences and self._sequences[sequence][1] is Basis.RECORDED

    def was_run(self, sequence: Runs) -> bool:
        """Return True if all of this very sequence was seen to run, forward and backward."""
        return sequence in self._sequences and self._sequences[sequence][1] > Basis.EXPECTED

    def note(self, sequence: Runs, gaps: Gaps, basis: Basis) -> None:
        """Take over what a call has shown."""
        if basis is Basis.EXPECTED:
            self._expected[sequence] = gaps
        known, before = self._sequences.get(sequence, (gaps, basis))
        if before >= basis:
            gaps, basis = highest_gaps(known, gaps), before
        if self._sequences.get(sequence) == (gaps, basis):
            return
        self._sequences[sequence] = (gaps, basis)
        self._changes += 1
        recorded = basis is Basis.RECORDED
        for pair, gap in zip(pairs(sequence), gaps.forward, strict=True):
            self._forward.note(pair, gap, recorded=recorded)
        if basis is Basis.EXPECTED:
            return
        for pair, gap in zip(reversed(pairs(sequence)), gaps.backward, strict=True):
            self._backward.note(pair, gap, recorded=recorded)

    def with_room(self, sequence: Runs, gaps: Gaps, room_bytes: int) -> Gaps:
        """Return the gaps that are known of a sequence with room for what they may be short of.

        A budget was allowed because the gaps that were expected fit it with that room. What the sequence then shows
        uses the room up; it does not come on top of it.

        Args:
            sequence: The sequence.
            gaps: What is known of it.
            room_bytes: The room as long as nothing but expectations are known; what was recorded needs none.
        """
        basis = self._sequences[sequence][1] if sequence in self._sequences else Basis.EXPECTED
        if basis is Basis.RECORDED:
            return gaps
        if basis is Basis.EXPECTED or sequence not in self._expected:
            return raised(gaps, room_bytes)
        return highest_gaps(raised(self._expected[sequence], room_bytes), gaps)

    def of_sequence(self, sequence: Runs) -> Gaps | None:
        """Return the gaps of a sequence that was seen as a whole, or None."""
        return self._sequences[sequence][0] if sequence in self._sequences else None

    def forward(self, pair: Pair) -> Gap | None:
        """Return the gap between the forward passes of two blocks, or None if it was never seen."""
        return self._forward.find(pair)

    def backward(self, pair: Pair) -> Gap | None:
        """Return the gap between the backward passes of the second block and of the first one, or None."""
        return self._backward.find(pair)

    def most_behind(self, block: int) -> Gap | None:
        """Return the most that was seen before the backward of `block`, whatever block was behind it; or None."""
        seen = [gap for (first, _), gap in self._backward.all() if first == block]
        return None if not seen else Gap(max(gap.peak for gap in seen), max(gap.after for gap in seen))


def pairs(sequence: Runs) -> list[Pair]:
    """Return the neighbours in a sequence, with its edges."""
    return list(zip((EDGE, *sequence), (*sequence, EDGE), strict=True))


def highest(one: Gap, other: Gap) -> Gap:
    """Return a gap that is at least as much as both."""
    return Gap(max(one.peak, other.peak), max(one.after, other.after))


def raised(gaps: Gaps, room_bytes: int) -> Gaps:
    """Return gaps with which every level of the step is higher by `room_bytes`."""
    first = gaps.forward[0]
    return Gaps((Gap(first.peak + room_bytes, first.after + room_bytes), *gaps.forward[1:]), gaps.backward)


def highest_gaps(one: Gaps, other: Gaps) -> Gaps:
    """Return gaps with which no level of the step is below that of either.

    Two calls may see the same bytes come and go in different gaps: a tensor that code between blocks lets go of is seen
    to die at the next border by one, and is never seen by the other. So levels are compared, and not gap by gap: the
    highest of each gap would add up what is never there at the same time.
    """
    level = mine = others = 0
    found = []
    for left, right in zip((*one.forward, *one.backward), (*other.forward, *other.backward), strict=True):
        peak, after = max(mine + left.peak, others + right.peak), max(mine + left.after, others + right.after)
        found.append(Gap(peak - level, after - level))
        level, mine, others = after, mine + left.after, others + right.after
    return Gaps(tuple(found[: len(one.forward)]), tuple(found[len(one.forward) :]))
