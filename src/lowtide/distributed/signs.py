"""What a rank trains with, shown to its neighbours: who has another budget or another graph is told so.

It is no error: ranks whose graphs do not communicate plan for themselves. But it is rarely meant, and the slowest rank
decides how long a step takes. Every rank looks at the two next to it, so that where not all are alike some two see it,
however many there are.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import count

from lowtide.pytorch.process_groups import num_ranks, rank, shared_store

_numbers = count()


@dataclass(frozen=True, slots=True)
class Sign:
    """What one rank trains a model with.

    Attributes:
        budget: The budget, as the user gave it.
        planner: The planner.
        num_ops: How many ops the model's first graph has.
        fingerprint: The fingerprint of that graph.
    """

    budget: str
    planner: str
    num_ops: int
    fingerprint: str

    def difference(self, other: Sign, other_rank: int) -> str | None:
        """Return what another rank has that this one has not, a sentence; None if they are alike."""
        if self.budget != other.budget:
            what = f"a budget of {other.budget}, this rank {rank()} one of {self.budget}"
        elif self.planner != other.planner:
            what = f"planner {other.planner}, this rank {rank()} {self.planner}"
        elif self.fingerprint != other.fingerprint:
            what = (
                f"another graph ({other.num_ops} ops, fingerprint {other.fingerprint}) than this rank {rank()} "
                f"({self.num_ops} ops, fingerprint {self.fingerprint}): its inputs have other shapes, or its model "
                "other options"
            )
        else:
            return None
        return (
            f"Rank {other_rank} trains with {what}. Each of the two has its own plan, and the slower one decides how "
            "long a step takes. Give all ranks the same."
        )


class ShownSign:
    """A sign that the neighbours can read.

    Args:
        sign: The sign. Models are told apart by the order in which they are first trained.
    """

    # A neighbour that has not shown its own by the call of this number trains on its own.
    _MOST_LOOKS = 8

    def __init__(self, sign: Sign) -> None:
        self._sign, self._number = sign, next(_numbers)
        here, ranks = rank(), num_ranks()
        self._waiting = {each % ranks for each in (here - 1, here + 1)} - {here}
        self._looks = 0
        store = shared_store()
        if store is not None:
            store.put(f"signs/{self._number}/{here}", json.dumps(asdict(sign)))

    def differences(self) -> list[str]:
        """Return what neighbours that have shown their signs since the last look have otherwise."""
        store = shared_store() if self._waiting else None
        if store is None:
            return []
        self._looks += 1
        found: list[str] = []
        for each in sorted(self._waiting):
            text = store.get(f"signs/{self._number}/{each}")
            if text is not None:
                self._waiting.discard(each)
                different = self._sign.difference(Sign(**json.loads(text)), each)
                found += [] if different is None else [different]
        if self._looks == self._MOST_LOOKS:
            self._waiting.clear()
        return found
