"""A training step written from its forward ops; an op's kind says what its gradient reads and what it may overwrite.

Gradients of a value that several ops read are added up. Seconds are estimates for the device of Chen et al. 2016:
arithmetic or memory traffic, whichever takes longer, and a little to start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.graph.build import GraphBuilder
from lowtide.graph.costs import Costs
from lowtide.graph.ir import Graph, OpId, ValueId
from lowtide.schedule.arena import InPlace, Pair

FLOAT_BYTES = 4

# NVIDIA GeForce GTX Titan X: 3,072 cores x 2 operations at 1 GHz, 336.5 GB/s; and the shares that large ops reach.
_FLOPS_PER_SECOND = 0.6 * 6.144e12
_BYTES_PER_SECOND = 0.8 * 336.5e9
_STARTING_SECONDS = 5e-6


@dataclass(frozen=True, slots=True)
class Kind:
    """What all ops of a kind share.

    Attributes:
        target: The op's target.
        gradient: The target of its gradient op, or "" if gradients pass through unchanged.
        reads_inputs: Whether the gradient op reads the op's inputs.
        reads_outputs: Whether the gradient op reads the op's outputs.
        over: Positions of the inputs that the op may write over.
        gradient_over: Whether the gradient op may write over the gradient it reads.
        sweeps: How often the op goes over its inputs and outputs.
    """

    target: str
    gradient: str = ""
    reads_inputs: bool = False
    reads_outputs: bool = False
    over: tuple[int, ...] = ()
    gradient_over: bool = False
    sweeps: float = 1.0


@dataclass(frozen=True, slots=True)
class _Step:
    """A forward op, as its gradient needs it."""

    name: str
    kind: Kind
    inputs: tuple[ValueId, ...]
    outputs: tuple[ValueId, ...]
    flops: float
    weight: str


class Tape:
    """Records forward ops, then writes the backward pass, from the last op to the first.

    Attributes:
        weights: Bytes of every weight. Where `weight_gradients` is true, each op with a weight adds to its gradient.
        pairs: For every op, the inputs it may write over.
    """

    def __init__(self, *, weight_gradients: bool) -> None:
        self.weights: dict[str, int] = {}
        self.pairs: dict[OpId, tuple[Pair, ...]] = {}
        self._weight_gradients = weight_gradients
        self._builder = GraphBuilder()
        self._steps: list[_Step] = []
        self._bytes: dict[ValueId, int] = {}
        self._learned: list[ValueId] = []
        self._fixed: set[ValueId] = set()
        self._gradients: dict[ValueId, list[ValueId]] = {}
        self._sums: dict[str, ValueId] = {}
        self._ops = 0

    def __len__(self) -> int:
        """Return the number of ops so far."""
        return self._ops

    def add_input(self, name: str, elements: int, *, gradient: bool = False) -> ValueId:
        """Add an input of the step, with or without a gradient; return it."""
        value = self._builder.add_input(name, FLOAT_BYTES * elements)
        self._bytes[value] = FLOAT_BYTES * elements
        if gradient:
            self._learned.append(value)
        else:
            self._fixed.add(value)
        return value

    def add_weight(self, name: str, elements: int) -> str:
        """Add a weight; return its name."""
        self.weights[name] = FLOAT_BYTES * elements
        return name

    def add(
        self,
        name: str,
        kind: Kind,
        inputs: Sequence[ValueId],
        elements: int,
        *,
        parts: int = 1,
        flops: float = 0.0,
        weight: str = "",
    ) -> tuple[ValueId, ...]:
        """Add a forward op that makes `parts` values of `elements` elements each; return them."""
        over = [(inputs[place], 0) for place in kind.over]
        made = self._write(name, kind.target, inputs, [FLOAT_BYTES * elements] * parts, over, flops, kind.sweeps)
        self._steps.append(_Step(name, kind, tuple(inputs), made, flops, weight))
        return made

    def finish(self, losses: Sequence[ValueId]) -> tuple[Graph, Costs, InPlace]:
        """Write the backward pass of `losses`, which need no gradient to start from, and return the step."""
        starts = frozenset(losses)
        self._builder.begin_backward()
        for step in reversed(self._steps):
            arriving = [self._total(value) for value in step.outputs if value not in starts]
            if step.kind.gradient:
                self._add_gradient(step, arriving)
            else:
                for value in step.inputs:
                    self._gradients.setdefault(value, []).extend(arriving)
        ends = [self._total(value) for value in self._learned]
        graph = self._builder.build(outputs=[*losses, *ends, *self._sums.values()])
        return graph, self._builder.costs("estimated for a GeForce GTX Titan X"), InPlace(self.pairs)

    def _total(self, value: ValueId) -> ValueId:
        """Return the gradient of `value`, after adding up its parts if it has several."""
        parts = self._gradients[value]
        if len(parts) > 1:
            over = [(part, 0) for part in parts]
            parts = list(self._write(f"total{value}", "aten.add.Tensor", parts, [self._bytes[value]], over))
            self._gradients[value] = parts
        return parts[0]

    def _add_gradient(self, step: _Step, arriving: Sequence[ValueId]) -> None:
        """Write the gradient op of `step`: gradients of its inputs, and of its weight on top of what is there."""
        kind, wanted = step.kind, [value for value in step.inputs if value not in self._fixed]
        reads = [*arriving, *(step.inputs if kind.reads_inputs else ()), *(step.outputs if kind.reads_outputs else ())]
        sizes = [self._bytes[value] for value in wanted]
        over = [(value, 0) for value in arriving] if kind.gradient_over else []
        learns = bool(step.weight) and self._weight_gradients
        if learns:
            sizes.append(self.weights[step.weight])
            if step.weight in self._sums:
                reads.append(self._sums[step.weight])
                over.append((reads[-1], len(wanted)))
        # One product for the gradient of each input, and one for that of the weight.
        flops = step.flops * (len(wanted) + bool(step.weight))
        made = self._write(f"{step.name}.gradient", kind.gradient, reads, sizes, over, flops, kind.sweeps)
        for value, gradient in zip(wanted, made, strict=False):
            self._gradients.setdefault(value, []).append(gradient)
        if learns:
            self._sums[step.weight] = made[-1]

    def _write(
        self,
        name: str,
        target: str,
        inputs: Sequence[ValueId],
        sizes: Sequence[int],
        over: Sequence[tuple[ValueId, int]],
        flops: float = 0.0,
        sweeps: float = 1.0,
    ) -> tuple[ValueId, ...]:
        """Add an op that may give the buffers of inputs in `over` to the outputs at these positions."""
        traffic = sweeps * (sum(self._bytes[value] for value in inputs) + sum(sizes))
        seconds = _STARTING_SECONDS + max(flops / _FLOPS_PER_SECOND, traffic / _BYTES_PER_SECOND)
        outputs = [(f"{name}.{place}", size) for place, size in enumerate(sizes)]
        made = self._builder.add_op(name, inputs, outputs, target=target, seconds=seconds)
        self._bytes.update(zip(made, sizes, strict=True))
        if over:
            self.pairs[self._ops] = tuple((value, made[place]) for value, place in over)
        self._ops += 1
        return made
