"""What the pieces of a graph cost in a nested schedule, taken from the graph and from two priced schedules.

One schedule keeps everything: it shows what a piece's backward takes when all is there. The other keeps the values
between pieces and recomputes the rest: it shows what a piece takes when its backward follows its recomputation at once.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from itertools import accumulate

from lowtide.graph.costs import Costs
from lowtide.graph.ir import Graph, OpId, ValueId
from lowtide.plan.planners.chain_dp.emit import recomputation, wanted
from lowtide.plan.planners.chain_dp.pieces import Pieces
from lowtide.plan.planners.chain_dp.stages import Stages
from lowtide.schedule.expand import expand
from lowtide.schedule.simulate import Instance, instances
from lowtide.schedule.steps import Schedule


def profile(pieces: Pieces, costs: Costs) -> Stages:
    """Return the figures of `pieces`; values that are kept whatever is planned count as gradients do."""
    graph, n = pieces.graph, len(pieces)
    keeps = [wanted(pieces, k) for k in range(n)]
    before = [set(pieces.fixed) | _between(pieces, k - 1) for k in range(n)]
    passing = [recomputation(pieces, sorted(_between(pieces, k)), before[k]) for k in range(n)]
    keeping = [recomputation(pieces, keeps[k], before[k]) for k in range(n)]
    plain = _Backward(pieces, costs, Schedule.keep_all(graph))
    kept = pieces.fixed.union(*(_between(pieces, k) for k in range(n)))
    lean = _Backward(pieces, costs, expand(graph, kept))
    keep_bytes = [_most_bytes(graph, costs, keeping[k], keeps[k]) for k in range(n)]
    backward_bytes = [plain.most_bytes(k, recomputed=False) for k in range(n)]
    leaf_bytes = [lean.most_bytes(k, recomputed=True) for k in range(n - 1)]
    return Stages(
        first_seconds=tuple(_seconds(costs, piece.forward) for piece in pieces.pieces),
        pass_seconds=tuple(_seconds(costs, steps) for steps in passing),
        keep_seconds=tuple(_seconds(costs, steps) for steps in keeping),
        leaf_seconds=tuple(lean.recompute_seconds(k) for k in range(n)),
        backward_seconds=tuple(_seconds(costs, piece.backward) for piece in pieces.pieces),
        outputs=(0, *(sum(graph.values[value].bytes for value in _between(pieces, k)) for k in range(n))),
        gradients=tuple(plain.standing()),
        saved=tuple(sum(graph.values[value].bytes for value in values) for values in keeps),
        pass_bytes=tuple(_most_bytes(graph, costs, passing[k], _between(pieces, k)) for k in range(n)),
        keep_bytes=tuple(keep_bytes),
        leaf_bytes=(*leaf_bytes, max(keep_bytes[-1], backward_bytes[-1])),
        backward_bytes=tuple(backward_bytes),
    )


def _between(pieces: Pieces, layer: int) -> set[ValueId]:
    """Return the value behind a piece, or nothing if there is none or it is always there."""
    if layer < 0:
        return set()
    value = pieces.pieces[layer].value
    return set() if value is None or value in pieces.fixed else {value}


def _seconds(costs: Costs, ops: Sequence[OpId]) -> float:
    return sum(costs.seconds[op] for op in ops)


def _most_bytes(graph: Graph, costs: Costs, steps: Sequence[OpId], stay: Collection[ValueId]) -> int:
    """Return the most bytes that running `steps` takes if the values in `stay` are kept and others are freed."""
    made = {value for op in steps for value in graph.ops[op].outputs}
    last_use = {value: step for step, op in enumerate(steps) for value in graph.ops[op].outputs}
    last_use |= {value: step for step, op in enumerate(steps) for value in graph.ops[op].inputs if value in made}
    freed = [0] * len(steps)
    for value in made.difference(stay):
        freed[last_use[value]] += graph.values[value].bytes
    alive = most = 0
    for step, op in enumerate(steps):
        alive += sum(graph.values[value].bytes for value in graph.ops[op].outputs)
        most = max(most, alive + costs.workspace_bytes[op])
        alive -= freed[step]
    return most


class _Backward:
    """The backward pass of a schedule, divided into the parts of the pieces."""

    def __init__(self, pieces: Pieces, costs: Costs, schedule: Schedule) -> None:
        graph = pieces.graph
        self._pieces, self._costs, self._steps = pieces, costs, schedule.steps
        self._boundary = len(schedule.forward)
        self._parts = self._divide()
        self._made: list[list[Instance]] = [[] for _ in pieces.pieces]
        standing = []
        for instance in instances(graph, schedule):
            producer = graph.values[instance.value].producer
            assert producer is not None, "inputs have no instances"
            if not graph.is_forward(producer) or instance.value in pieces.fixed:
                standing.append(instance)
            elif instance.birth < self._boundary:
                self._made[self._piece_of(producer)].append(instance)
            else:
                self._made[self._part_of(instance.birth)].append(instance)
        # Gradients, and what is kept whatever is planned.
        self._standing = _alive(standing, range(len(self._steps)))

    def _divide(self) -> list[range]:
        """Return the steps of every piece's part; a repeated run belongs to the backward op that follows it."""
        graph = self._pieces.graph
        place = {op: step for step, op in enumerate(self._steps) if not graph.is_forward(op)}
        parts, start = [], self._boundary
        for piece in reversed(self._pieces.pieces):
            end = place[piece.backward[-1]] + 1 if piece.backward else start
            parts.append(range(start, end))
            start = end
        return parts[::-1]

    def _piece_of(self, op: OpId) -> int:
        return bisect_right(self._pieces.pieces, op, key=lambda piece: piece.forward.start) - 1

    def _part_of(self, step: int) -> int:
        return bisect_left(self._parts, -step, key=lambda part: -part.start)

    def standing(self) -> list[int]:
        """Return the bytes of gradients and fixed values alive when backward comes to the input and to each output."""
        during, freed = self._standing
        borders = [len(self._steps), *(part.start for part in self._parts)]
        return [during[step - 1] - freed[step - 1] for step in borders]

    def most_bytes(self, layer: int, *, recomputed: bool) -> int:
        """Return the most bytes during a part: gradients, fixed values, workspace, and what was made for the piece.

        That is what forward made in the piece, or, if `recomputed`, what backward made again in this part.
        """
        part = self._parts[layer]
        made = [instance for instance in self._made[layer] if (instance.birth >= self._boundary) == recomputed]
        own, _ = _alive(made, part)
        during = self._standing[0]
        return max(
            (during[step] + own[step - part.start] + self._costs.workspace_bytes[self._steps[step]] for step in part),
            default=0,
        )

    def recompute_seconds(self, layer: int) -> float:
        """Return the time of the repeated runs in a part."""
        graph = self._pieces.graph
        return _seconds(
            self._costs, [op for op in map(self._steps.__getitem__, self._parts[layer]) if graph.is_forward(op)]
        )


def _alive(found: Sequence[Instance], steps: range) -> tuple[list[int], list[int]]:
    """Return the bytes of `found` alive during each of `steps`, and those of them freed when it ends."""
    born, freed = [0] * (len(steps) + 1), [0] * (len(steps) + 1)
    for instance in found:
        first, last = max(instance.birth, steps.start), min(instance.death, steps.stop - 1)
        if first <= last:
            born[first - steps.start] += instance.bytes
            freed[last - steps.start] += instance.bytes
    alive = accumulate(new - gone for new, gone in zip(born, [0, *freed], strict=False))
    return list(alive)[: len(steps)], freed[: len(steps)]
