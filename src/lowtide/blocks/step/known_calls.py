"""The sequences of blocks that calls were seen to consist of, and how a call that has begun may go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lowtide.blocks.step.gap_book import Runs
from lowtide.blocks.step.module_places import Spot

# Of a model whose calls always differ, the first ones show as much as all.
_MOST_SEQUENCES = 256


class KnownCalls:
    """What calls consist of.

    Attributes:
        last: The last sequence, or None before the first call has ended.
        explored: The sequence of the call that comes, if it was run before for that alone.
    """

    def __init__(self) -> None:
        self.last: Runs | None = None
        self.explored: Runs | None = None
        self._spots: dict[Runs, tuple[Spot | None, ...]] = {}

    def note(self, sequence: Runs, spots: Sequence[Spot | None]) -> None:
        """Note that a call has run `sequence`, of modules at `spots`."""
        self.last, self.explored = sequence, None
        if len(self._spots) < _MOST_SEQUENCES:
            self._spots[sequence] = tuple(spots)

    def expect(self, prefix: Runs, spot: Spot | None, weight: Callable[[Runs], int]) -> Runs | None:
        """Return `prefix`, which is the beginning of a call, with the heaviest rest that may follow; None if unknown.

        Args:
            prefix: The blocks that have run, and the one that comes next.
            spot: Where the module of the last one stands in a list.
            weight: What a rest holds at least.
        """
        if self.explored is not None and self.explored[: len(prefix)] == prefix:
            return self.explored
        rests: list[Runs] = []
        if self.last is not None and self.last[: len(prefix)] == prefix:
            rests.append(self.last[len(prefix) :])
        block, count = prefix[-1], prefix.count(prefix[-1])
        for sequence, spots in self._spots.items():
            places = [place for place, each in enumerate(sequence) if each == block]
            if places:
                rests.append(sequence[places[min(count, len(places)) - 1] + 1 :])
                if spot is not None:
                    rests.append(_whole_list(sequence, spots, spot, block, weight))
        return (*prefix, *max(rests, key=weight)) if rests else None


def _whole_list(
    sequence: Runs, spots: Sequence[Spot | None], spot: Spot, block: int, weight: Callable[[Runs], int]
) -> Runs:
    """Return the rest of a call in which all modules run that stand behind `block` in its list.

    Those that did not run in `sequence` are taken to consist of the blocks of the heaviest one that did.
    """
    inside = [k for k, each in enumerate(spots) if each is not None and each.container == spot.container]
    if not inside:
        return ()
    modules: dict[int, Runs] = {}
    for k, each in enumerate(spots):
        if each is not None and each.container == spot.container:
            modules[each.place] = (*modules.get(each.place, ()), sequence[k])
    heaviest = max(modules.values(), key=weight)
    own = heaviest[heaviest.index(block) + 1 :] if block in heaviest else ()
    behind = [each for place in spot.following for each in modules.get(place, heaviest)]
    return (*own, *behind, *sequence[inside[-1] + 1 :])
