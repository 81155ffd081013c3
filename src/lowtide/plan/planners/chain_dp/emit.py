"""From operations on pieces to a schedule of the graph."""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.graph.ir import OpId, ValueId
from lowtide.plan.planners.chain_dp.operations import Action, Operation
from lowtide.plan.planners.chain_dp.pieces import Pieces
from lowtide.schedule.expand import missing
from lowtide.schedule.steps import Schedule


def emit(pieces: Pieces, operations: Sequence[Operation]) -> Schedule:
    """Return the schedule that `operations` mean.

    Forward runs as given. Backward runs as given; forward operations between its pieces recompute what they say, and
    whatever a backward op still misses is recomputed just before it. So every sequence of operations gives a schedule
    that may be run, and the operations decide only what is kept, and when it is recomputed.
    """
    state = _State(pieces)
    first_backward = next(k for k, operation in enumerate(operations) if operation.action is Action.BACKWARD)
    for operation in operations[:first_backward]:
        state.remember(operation)
    for place in range(first_backward, len(operations)):
        action, layer = operations[place]
        if action is Action.BACKWARD:
            state.run_backward(layer)
        else:
            # What a piece's backward reads is made just in time if that comes next: less of it is there at once.
            at_once = place + 1 < len(operations) and operations[place + 1] == (Action.BACKWARD, layer)
            state.run_forward(operations[place], just_in_time=at_once)
    return Schedule(tuple(pieces.graph.forward), tuple(state.steps))


class _State:
    """Which values backward may read, and the steps of backward so far."""

    def __init__(self, pieces: Pieces) -> None:
        self.steps: list[OpId] = []
        self._pieces, self._graph = pieces, pieces.graph
        self._available = set(pieces.fixed)
        self._whole: set[int] = set()

    def remember(self, operation: Operation) -> None:
        """Note what the forward pass keeps when it carries out `operation`."""
        action, layer = operation
        if action is Action.KEEP_ALL:
            self._whole.add(layer)
            made = self._pieces.pieces[layer].forward
            self._available.update(value for op in made for value in self._graph.ops[op].outputs)
        self._settle_input(operation)

    def run_forward(self, operation: Operation, *, just_in_time: bool) -> None:
        """Recompute what `operation` says."""
        action, layer = operation
        piece = self._pieces.pieces[layer]
        if action is Action.KEEP_ALL:
            self._whole.add(layer)
            if not just_in_time:
                self._make(wanted(self._pieces, layer))
        elif piece.value is not None:
            self._make([piece.value])
        self._settle_input(operation)

    def run_backward(self, layer: int) -> None:
        """Run the backward ops of a piece."""
        for op in self._pieces.pieces[layer].backward:
            steps = missing(self._graph, op, self._available)
            self.steps += steps
            for step in steps:
                self._available.update(self._graph.ops[step].outputs)
        self._whole.discard(layer)
        if layer:
            self._forget_value(layer - 1)

    def _settle_input(self, operation: Operation) -> None:
        """Keep or forget the input of the operation's layer."""
        action, layer = operation
        if layer and action is Action.PASS:
            self._forget_value(layer - 1)
        elif layer:
            value = self._pieces.pieces[layer - 1].value
            assert value is not None, "only the last piece has no value"
            self._available.add(value)

    def _forget_value(self, layer: int) -> None:
        value = self._pieces.pieces[layer].value
        if layer not in self._whole and value is not None and value not in self._pieces.fixed:
            self._available.discard(value)

    def _make(self, values: Sequence[ValueId]) -> None:
        """Recompute `values`, in the given order of their ops."""
        steps = recomputation(self._pieces, values, self._available)
        self.steps += steps
        self._available.update(values)


def wanted(pieces: Pieces, layer: int) -> list[ValueId]:
    """Return the values of a piece that are worth keeping: its own value and those that backward reads."""
    graph, piece = pieces.graph, pieces.pieces[layer]
    return [
        value
        for op in piece.forward
        for value in graph.ops[op].outputs
        if value not in pieces.fixed
        and (value == piece.value or any(not graph.is_forward(reader) for reader in graph.readers[value]))
    ]


def recomputation(pieces: Pieces, values: Sequence[ValueId], available: set[ValueId]) -> list[OpId]:
    """Return the ops that make those of `values` that are not available, in their given order."""
    graph = pieces.graph
    there = set(available)
    steps: set[OpId] = set()
    for value in values:
        producer = graph.values[value].producer
        if value not in there and producer is not None:
            found = missing(graph, producer, there)
            steps.update(found)
            for step in found:
                there.update(graph.ops[step].outputs)
    return sorted(steps)
