"""Size of the arena that a static allocator needs for a schedule: the paper's baselines and the price of its plans.

Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016, section 3. Before anything runs, each
instance of a value is given a buffer, in one sweep over the steps. Three strategies: a buffer for each; an op may write
over an input that it reads last; and buffers that nothing needs any more are used again as well. Buffers never move or
split, so the arena is at least what is alive at once, and larger where sizes do not match.

Counted is what ops make: activations and gradients. Inputs of the graph, parameters, workspace and the state of random
generators are not.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from lowtide.errors import InvalidOptionError
from lowtide.graph.ir import Graph, OpId, ValueId
from lowtide.schedule.steps import Schedule

Pair = tuple[ValueId, ValueId]

_NAMES = (
    "abs add addcdiv addcmul ceil celu clamp clamp_max clamp_min clone cos div elu elu_backward erf exp exp2 expm1 "
    "floor gelu gelu_backward hardsigmoid hardsigmoid_backward hardswish hardswish_backward hardtanh hardtanh_backward "
    "leaky_relu leaky_relu_backward log log1p maximum minimum mish mish_backward mul neg pow reciprocal relu relu6 "
    "round rsqrt rsub sigmoid sigmoid_backward sign silu silu_backward sin softplus softplus_backward sqrt square sub "
    "tanh tanh_backward threshold threshold_backward"
)
_ELEMENT_WISE = frozenset(_NAMES.split())


class Reuse(Enum):
    """How buffers are used again; each value says it in a sentence."""

    NONE = "Every instance of a value has its own buffer for the whole step."
    IN_PLACE = "An op may write over an input that nothing reads after it."
    SHARING = "As in-place, and a buffer that nothing needs any more is given to a later value."


@dataclass(frozen=True, slots=True)
class InPlace:
    """Which inputs an op may write over.

    Attributes:
        pairs: For an op, the inputs that may be overwritten, each with the output that may take its buffer, in the
            order in which they are tried.
    """

    pairs: Mapping[OpId, tuple[Pair, ...]] = field(default_factory=dict)


def element_wise_pairs(graph: Graph) -> InPlace:
    """Return the pairs of the known element-wise ops of `graph`: each input with the op's one output.

    The sizes must be equal, which the allocator checks. Views are folded into their storage, so an op that reads a
    transposed view cannot be told from one that does not: these pairs are for pricing, not for execution.
    """
    pairs = {}
    for op_id, op in enumerate(graph.ops):
        namespace, _, name = op.target.partition(".")
        if namespace == "aten" and name.split(".")[0] in _ELEMENT_WISE and len(op.outputs) == 1:
            pairs[op_id] = tuple((value, op.outputs[0]) for value in dict.fromkeys(op.inputs))
    return InPlace(pairs)


def arena_bytes(
    graph: Graph,
    schedule: Schedule,
    reuse: Reuse = Reuse.SHARING,
    *,
    in_place: InPlace | None = None,
    external: Collection[ValueId] = (),
    match_range: int = 16,
) -> int:
    """Return the bytes of all buffers that a static allocator makes for `schedule`, in one sweep over its steps.

    Args:
        graph: The graph.
        schedule: A legal schedule for it.
        reuse: The strategy.
        in_place: Which inputs ops may write over; none by default.
        external: Values whose buffers the caller provides, such as gradients of parameters; they are not counted.
        match_range: A free buffer serves a value if it is at most this many times larger, or else smaller by at most
            this factor, in which case it grows.
    """
    if match_range < 1:
        raise InvalidOptionError(f"The match range is {match_range}; it must be at least 1.")
    pairs = {} if in_place is None or reuse is Reuse.NONE else _checked(graph, in_place)
    touched = _touched(graph, schedule, frozenset(external))
    arena = _Arena(touched, match_range if reuse is Reuse.SHARING else 0)
    last = len(schedule.forward) - 1
    for step, (op, reads, writes) in enumerate(zip(schedule.steps, touched.reads, touched.writes, strict=True)):
        for source, target in pairs.get(op, ()):
            arena.hand_over(_find(touched, reads, source), _find(touched, writes, target))
        arena.allocate(writes)
        arena.use(reads)
        arena.use_nothing(writes)
        if step == last:
            arena.use(touched.handed_over)
    return sum(arena.buffers)


def _checked(graph: Graph, in_place: InPlace) -> Mapping[OpId, tuple[Pair, ...]]:
    """Return the pairs, if they name inputs and outputs of their ops."""
    for op_id, pairs in in_place.pairs.items():
        if not 0 <= op_id < len(graph.ops):
            raise InvalidOptionError(f"An in-place pair names op {op_id}; ops are 0 to {len(graph.ops) - 1}.")
        op = graph.ops[op_id]
        for source, target in pairs:
            if source not in op.inputs or target not in op.outputs:
                raise InvalidOptionError(
                    f"The in-place pair ({source}, {target}) of {op.name!r} must be one of its inputs, "
                    f"{op.inputs}, and one of its outputs, {op.outputs}."
                )
    return in_place.pairs


@dataclass(frozen=True, slots=True)
class _Touched:
    """The instances of values that a schedule makes, numbered in order of birth, and when they are used.

    Attributes:
        values: The value of each instance.
        sizes: The bytes of each.
        uses: The number of steps that read it, and one more for outputs of the graph, which are never done with, and
            for values handed over when forward ends.
        reads: For every step, the instances it reads.
        writes: For every step, the instances it makes.
        handed_over: The instances that are used once more when forward ends.
    """

    values: list[ValueId]
    sizes: list[int]
    uses: list[int]
    reads: list[list[int]]
    writes: list[range]
    handed_over: list[int]


def _touched(graph: Graph, schedule: Schedule, outside: frozenset[ValueId]) -> _Touched:
    """Return what `schedule` touches, except inputs of the graph and values `outside` the arena."""
    ops = graph.ops
    values: list[ValueId] = []
    uses: list[int] = []
    reads: list[list[int]] = []
    writes: list[range] = []
    current: dict[ValueId, int] = {}
    owner: dict[ValueId, int] = {}
    ends = graph.held.union(graph.handovers)
    ran: set[OpId] = set()
    for step, op in enumerate(schedule.steps):
        read = list({current[value]: None for value in ops[op].inputs if value in current})
        for instance in read:
            uses[instance] += 1
        reads.append(read)
        own_phase = step < len(schedule.forward) or not graph.is_forward(op)
        start = len(values)
        for value in graph.rewrites[op] if op in ran else ops[op].outputs:
            if value not in outside:
                current[value] = len(values)
                if own_phase and value in ends:
                    owner[value] = len(values)
                values.append(value)
                uses.append(0)
        writes.append(range(start, len(values)))
        ran.add(op)
    handed_over = [owner[value] for value in graph.handovers if value in owner]
    for instance in (*handed_over, *(owner[value] for value in graph.outputs if value in owner)):
        uses[instance] += 1
    return _Touched(values, [graph.values[value].bytes for value in values], uses, reads, writes, handed_over)


def _find(touched: _Touched, instances: Sequence[int], value: ValueId) -> int | None:
    """Return which of `instances` is one of `value`, if any."""
    return next((instance for instance in instances if touched.values[instance] == value), None)


class _Arena:
    """Buffers, where each instance lies, how often it is still used, and which buffers are free, by size."""

    def __init__(self, touched: _Touched, match_range: int) -> None:
        self.buffers: list[int] = []
        self._sizes = touched.sizes
        self._uses = touched.uses.copy()
        self._place: list[int | None] = [None] * len(touched.sizes)
        self._match_range = match_range
        self._free: list[tuple[int, int]] = []

    def hand_over(self, source: int | None, target: int | None) -> None:
        """Give the buffer of `source` to `target` if this is its last use and the sizes are equal."""
        if source is None or target is None or self._place[target] is not None:
            return
        if self._uses[source] == 1 and self._uses[target] and self._sizes[source] == self._sizes[target]:
            self._place[target], self._uses[source] = self._place[source], 0

    def allocate(self, instances: Sequence[int]) -> None:
        """Give a buffer to each of `instances` that has none, largest first."""
        for instance in instances if len(instances) <= 1 else sorted(instances, key=lambda made: -self._sizes[made]):
            if self._place[instance] is None:
                self._place[instance] = self._buffer(self._sizes[instance])

    def use(self, instances: Sequence[int]) -> None:
        """Count one use of each instance that is still used, and free its buffer after the last."""
        for instance in instances:
            if self._uses[instance]:
                self._uses[instance] -= 1
                if not self._uses[instance]:
                    self._release(instance)

    def use_nothing(self, instances: Sequence[int]) -> None:
        """Free the buffers of new instances that nothing will use."""
        for instance in instances:
            if not self._uses[instance]:
                self._release(instance)

    def _buffer(self, size: int) -> int:
        """Return a buffer of at least `size` bytes: the smallest free one that suffices, else the largest, grown."""
        place = bisect_left(self._free, (size, -1))
        if place < len(self._free) and self._free[place][0] <= size * self._match_range:
            return self._free.pop(place)[1]
        if place and self._free[place - 1][0] >= size // self._match_range:
            buffer = self._free.pop(place - 1)[1]
            self.buffers[buffer] = size
            return buffer
        self.buffers.append(size)
        return len(self.buffers) - 1

    def _release(self, instance: int) -> None:
        """Make the buffer of `instance` free for later ones, if buffers are shared."""
        place = self._place[instance]
        if self._match_range and place is not None:
            insort(self._free, (self.buffers[place], place))
