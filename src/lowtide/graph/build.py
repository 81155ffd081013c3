"""Building a graph step by step, and the rules every graph keeps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypedDict, Unpack

from lowtide.graph.costs import Costs
from lowtide.graph.ir import Graph, Op, Value, ValueId
from lowtide.graph.verify import check_graph


class OpMarks(TypedDict, total=False):
    """What may be said about an op beyond its name, inputs and outputs; see `Op` for the meanings."""

    target: str
    module: str
    source: str
    pinned: str
    random: bool
    replay_bytes: int
    kind: str
    once: Sequence[str]
    seconds: float
    workspace_bytes: int


class GraphBuilder:
    """Collects ops in their given order; the only mutable class of this layer.

    Example:
        ```python
        builder = GraphBuilder()
        x = builder.add_input("x", 400)
        (y,) = builder.add_op("relu", [x], [("y", 400)], seconds=2e-6)
        graph = builder.build(outputs=[y])
        ```
    """

    def __init__(self) -> None:
        self._ops: list[Op] = []
        self._values: list[Value] = []
        self._seconds: list[float] = []
        self._workspace: list[int] = []
        self._boundary: int | None = None

    def add_input(self, name: str, size: int = 0, *, kind: str = "input") -> ValueId:
        """Add a value that is there before the step, and return its id."""
        self._values.append(Value(name, size, None, kind))
        return len(self._values) - 1

    def add_op(
        self,
        name: str,
        inputs: Sequence[ValueId],
        outputs: Sequence[tuple[str, int]],
        **marks: Unpack[OpMarks],
    ) -> tuple[ValueId, ...]:
        """Add an op that reads `inputs` and writes new values of the given names and sizes; return their ids.

        Args:
            name: Name of the op, unique in the graph.
            inputs: Ids of the values it reads.
            outputs: Name and bytes of each value it writes.
            **marks: Fields of `Op`; `kind` of the outputs; `once`, the names of outputs that only the first run
                produces; and the op's `seconds` (1 by default) and `workspace_bytes`.
        """
        op = len(self._ops)
        made = tuple(range(len(self._values), len(self._values) + len(outputs)))
        kind = marks.get("kind", "activation")
        self._values += [Value(value_name, size, op, kind) for value_name, size in outputs]
        once = tuple(value for value in made if self._values[value].name in marks.get("once", ()))
        self._ops.append(
            Op(
                name,
                marks.get("target", name),
                tuple(inputs),
                made,
                module=marks.get("module", ""),
                source=marks.get("source", ""),
                pinned=marks.get("pinned", ""),
                random=marks.get("random", False),
                replay_bytes=marks.get("replay_bytes", 0),
                first_run_only=once,
            )
        )
        self._seconds.append(marks.get("seconds", 1.0))
        self._workspace.append(marks.get("workspace_bytes", 0))
        return made

    def begin_backward(self) -> None:
        """Make every op added from now on a backward op."""
        self._boundary = len(self._ops)

    def build(self, outputs: Iterable[ValueId] = (), handovers: Iterable[ValueId] = ()) -> Graph:
        """Return the graph, checked."""
        graph = Graph(tuple(self._ops), tuple(self._values), tuple(outputs), tuple(handovers), self._boundary)
        check_graph(graph)
        return graph

    def costs(self, source: str = "given") -> Costs:
        """Return the costs given with the ops."""
        return Costs(tuple(self._seconds), tuple(self._workspace), source)
