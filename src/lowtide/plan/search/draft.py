"""A schedule being edited: repeated runs are put in and taken out; first runs stay in the given order."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np

from lowtide.graph.costs import Costs
from lowtide.graph.ir import Graph, OpId, ValueId
from lowtide.plan.search.pricer import Events, Pricer
from lowtide.schedule.steps import Schedule


@dataclass(frozen=True, slots=True)
class Draft:
    """The steps of a schedule, of which the first `split` are forward."""

    steps: list[OpId]
    split: int

    @staticmethod
    def keep_all(graph: Graph) -> Draft:
        """Return the given order."""
        return Draft(list(range(len(graph.ops))), graph.num_forward)

    def schedule(self) -> Schedule:
        """Return the draft as a schedule."""
        return Schedule(tuple(self.steps[: self.split]), tuple(self.steps[self.split :]))

    def insert(self, runs: Iterable[tuple[int, list[OpId]]]) -> Draft:
        """Return the draft with ops put in before the given steps."""
        steps, split = list(self.steps), self.split
        for before, ops in sorted(runs, key=lambda run: -run[0]):
            steps[before:before] = ops
            split += len(ops) if before < self.split else 0
        return Draft(steps, split)

    def remove(self, where: Collection[int]) -> Draft:
        """Return the draft without the steps `where`."""
        steps = list(self.steps)
        for step in sorted(where, reverse=True):
            del steps[step]
        return Draft(steps, self.split - sum(step < self.split for step in where))

    def repeats(self) -> list[int]:
        """Return the steps that are not the first run of their op."""
        seen: set[OpId] = set()
        again = []
        for step, op in enumerate(self.steps):
            if op in seen:
                again.append(step)
            seen.add(op)
        return again


class Facts:
    """What the search asks about a graph all the time, as plain lists.

    Attributes:
        reads: For every op, the values it reads that some op produces.
        writes: For every op, the values that a repeated run of it writes.
        producer: For every value, the op that produces it, or -1.
        bytes: For every value, its size.
        seconds: For every op, its time.
        workspace: For every op, the bytes it needs only while it runs.
        held: For every value, whether it is an output of the graph.
        lasting: For every value, whether it cannot be made again.
        droppable: For every value, whether dropping it can free bytes.
        rerun_bytes: For every value, the bytes that running its producer again makes.
        rerun_seconds: For every value, the time of its producer.
        sliver: The least seconds that a run counts in scores.
    """

    def __init__(self, graph: Graph, costs: Costs) -> None:
        values = graph.values
        self.producer: list[OpId] = [-1 if value.producer is None else value.producer for value in values]
        self.reads = [[v for v in dict.fromkeys(op.inputs) if self.producer[v] >= 0] for op in graph.ops]
        self.writes = [list(graph.produced(op)) for op in range(len(graph.ops))]
        self.bytes = [value.bytes for value in values]
        self.seconds = list(costs.seconds)
        self.workspace = list(costs.workspace_bytes)
        self.held = [value in graph.held for value in range(len(values))]
        self.lasting = [self._is_lasting(graph, value) for value in range(len(values))]
        self.droppable = np.array(
            [value.bytes > 0 and not self.lasting[v] and not self.held[v] for v, value in enumerate(values)],
            dtype=np.bool_,
        )
        self.rerun_bytes = np.array(
            [sum(self.bytes[u] for u in self.writes[op]) if op >= 0 else 0 for op in self.producer], dtype=np.float64
        )
        self.rerun_seconds = np.array([costs.seconds[op] if op >= 0 else 0.0 for op in self.producer])
        # Free recomputation would win against everything, so a run never counts less than a sliver of the average op.
        self.sliver = 1e-6 * sum(self.seconds) / max(1, len(self.seconds)) + 1e-30

    def _is_lasting(self, graph: Graph, value: ValueId) -> bool:
        producer = self.producer[value]
        return producer < 0 or bool(graph.ops[producer].pinned) or value in graph.ops[producer].first_run_only

    def total_seconds(self, draft: Draft) -> float:
        """Return the time of all steps of `draft`."""
        return sum(map(self.seconds.__getitem__, draft.steps))


def strip(facts: Facts, pricer: Pricer, draft: Draft, tags: list[int] | None = None) -> tuple[Draft, Events]:
    """Return `draft` without the repeated runs of which nothing is read in the end, and its events.

    If `tags`, one for every step, are given, those of the steps that go are taken out of the list too.
    """
    events = pricer.events(draft.steps, draft.split)
    idle = _idle(facts, draft, events)
    if not idle:
        return draft, events
    draft = draft.remove(idle)
    if tags is not None:
        for step in sorted(idle, reverse=True):
            del tags[step]
    return draft, pricer.events(draft.steps, draft.split)


def _idle(facts: Facts, draft: Draft, events: Events) -> set[int]:
    """Return the repeated runs that only feed other repeated runs of which nothing is read, and those themselves."""
    found: list[int] = np.flatnonzero(events.again & ~events.useful).tolist()
    if not found:
        return set()
    instance = np.cumsum(events.write) - 1
    maker = events.step[np.flatnonzero(events.write)]
    # For every step, how many reads find something that it wrote.
    reads = np.bincount(maker[instance[~events.write]], minlength=len(draft.steps))
    for step in found:
        for value in facts.reads[draft.steps[step]]:
            low, high = np.searchsorted(events.value, (value, value + 1))
            event = low + np.searchsorted(events.step[low:high], step)
            before = int(maker[instance[event]])
            reads[before] -= 1
            if not reads[before] and events.again[before]:
                found.append(before)
    return set(found)
