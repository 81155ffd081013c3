"""Graphs and costs as plain dictionaries for JSON, and back. Loading checks everything and executes nothing."""

from __future__ import annotations

import math
from collections.abc import Set
from typing import Any

from lowtide.errors import InvalidGraphError
from lowtide.graph.costs import Costs, check_costs
from lowtide.graph.ir import Graph, Op, Value
from lowtide.graph.verify import check_graph

SCHEMA_VERSION = 1
MAX_COUNT = 2_000_000
MAX_BYTES = 2**63 - 1


def graph_to_dict(graph: Graph) -> dict[str, Any]:
    """Return `graph` as lists, numbers and strings; marks that have their default are left out."""
    return {
        "schema": SCHEMA_VERSION,
        "boundary": graph.boundary,
        "outputs": list(graph.outputs),
        "handovers": list(graph.handovers),
        "values": [_value_to_dict(value) for value in graph.values],
        "ops": [_op_to_dict(op) for op in graph.ops],
    }


def graph_from_dict(data: object) -> Graph:
    """Return the graph that `data` describes; raise `InvalidGraphError` if it describes none."""
    fields = read_fields(data, "The graph", {"schema", "boundary", "outputs", "handovers", "values", "ops"})
    if fields["schema"] != SCHEMA_VERSION:
        raise InvalidGraphError(f"The graph has schema {fields['schema']!r}; this version reads {SCHEMA_VERSION}.")
    boundary = fields["boundary"]
    graph = Graph(
        ops=tuple(_op_from_dict(op, index) for index, op in enumerate(read_list(fields["ops"], "ops"))),
        values=tuple(
            _value_from_dict(value, index) for index, value in enumerate(read_list(fields["values"], "values"))
        ),
        outputs=read_ids(fields["outputs"], "outputs"),
        handovers=read_ids(fields["handovers"], "handovers"),
        boundary=None if boundary is None else read_int(boundary, "boundary"),
    )
    check_graph(graph)
    return graph


def costs_to_dict(costs: Costs) -> dict[str, Any]:
    """Return `costs` as lists, numbers and strings."""
    return {"source": costs.source, "seconds": list(costs.seconds), "workspace_bytes": list(costs.workspace_bytes)}


def costs_from_dict(data: object, graph: Graph) -> Costs:
    """Return the costs of `graph` that `data` describes; raise `InvalidGraphError` if it describes none."""
    fields = read_fields(data, "The costs", {"source", "seconds", "workspace_bytes"})
    costs = Costs(
        seconds=tuple(read_float(item, "seconds") for item in read_list(fields["seconds"], "seconds")),
        workspace_bytes=tuple(
            read_int(item, "workspace_bytes") for item in read_list(fields["workspace_bytes"], "workspace_bytes")
        ),
        source=read_str(fields["source"], "source"),
    )
    check_costs(graph, costs)
    return costs


def _value_to_dict(value: Value) -> dict[str, Any]:
    return {"name": value.name, "bytes": value.bytes, "producer": value.producer, "kind": value.kind}


def _value_from_dict(data: object, index: int) -> Value:
    what = f"Value {index}"
    fields = read_fields(data, what, {"name", "bytes", "producer", "kind"})
    producer = fields["producer"]
    return Value(
        name=read_str(fields["name"], f"{what}: name"),
        bytes=read_int(fields["bytes"], f"{what}: bytes"),
        producer=None if producer is None else read_int(producer, f"{what}: producer"),
        kind=read_str(fields["kind"], f"{what}: kind"),
    )


def _op_to_dict(op: Op) -> dict[str, Any]:
    data: dict[str, Any] = {
        "name": op.name,
        "target": op.target,
        "inputs": list(op.inputs),
        "outputs": list(op.outputs),
    }
    marks = {
        "module": op.module,
        "source": op.source,
        "pinned": op.pinned,
        "random": op.random,
        "replay_bytes": op.replay_bytes,
        "first_run_only": list(op.first_run_only),
    }
    return data | {key: mark for key, mark in marks.items() if mark}


def _op_from_dict(data: object, index: int) -> Op:
    what = f"Op {index}"
    optional = {"module", "source", "pinned", "random", "replay_bytes", "first_run_only"}
    fields = read_fields(data, what, {"name", "target", "inputs", "outputs"}, optional)
    random = fields.get("random", False)
    if not isinstance(random, bool):
        raise InvalidGraphError(f"{what}: random is {random!r}; it must be true or false.")
    return Op(
        name=read_str(fields["name"], f"{what}: name"),
        target=read_str(fields["target"], f"{what}: target"),
        inputs=read_ids(fields["inputs"], f"{what}: inputs"),
        outputs=read_ids(fields["outputs"], f"{what}: outputs"),
        module=read_str(fields.get("module", ""), f"{what}: module"),
        source=read_str(fields.get("source", ""), f"{what}: source"),
        pinned=read_str(fields.get("pinned", ""), f"{what}: pinned"),
        random=random,
        replay_bytes=read_int(fields.get("replay_bytes", 0), f"{what}: replay_bytes"),
        first_run_only=read_ids(fields.get("first_run_only", []), f"{what}: first_run_only"),
    )


def read_fields(data: object, what: str, needed: Set[str], optional: Set[str] = frozenset()) -> dict[str, Any]:
    """Return `data` if it is a dictionary with all `needed` keys and no others than the `optional` ones."""
    if not isinstance(data, dict):
        raise InvalidGraphError(f"{what} is a {type(data).__name__}; it must be an object.")
    if lacking := sorted(needed - data.keys()):
        raise InvalidGraphError(f"{what} lacks {', '.join(lacking)}.")
    if unknown := sorted(map(str, data.keys() - needed - optional)):
        raise InvalidGraphError(f"{what} has the unknown fields {', '.join(unknown[:5])}.")
    return data


def read_list(data: object, what: str) -> list[Any]:
    """Return `data` if it is a list of a sane length."""
    if not isinstance(data, list):
        raise InvalidGraphError(f"{what} is a {type(data).__name__}; it must be a list.")
    if len(data) > MAX_COUNT:
        raise InvalidGraphError(f"{what} has {len(data)} entries; at most {MAX_COUNT} are read.")
    return data


def read_ids(data: object, what: str) -> tuple[int, ...]:
    """Return `data` as a tuple if it is a list of whole numbers of at least zero."""
    return tuple(read_int(item, what) for item in read_list(data, what))


def read_int(data: object, what: str) -> int:
    """Return `data` if it is a whole number in the range of sizes and ids."""
    if isinstance(data, bool) or not isinstance(data, int) or not 0 <= data <= MAX_BYTES:
        raise InvalidGraphError(f"{what} is {data!r:.40}; it must be a whole number from 0 to 2^63 - 1.")
    return data


def read_float(data: object, what: str) -> float:
    """Return `data` if it is a finite number of at least zero."""
    if isinstance(data, bool) or not isinstance(data, int | float) or not math.isfinite(data) or data < 0:
        raise InvalidGraphError(f"{what} is {data!r:.40}; it must be a finite number of at least 0.")
    return float(data)


def read_str(data: object, what: str) -> str:
    """Return `data` if it is a string."""
    if not isinstance(data, str):
        raise InvalidGraphError(f"{what} is {data!r:.40}; it must be a string.")
    return data
