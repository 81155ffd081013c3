"""The tuned numbers of choosing variants, with what each trades."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChoicePolicy:
    """How far the search for variants goes.

    Attributes:
        byte_limit: The sum of all byte figures is at most this for the solver, else all are rounded to larger units.
            It leaves 100 GiB for each of 200 blocks exact, and a sum of products within 64 bits.
        cost_limit: The sum of the slowest variants in the solver's unit of time. Rounding one variant to it changes the
            step by a part in 10^12.
        first_width: Partial choices kept in the quick walk, which gives the second one something to prune with.
        width: Partial choices kept in the exact walk. More than these are cut, and the proof is left to CP-SAT; a walk
            of 200 blocks then takes about a second.
        slopes: Prices of a byte that are tried for the bound that prunes. A step of one block has fewer than a hundred;
            among many blocks' prices an even sample is nearly as good.
        walk_share: The share of the time that the walks may take; the rest is CP-SAT's.
        bound_share: The share of the time kept for the lower bound.
        scalar_bytes: Kept free in every step for small things that nobody watches: scalars that code between blocks
            makes, of 4 to 8 bytes, and copies of the generator's state, of 5,056 bytes, one for the call and one for a
            block that is compiled in it.
        unseen_bytes: Kept free beside them as long as a sequence of blocks was not recorded: what code between blocks
            holds is then an estimate. With 40 KB less, transformers' CTRL named a least budget that its second step
            did not keep (`benchmarks/referee.py`).
        unseen_share: No more than this share of the unplanned step is kept free for that.
    """

    byte_limit: int = 1 << 46
    cost_limit: int = 1 << 40
    first_width: int = 64
    width: int = 4000
    slopes: int = 256
    walk_share: float = 0.5
    bound_share: float = 0.4
    scalar_bytes: int = 16 * 1024
    unseen_bytes: int = 48 * 1024
    unseen_share: float = 0.01


POLICY = ChoicePolicy()
