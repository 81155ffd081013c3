"""The schedule: the order in which ops run. An op that appears again is recomputed.

Lifetimes follow from the order. Each run of an op makes new instances of its outputs; an instance lives until its last
use before the op runs again. What is alive across the boundary is saved for backward. An output of the graph is the
instance made by its op's last run in its own phase, and lives to the end of the step.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.graph.ir import Graph, OpId


@dataclass(frozen=True, slots=True)
class Schedule:
    """Ops in the order they run: the forward pass, then the backward pass."""

    forward: tuple[OpId, ...]
    backward: tuple[OpId, ...] = ()

    @property
    def steps(self) -> tuple[OpId, ...]:
        """Both passes as one sequence."""
        return self.forward + self.backward

    @property
    def num_recomputed(self) -> int:
        """Number of runs beyond the first of each op."""
        return len(self.steps) - len(set(self.steps))

    @staticmethod
    def keep_all(graph: Graph) -> Schedule:
        """Return the schedule of plain training: every op once, in the given order."""
        return Schedule(tuple(graph.forward), tuple(graph.backward))
