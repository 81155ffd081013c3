"""The graph: ops and values in one given order, with an optional boundary between forward and backward.

Ids are positions: op `k` is `graph.ops[k]` and the given order is `0, 1, 2, ...`. A value is one storage; views of it
and the unpacking of tuples are folded into it, so they cost nothing and keep it alive.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property

OpId = int
ValueId = int


@dataclass(frozen=True, slots=True)
class Value:
    """One storage.

    Attributes:
        name: Name for people.
        bytes: Size of the storage.
        producer: The op that writes it, or None for an input, which is there before the step and costs nothing.
        kind: What it is: "input", "parameter", "buffer", "activation", "gradient" or "tangent".
    """

    name: str
    bytes: int
    producer: OpId | None = None
    kind: str = "activation"


@dataclass(frozen=True, slots=True)
class Op:
    """One computation.

    Attributes:
        name: Name for people, unique in the graph.
        target: What is computed, such as "aten.mm.default".
        inputs: Values read.
        outputs: Values written.
        module: Path of the module that it belongs to.
        source: Where the user wrote it, as "file:line".
        pinned: Why it must run exactly once, or "" if it may be recomputed.
        random: True if it draws random numbers; first runs of random ops keep their given order.
        replay_bytes: Bytes of generator state kept from its first to its last run, if it runs more than once.
        first_run_only: Outputs that only the first run produces (for instance new running statistics).
    """

    name: str
    target: str
    inputs: tuple[ValueId, ...]
    outputs: tuple[ValueId, ...]
    module: str = ""
    source: str = ""
    pinned: str = ""
    random: bool = False
    replay_bytes: int = 0
    first_run_only: tuple[ValueId, ...] = ()

    @property
    def keeps_place(self) -> bool:
        """True if its first run must keep its place: it draws random numbers, or part of it runs once."""
        return bool(self.pinned or self.random or self.first_run_only)


@dataclass(frozen=True)
class Graph:
    """Ops in their given order and the values between them.

    Attributes:
        ops: All ops; the index is the op's id and its place in the given order.
        values: All values; the index is the value's id.
        outputs: Values alive until the end of the step: what the caller receives, and gradients.
        handovers: Values alive until forward ends: new contents of inputs that the step changes.
        boundary: Number of forward ops, or None if the graph has no phases.
    """

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    outputs: tuple[ValueId, ...] = ()
    handovers: tuple[ValueId, ...] = ()
    boundary: int | None = None

    @property
    def num_forward(self) -> int:
        """Number of ops in the forward phase; all of them where the graph has no phases."""
        return len(self.ops) if self.boundary is None else self.boundary

    @property
    def forward(self) -> range:
        """Ids of the forward ops in their given order."""
        return range(self.num_forward)

    @property
    def backward(self) -> range:
        """Ids of the backward ops in their given order."""
        return range(self.num_forward, len(self.ops))

    def is_forward(self, op: OpId) -> bool:
        """Return True if `op` belongs to the forward phase."""
        return op < self.num_forward

    @cached_property
    def readers(self) -> tuple[tuple[OpId, ...], ...]:
        """For every value, the ops that read it, in the given order."""
        readers: list[list[OpId]] = [[] for _ in self.values]
        for op_id, op in enumerate(self.ops):
            for value in dict.fromkeys(op.inputs):
                readers[value].append(op_id)
        return tuple(tuple(ops) for ops in readers)

    @cached_property
    def reads(self) -> tuple[tuple[ValueId, ...], ...]:
        """For every op, the values it reads that another op makes, each once."""
        values = self.values
        return tuple(tuple(v for v in dict.fromkeys(op.inputs) if values[v].producer is not None) for op in self.ops)

    @cached_property
    def rewrites(self) -> tuple[tuple[ValueId, ...], ...]:
        """For every op, the values that a repeated run of it writes."""
        return tuple(tuple(v for v in op.outputs if v not in op.first_run_only) for op in self.ops)

    @cached_property
    def always_there(self) -> frozenset[ValueId]:
        """Values that backward finds whatever is kept: inputs, outputs, and what only a first run makes."""

        def lasts(value: ValueId) -> bool:
            producer = self.values[value].producer
            if producer is None or value in self.held:
                return True
            op = self.ops[producer]
            return self.is_forward(producer) and (bool(op.pinned) or value in op.first_run_only)

        return frozenset(filter(lasts, range(len(self.values))))

    @cached_property
    def held(self) -> frozenset[ValueId]:
        """Outputs as a set."""
        return frozenset(self.outputs)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of structure and sizes, the same for graphs on which the same schedules mean the same."""
        shape = {
            "ops": [[op.target, op.inputs, op.outputs, bool(op.pinned), op.random] for op in self.ops],
            "values": [[value.bytes, value.producer] for value in self.values],
            "ends": [self.outputs, self.handovers, self.boundary],
        }
        return hashlib.sha256(json.dumps(shape, separators=(",", ":")).encode()).hexdigest()[:32]
