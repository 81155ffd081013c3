"""What the search asks about a graph all the time, as plain lists."""

from __future__ import annotations

import numpy as np

from lowtide.graph.costs import Costs
from lowtide.graph.ir import Graph, OpId, ValueId


class ProblemArrays:
    """A graph and its costs in the search's terms.

    Three things of the graph become reads and writes like any other, so that an edited schedule needs no rules for
    them. The generator state of an op that may be replayed is a value: the first run writes it, repeated runs read it,
    and it takes no room unless one does. A handover is read by the last op of forward, an output of backward by the
    last op of all; until then it may be dropped.

    Attributes:
        num_ops: Number of ops.
        num_values: Number of values of the graph; generator states are numbered from here.
        boundary: Number of forward ops.
        reads: For every op, the values it reads that some op produces.
        writes: For every op, the values that a repeated run of it writes.
        first_reads: For every op, what its first run reads.
        first_writes: For every op, what its first run writes.
        again_reads: For every op, what a repeated run reads.
        producer: For every value, the op that produces it, or -1.
        bytes: For every value, its size.
        seconds: For every op, its time.
        extra: For every op, the bytes that its first run needs only while it runs.
        again_extra: For every op, the bytes that a repeated run needs only while it runs.
        held: For every value, whether it is an output of forward: it stays from the end of forward on.
        pinned: For every op, whether it must not run again.
        lasting: For every value, whether it cannot be made again.
        droppable: For every value, whether dropping it can free bytes.
        rerun_bytes: For every value, the bytes that running its producer again makes.
        rerun_seconds: For every value, the time of its producer.
        sliver: The least seconds that a run counts in scores.
    """

    def __init__(self, graph: Graph, costs: Costs) -> None:
        ops, values = graph.ops, graph.values
        self.num_ops, self.num_values, self.boundary = len(ops), len(values), graph.num_forward
        self.producer: list[OpId] = [-1 if value.producer is None else value.producer for value in values]
        self.bytes = [value.bytes for value in values]
        self.seconds = list(costs.seconds)
        self.extra = list(costs.workspace_bytes)
        self.again_extra = [workspace + op.replay_bytes for workspace, op in zip(self.extra, ops, strict=True)]
        self.held = [value in graph.held and 0 <= self.producer[value] < self.boundary for value in range(len(values))]
        self.pinned = [bool(op.pinned) for op in ops]
        self.reads, self.writes = graph.reads, graph.rewrites
        self.lasting = [self._is_lasting(graph, value) for value in range(len(values))]
        self._add_states(graph)
        self._add_ends(graph)
        self.droppable = np.array(
            [size > 0 and not self.lasting[v] and not self.held[v] for v, size in enumerate(self.bytes)], dtype=np.bool_
        )
        sizes = [sum(self.bytes[v] for v in written) for written in self.writes]
        self.rerun_bytes = np.array([sizes[op] if op >= 0 else 0 for op in self.producer], dtype=np.float64)
        self.rerun_seconds = np.array([self.seconds[op] if op >= 0 else 0.0 for op in self.producer])
        # Free recomputation would win against everything, so a run never counts less than a sliver of the average op.
        self.sliver = 1e-6 * sum(self.seconds) / max(1, len(self.seconds)) + 1e-30

    def _add_states(self, graph: Graph) -> None:
        self.first_reads = [list(read) for read in self.reads]
        self.again_reads = [list(read) for read in self.reads]
        self.first_writes = [list(op.outputs) for op in graph.ops]
        for op, fact in enumerate(graph.ops):
            if fact.replay_bytes:
                state = len(self.bytes)
                self.bytes.append(fact.replay_bytes)
                self.producer.append(op)
                self.held.append(False)
                self.lasting.append(True)
                self.first_writes[op].append(state)
                self.again_reads[op].append(state)

    def _add_ends(self, graph: Graph) -> None:
        outputs = [value for value in graph.outputs if self.producer[value] >= self.boundary]
        for last, values in ((self.boundary - 1, graph.handovers), (self.num_ops - 1, outputs)):
            for value in dict.fromkeys(values):
                if 0 <= self.producer[value] < last and value not in self.first_reads[last]:
                    self.first_reads[last].append(value)

    def _is_lasting(self, graph: Graph, value: ValueId) -> bool:
        producer = self.producer[value]
        return producer < 0 or bool(graph.ops[producer].pinned) or value in graph.ops[producer].first_run_only
