"""Canonical strategies: a chain of lower sets, run block by block, and what the paper's model says it costs.

Forward computes block after block and then keeps only the cache: the boundaries of the sets so far. Backward takes the
blocks in reverse, recomputes what a block has dropped from the cache, and computes the gradients of the whole block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from lowtide.errors import InvalidScheduleError
from lowtide.plan.planners.kusumoto_lower_sets.dag import Dag, VertexSet


@dataclass(frozen=True)
class Strategy:
    """A chain of growing lower sets of `dag`; the last one has every vertex, and the empty set is not listed."""

    dag: Dag
    chain: tuple[VertexSet, ...]

    def __post_init__(self) -> None:
        """Check that the sets grow, are lower sets, and end with the set of all vertices."""
        before = 0
        for lower in self.chain:
            if before & ~lower or before == lower or not self.dag.is_lower(lower):
                raise InvalidScheduleError(
                    f"The set {lower:#x} after {before:#x} is not a larger lower set of the DAG; each set of a chain "
                    "must have all vertices of the one before it, and the predecessors of its own."
                )
            before = lower
        if before != self.dag.everything:
            raise InvalidScheduleError("The last set of a chain must have every vertex of the DAG.")

    @cached_property
    def blocks(self) -> tuple[VertexSet, ...]:
        """The vertices that each set adds to the one before it."""
        return tuple(lower & ~before for before, lower in zip((0, *self.chain), self.chain, strict=False))

    @cached_property
    def caches(self) -> tuple[VertexSet, ...]:
        """The vertices kept after each block: the boundaries of all sets so far."""
        kept, found = 0, []
        for lower in self.chain:
            kept |= self.dag.boundary(lower)
            found.append(kept)
        return tuple(found)

    @property
    def cache(self) -> VertexSet:
        """The vertices kept when forward has ended."""
        return self.caches[-1] if self.chain else 0

    @property
    def last_block(self) -> VertexSet:
        """The vertices of the last block, whose recomputation would free nothing."""
        return self.blocks[-1] if self.chain else 0

    @property
    def overhead(self) -> int:
        """Ticks of recomputation, the last block's included, as the paper counts."""
        return self.dag.time(self.dag.everything & ~self.cache)

    @property
    def overhead_keeping_last(self) -> int:
        """Ticks of recomputation if the last block is kept."""
        return self.dag.time(self.dag.everything & ~self.cache & ~self.last_block)

    @property
    def block_peaks(self) -> tuple[int, ...]:
        """Bytes needed for backward through each block, without liveness analysis."""
        found, cached = [], 0
        for lower, block, kept in zip(self.chain, self.blocks, self.caches, strict=True):
            found.append(self.dag.size(cached) + 2 * self.dag.size(block) + later_bytes(self.dag, lower))
            cached = kept
        return tuple(found)

    @property
    def peak_bytes(self) -> int:
        """Bytes needed, without liveness analysis."""
        return max(self.block_peaks, default=0)


def later_bytes(dag: Dag, lower: VertexSet) -> int:
    """Return what backward through `lower` holds from outside it.

    These are the gradients of the vertices that read it, and the other values that those vertices read.
    """
    reading = dag.heads(lower) & ~lower
    return dag.size(reading) + dag.size(dag.tails(reading) & ~lower)
