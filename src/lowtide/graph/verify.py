"""Checks that a graph is one: ids, producers before readers, sizes, marks and ends."""

from __future__ import annotations

from lowtide.errors import InvalidGraphError
from lowtide.graph.ir import Graph, Op, OpId, ValueId

# Sums up to twice this are exact as floats of 8 bytes, in which proofs count. It is 4 PiB.
MOST_BYTES = 2**52


def check_graph(graph: Graph) -> None:
    """Raise `InvalidGraphError` unless `graph` keeps every rule of `Graph`, `Op` and `Value`."""
    _check_values(graph)
    names: set[str] = set()
    for op_id, op in enumerate(graph.ops):
        if op.name in names:
            raise InvalidGraphError(f"Two ops are named {op.name!r}; names must be unique.")
        names.add(op.name)
        _check_op(graph, op_id, op)
    _check_ends(graph)
    total = sum(value.bytes for value in graph.values) + sum(op.replay_bytes for op in graph.ops)
    if total > MOST_BYTES:
        raise InvalidGraphError(
            f"The graph's values have {total} bytes together; at most {MOST_BYTES} can be counted exactly. "
            "Give sizes in bytes, or in a larger unit if they are made up."
        )


def _check_values(graph: Graph) -> None:
    for value_id, value in enumerate(graph.values):
        if not isinstance(value.bytes, int) or value.bytes < 0:
            raise InvalidGraphError(
                f"Value {value.name!r} has {value.bytes} bytes; sizes must be whole numbers of at least 0."
            )
        if value.producer is None:
            continue
        if not 0 <= value.producer < len(graph.ops):
            raise InvalidGraphError(
                f"Value {value.name!r} is produced by op {value.producer}, but ops are 0 to {len(graph.ops) - 1}."
            )
        if value_id not in graph.ops[value.producer].outputs:
            raise InvalidGraphError(
                f"Value {value.name!r} names op {graph.ops[value.producer].name!r} as its producer, "
                "but is not among that op's outputs."
            )


def _check_op(graph: Graph, op_id: OpId, op: Op) -> None:
    for value_id in (*op.inputs, *op.outputs):
        _check_id(graph, value_id, f"Op {op.name!r}")
    for value_id in op.inputs:
        producer = graph.values[value_id].producer
        if producer is not None and producer >= op_id:
            raise InvalidGraphError(
                f"Op {op.name!r} reads {graph.values[value_id].name!r}, which {graph.ops[producer].name!r} "
                "produces later in the given order."
            )
    for value_id in op.outputs:
        if graph.values[value_id].producer != op_id:
            raise InvalidGraphError(
                f"Op {op.name!r} writes {graph.values[value_id].name!r}, whose producer is "
                f"{graph.values[value_id].producer}, not {op_id}."
            )
    if len(set(op.outputs)) < len(op.outputs):
        raise InvalidGraphError(f"Op {op.name!r} lists an output twice.")
    if not set(op.first_run_only) <= set(op.outputs):
        raise InvalidGraphError(f"Op {op.name!r} marks a value as first_run_only that is not one of its outputs.")
    if not isinstance(op.replay_bytes, int) or op.replay_bytes < 0 or (op.replay_bytes and not op.outputs):
        raise InvalidGraphError(
            f"Op {op.name!r} keeps {op.replay_bytes} bytes for its replay; this needs at least 0 bytes and one output."
        )


def _check_ends(graph: Graph) -> None:
    if graph.boundary is not None and not 0 <= graph.boundary <= len(graph.ops):
        raise InvalidGraphError(f"The boundary is {graph.boundary}; it must lie in 0 to {len(graph.ops)}.")
    for what, ends in (("outputs", graph.outputs), ("handovers", graph.handovers)):
        for value_id in ends:
            _check_id(graph, value_id, f"The graph's list of {what}")
        if len(set(ends)) < len(ends):
            raise InvalidGraphError(f"The graph's {what} name a value twice.")
    for value_id in graph.handovers:
        producer = graph.values[value_id].producer
        if producer is not None and not graph.is_forward(producer):
            raise InvalidGraphError(
                f"Value {graph.values[value_id].name!r} is handed over when forward ends, "
                f"but the backward op {graph.ops[producer].name!r} produces it."
            )


def _check_id(graph: Graph, value_id: ValueId, owner: str) -> None:
    if not 0 <= value_id < len(graph.values):
        raise InvalidGraphError(f"{owner} names value {value_id}, but values are 0 to {len(graph.values) - 1}.")
