"""Views of a training graph: its forward DAG, and the chain of its cut points."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property

from lowtide.graph.costs import Costs
from lowtide.graph.ir import Graph, OpId, ValueId

# Which values are ambient. A mask or a table of positions is far below 1 % of what forward makes, and is read by all
# layers; a skip connection is larger, or does not span an eighth of forward. Keeping all ambient values costs at most
# 5 % of the bytes.
_AMBIENT_EACH = 0.01
_AMBIENT_ALL = 0.05
_AMBIENT_SPAN = 8
# In a short forward pass an eighth is a few ops, which a residual block spans too.
_LEAST_AMBIENT_SPAN = 16


def values_for_backward(graph: Graph) -> tuple[ValueId, ...]:
    """Return the values that forward ops produce and backward ops read, in the order in which they are produced."""
    return tuple(value for op in graph.forward for value in graph.ops[op].outputs if _read_by_backward(graph, value))


def ambient_values(graph: Graph) -> frozenset[ValueId]:
    """Return small values that forward reads far from where they are made, such as an attention mask.

    They would hide the chain of a network all of whose layers read them, and cost next to nothing to keep. Small is at
    most 1 % of the bytes that forward makes, and 5 % together; far is more than 16 ops and an eighth of forward.
    """
    total = sum(graph.values[value].bytes for op in graph.forward for value in graph.ops[op].outputs)
    reach = max(_LEAST_AMBIENT_SPAN, graph.num_forward // _AMBIENT_SPAN)
    far = [
        value
        for op in graph.forward
        for value in graph.ops[op].outputs
        if _last_forward_reader(graph, value) - op > reach and graph.values[value].bytes <= _AMBIENT_EACH * total
    ]
    ambient, room = set(), _AMBIENT_ALL * total
    for value in sorted(far, key=lambda value: graph.values[value].bytes):
        room -= graph.values[value].bytes
        if room < 0:
            break
        ambient.add(value)
    return frozenset(ambient)


def cut_points(graph: Graph, ignored: Collection[ValueId] = ()) -> tuple[tuple[OpId, ValueId], ...]:
    """Return the places in forward where one value separates all before from all after.

    Each is an op and a value: when the op has run, that value is the only one produced so far that a later forward op
    reads. Inputs of the graph and the values in `ignored` do not count, for they are always there. A value that is the
    only one after several ops is listed once, with the first of them.
    """
    last_reader = [_last_forward_reader(graph, value) for value in range(len(graph.values))]
    crossing: set[ValueId] = set()
    cuts: list[tuple[OpId, ValueId]] = []
    for op in graph.forward:
        crossing.difference_update([value for value in graph.ops[op].inputs if last_reader[value] == op])
        crossing.update(value for value in graph.ops[op].outputs if last_reader[value] > op and value not in ignored)
        if len(crossing) == 1:
            (value,) = crossing
            if not cuts or cuts[-1][1] != value:
                cuts.append((op, value))
    return tuple(cuts)


@dataclass(frozen=True, slots=True)
class Link:
    """A piece of the forward pass between two cut points.

    Attributes:
        ops: Its ops, consecutive in the given order.
        value: The value that later links read, or None for the last link.
        bytes: Size of that value; 0 for the last link.
        inside_bytes: Bytes of the other values made here that backward reads.
        seconds: Time of its ops.
    """

    ops: range
    value: ValueId | None
    bytes: int
    inside_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Chain:
    """The forward pass as a row of links, each of which reads only the value of the one before it.

    Attributes:
        graph: The graph it is a view of.
        links: The links in order; the last one ends forward and has no value.
        ambient: Values that many links read and that every schedule made from this view keeps.
    """

    graph: Graph
    links: tuple[Link, ...]
    ambient: frozenset[ValueId]

    def kept(self, checkpoints: Iterable[int]) -> set[ValueId]:
        """Return the values to keep if the links in `checkpoints` keep their value and the rest is recomputed.

        Backward begins with what follows the last checkpoint, so recomputing that would free nothing: it is kept.
        """
        chosen = sorted(set(checkpoints))
        kept = {value for k in chosen if (value := self.links[k].value) is not None} | self.ambient
        first = chosen[-1] + 1 if chosen else 0
        kept.update(value for link in self.links[first:] for op in link.ops for value in self.graph.ops[op].outputs)
        return kept


def chain_of(graph: Graph, costs: Costs) -> Chain:
    """Return the chain of `graph`: its forward pass cut at every cut point."""
    ambient = ambient_values(graph)
    cuts = cut_points(graph, ambient)
    links, start = [], 0
    for op, value in cuts:
        links.append(_link(graph, costs, range(start, op + 1), value))
        start = op + 1
    links.append(_link(graph, costs, range(start, graph.num_forward), None))
    return Chain(graph, tuple(links), ambient)


def _link(graph: Graph, costs: Costs, ops: range, value: ValueId | None) -> Link:
    inside = sum(
        graph.values[made].bytes
        for op in ops
        for made in graph.ops[op].outputs
        if made != value and _read_by_backward(graph, made)
    )
    size = 0 if value is None else graph.values[value].bytes
    return Link(ops, value, size, inside, sum(costs.seconds[op] for op in ops))


@dataclass(frozen=True)
class ForwardDag:
    """The forward pass as a DAG with one vertex per forward op; vertices are numbered in the given order.

    Attributes:
        graph: The graph it is a view of.
        bytes: For every vertex, the bytes of all values its op makes.
        seconds: For every vertex, the time of its op.
        predecessors: For every vertex, the vertices whose values its op reads, ascending.
        needed: For every vertex, True if backward reads a value that its op makes.
    """

    graph: Graph
    bytes: tuple[int, ...]
    seconds: tuple[float, ...]
    predecessors: tuple[tuple[int, ...], ...]
    needed: tuple[bool, ...]

    def __len__(self) -> int:
        return len(self.bytes)

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """For every vertex, the vertices whose ops read a value of its op, ascending."""
        found: list[list[int]] = [[] for _ in self.bytes]
        for vertex, before in enumerate(self.predecessors):
            for other in before:
                found[other].append(vertex)
        return tuple(tuple(after) for after in found)

    def kept(self, vertices: Iterable[int]) -> set[ValueId]:
        """Return the values made by the ops of `vertices`."""
        return {value for vertex in vertices for value in self.graph.ops[vertex].outputs}


def forward_dag_of(graph: Graph, costs: Costs) -> ForwardDag:
    """Return the forward DAG of `graph`."""
    producers = [value.producer for value in graph.values]
    ops = [graph.ops[op] for op in graph.forward]
    return ForwardDag(
        graph=graph,
        bytes=tuple(sum(graph.values[value].bytes for value in op.outputs) for op in ops),
        seconds=tuple(costs.seconds[op] for op in graph.forward),
        predecessors=tuple(
            tuple(sorted({made for value in op.inputs if (made := producers[value]) is not None})) for op in ops
        ),
        needed=tuple(any(_read_by_backward(graph, value) for value in op.outputs) for op in ops),
    )


def _read_by_backward(graph: Graph, value: ValueId) -> bool:
    return any(not graph.is_forward(reader) for reader in graph.readers[value])


def _last_forward_reader(graph: Graph, value: ValueId) -> OpId:
    return max((reader for reader in graph.readers[value] if graph.is_forward(reader)), default=-1)


def has_same_ops(one: Graph, other: Graph) -> bool:
    """Return True if the ops of two graphs read and make the same values, by their numbers."""
    if len(one.ops) != len(other.ops) or len(one.values) != len(other.values) or one.boundary != other.boundary:
        return False
    return one.outputs == other.outputs and all(
        (a.inputs, a.outputs, a.random, bool(a.pinned), a.first_run_only)
        == (b.inputs, b.outputs, b.random, bool(b.pinned), b.first_run_only)
        for a, b in zip(one.ops, other.ops, strict=True)
    )
