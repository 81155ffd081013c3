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
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from lowtide.errors import InvalidOptionError
from lowtide.graph.ir import Graph, OpId, ValueId
from lowtide.schedule.steps import Schedule

Pair = tuple[ValueId, ValueId]

_ELEMENT_WISE = frozenset(
    "abs add addcdiv addcmul ceil celu clamp clamp_max clamp_min clone cos div elu elu_backward erf exp exp2 expm1 "
    "floor gelu gelu_backward hardsigmoid hardsigmoid_backward hardswish hardswish_backward hardtanh hardtanh_backward "
    "leaky_relu leaky_relu_backward log log1p maximum minimum mish mish_backward mul neg pow reciprocal relu relu6 "
    "round rsqrt rsub sigmoid sigmoid_backward sign silu silu_backward sin softplus softplus_backward sqrt square sub "
    "tanh tanh_backward threshold threshold_backward".split()
)


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


@dataclass(slots=True)
class _Instance:
    """One storage of a value: its size, the uses still to come, and the buffer it lies in, if any."""

    value: ValueId
    bytes: int
    uses: int = 0
    buffer: int | None = None


_Touched = dict[ValueId, _Instance]


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
    outside = frozenset(external)
    arena = _Arena(match_range if reuse is Reuse.SHARING else 0)
    steps, handed_over = _touched(graph, schedule, outside)
    for step, (op, reads, writes) in enumerate(steps):
        for source, target in pairs.get(op, ()):
            _hand_over(reads.get(source), writes.get(target))
        for instance in sorted(writes.values(), key=lambda made: -made.bytes):
            if instance.buffer is None:
                instance.buffer = arena.allocate(instance.bytes)
        for instance in reads.values():
            _use(arena, instance)
        for instance in writes.values():
            if not instance.uses:
                arena.release(instance)
        if step == len(schedule.forward) - 1:
            for instance in handed_over:
                _use(arena, instance)
    return sum(arena.sizes)


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


class _Arena:
    """The buffers, and those of them that are free, by size."""

    def __init__(self, match_range: int) -> None:
        self.sizes: list[int] = []
        self._match_range = match_range
        self._free: list[tuple[int, int]] = []

    def allocate(self, size: int) -> int:
        """Return a buffer of at least `size` bytes: the smallest free one that suffices, else the largest, grown."""
        place = bisect_left(self._free, (size, -1))
        if place < len(self._free) and self._free[place][0] <= size * self._match_range:
            return self._free.pop(place)[1]
        if self._match_range and place and self._free[place - 1][0] >= size // self._match_range:
            buffer = self._free.pop(place - 1)[1]
            self.sizes[buffer] = size
            return buffer
        self.sizes.append(size)
        return len(self.sizes) - 1

    def release(self, instance: _Instance) -> None:
        """Make the buffer of `instance` free for later values, if this arena shares buffers."""
        if self._match_range and instance.buffer is not None:
            insort(self._free, (self.sizes[instance.buffer], instance.buffer))


def _hand_over(source: _Instance | None, target: _Instance | None) -> None:
    """Give the buffer of `source` to `target` if this is its last use and the sizes are equal."""
    if source is None or target is None or source.buffer is None or target.buffer is not None:
        return
    if source.uses == 1 and target.uses and source.bytes == target.bytes:
        target.buffer, source.buffer, source.uses = source.buffer, None, 0


def _use(arena: _Arena, instance: _Instance) -> None:
    """Count one use of `instance`, and free its buffer after the last one."""
    if instance.uses:
        instance.uses -= 1
        if not instance.uses:
            arena.release(instance)


def _touched(
    graph: Graph, schedule: Schedule, outside: frozenset[ValueId]
) -> tuple[list[tuple[OpId, _Touched, _Touched]], list[_Instance]]:
    """Return each step's op with the instances it reads and writes, and the instances held until forward ends.

    Outputs of the graph have a use that never comes.
    """
    current: _Touched = {}
    owner: _Touched = {}
    ran: set[OpId] = set()
    steps = []
    for step, op in enumerate(schedule.steps):
        reads = {value: current[value] for value in graph.ops[op].inputs if value in current}
        for instance in reads.values():
            instance.uses += 1
        writes = {value: _Instance(value, graph.values[value].bytes) for value in _made(graph, op, ran, outside)}
        current.update(writes)
        if step < len(schedule.forward) or not graph.is_forward(op):
            owner.update(writes)
        ran.add(op)
        steps.append((op, reads, writes))
    held = [owner[value] for value in graph.outputs if value in owner]
    handed_over = [owner[value] for value in graph.handovers if value in owner]
    for instance in (*held, *handed_over):
        instance.uses += 1
    return steps, handed_over


def _made(graph: Graph, op: OpId, ran: set[OpId], outside: frozenset[ValueId]) -> Iterator[ValueId]:
    """Yield the values that a run of `op` makes inside the arena."""
    made = graph.produced(op) if op in ran else graph.ops[op].outputs
    return (value for value in made if value not in outside)
