"""The networks of Chen et al. 2016 at full size, each as the graph of one training step: a deep ResNet and an LSTM.

A network is written forward, op by op, on a `Tape`, which then writes its backward pass.

What gradient ops read: convolution, normalisation and matrix product their input, leaky ReLU and gates their output,
pooling both, products both factors. Sums pass their gradient on. The ResNet's graph has feature maps and their
gradients only, among them that of the images; the LSTM's also has the gradients of its weights, to which every step
adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.errors import InvalidOptionError
from lowtide.graph.build import GraphBuilder
from lowtide.graph.costs import Costs
from lowtide.graph.ir import Graph, OpId, ValueId
from lowtide.schedule.arena import InPlace, Pair

FLOAT_BYTES = 4
# The ResNet: channels of the first stage, their factor inside a block, side of the images, classes.
_WIDTH, _EXPANSION, _IMAGE, _CLASSES = 64, 4, 224, 1000
# The LSTM: gates of a cell.
_GATES = 4

# NVIDIA GeForce GTX Titan X: 3,072 cores x 2 operations at 1 GHz, 336.5 GB/s; and the shares that large ops reach.
_FLOPS_PER_SECOND = 0.6 * 6.144e12
_BYTES_PER_SECOND = 0.8 * 336.5e9
_STARTING_SECONDS = 5e-6


@dataclass(frozen=True)
class Network:
    """The training step of a network, and what its authors know about it.

    Attributes:
        name: Name for people.
        graph: Forward and backward.
        costs: Estimated seconds; no workspace, which the paper does not count.
        in_place: Inputs that ops may write over.
        groups: For forward ops whose outputs may end a segment, a number; those of equal number are kept or recomputed
            together.
        parameter_bytes: Size of the parameters, which are no part of the graph.
    """

    name: str
    graph: Graph
    costs: Costs
    in_place: InPlace
    groups: dict[OpId, int]
    parameter_bytes: int

    @property
    def sizes(self) -> list[int]:
        """Bytes that each forward op makes."""
        values, ops = self.graph.values, self.graph.ops
        return [sum(values[value].bytes for value in ops[op].outputs) for op in self.graph.forward]


@dataclass(frozen=True, slots=True)
class Kind:
    """What all ops of a kind share.

    Attributes:
        target: The op's target.
        gradient: The target of its gradient op, or "" if gradients pass through unchanged.
        reads_inputs: True if the gradient op reads the op's inputs.
        reads_outputs: True if the gradient op reads the op's outputs.
        over: Positions of the inputs that the op may write over.
        gradient_over: True if the gradient op may write over the gradient it reads.
        sweeps: How often the op goes over its inputs and outputs.
    """

    target: str
    gradient: str = ""
    reads_inputs: bool = False
    reads_outputs: bool = False
    over: tuple[int, ...] = ()
    gradient_over: bool = False
    sweeps: float = 1.0


def _pointwise(name: str) -> Kind:
    target, gradient = f"aten.{name}.default", f"aten.{name}_backward.default"
    return Kind(target, gradient, reads_outputs=True, over=(0,), gradient_over=True)


_CONVOLUTION = Kind("aten.convolution.default", "aten.convolution_backward.default", reads_inputs=True)
_MATRIX = Kind("aten.addmm.default", "lowtide.addmm_backward", reads_inputs=True)
_NORM = Kind("aten.native_batch_norm.default", "aten.native_batch_norm_backward.default", reads_inputs=True, sweeps=1.5)
_MAX_POOL = Kind(
    "aten.max_pool2d_with_indices.default",
    "aten.max_pool2d_with_indices_backward.default",
    reads_inputs=True,
    reads_outputs=True,
)
_MEAN = Kind("aten.mean.dim", "aten.expand.default")
_SPLIT = Kind("aten.split.Tensor", "aten.cat.default")
_SUM = Kind("aten.add.Tensor", over=(0,))
_PRODUCT = Kind("aten.mul.Tensor", "lowtide.mul_backward", reads_inputs=True, over=(0, 1), gradient_over=True)
_SOFTMAX = Kind("aten._softmax.default", "aten._softmax_backward_data.default", reads_outputs=True, over=(0,))
_LOSS = Kind("lowtide.cross_entropy", "lowtide.cross_entropy_backward", reads_inputs=True)
_RELU, _SIGMOID, _TANH = _pointwise("leaky_relu"), _pointwise("sigmoid"), _pointwise("tanh")


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


def resnet(stages: Sequence[int], *, batch: int = 32) -> Network:
    """Return a ResNet of four stages of bottleneck blocks, `stages[k]` of them in stage k, on 224 x 224 images.

    Convolution, normalisation and leaky ReLU follow each other everywhere, also on projections and before the sum,
    after which there is no activation. A block may end a segment with its sum.
    """
    if not stages or min(stages) < 1:
        raise InvalidOptionError(f"The stages are {tuple(stages)}; give at least one, each of at least one block.")
    net = _ResNet(batch)
    value = net.unit("stem", net.tape.add_input("images", batch * 3 * _IMAGE**2, gradient=True), (3, _WIDTH, 7), 112)
    (value,) = net.tape.add("stem.pool", _MAX_POOL, [value], batch * _WIDTH * 56**2)
    groups: dict[OpId, int] = {}
    channels, side = _WIDTH, 56
    for stage, depth in enumerate(stages):
        for index in range(depth):
            side_out = side // 2 if stage and not index else side
            value = net.block(f"stage{stage}.{index}", value, (channels, _WIDTH << stage), (side, side_out))
            groups[len(net.tape) - 1] = len(groups)
            channels, side = _EXPANSION * (_WIDTH << stage), side_out
    (value,) = net.tape.add("mean", _MEAN, [value], batch * channels)
    weight = net.tape.add_weight("head", (channels + 1) * _CLASSES)
    flops = 2.0 * batch * channels * _CLASSES
    (value,) = net.tape.add("head", _MATRIX, [value], batch * _CLASSES, flops=flops, weight=weight)
    (value,) = net.tape.add("softmax", _SOFTMAX, [value], batch * _CLASSES)
    layers = 3 * sum(stages) + 2
    return _finish(f"ResNet, {layers} layers", net.tape, [value], groups)


class _ResNet:
    """Writes the blocks of a ResNet."""

    def __init__(self, batch: int) -> None:
        self.tape = Tape(weight_gradients=False)
        self._batch = batch

    def unit(self, name: str, value: ValueId, shape: tuple[int, int, int], side: int) -> ValueId:
        """Add convolution, normalisation and leaky ReLU; `shape` is channels in, channels out and kernel side."""
        fan_in, fan_out, kernel = shape
        elements = self._batch * fan_out * side**2
        weight = self.tape.add_weight(name, fan_in * fan_out * kernel**2 + 2 * fan_out)
        flops = 2.0 * elements * fan_in * kernel**2
        (value,) = self.tape.add(f"{name}.conv", _CONVOLUTION, [value], elements, flops=flops, weight=weight)
        (value,) = self.tape.add(f"{name}.norm", _NORM, [value], elements)
        return self.tape.add(f"{name}.relu", _RELU, [value], elements)[0]

    def block(self, name: str, value: ValueId, widths: tuple[int, int], sides: tuple[int, int]) -> ValueId:
        """Add a bottleneck block: 1x1, 3x3 with the stride, 1x1, beside the input or a projection of it."""
        (fan_in, width), (side, side_out) = widths, sides
        fan_out = _EXPANSION * width
        branch = self.unit(f"{name}.0", value, (fan_in, width, 1), side)
        branch = self.unit(f"{name}.1", branch, (width, width, 3), side_out)
        branch = self.unit(f"{name}.2", branch, (width, fan_out, 1), side_out)
        # The first block of every stage has a projection, even if the sizes are equal.
        first = name.endswith(".0")
        shortcut = self.unit(f"{name}.shortcut", value, (fan_in, fan_out, 1), side_out) if first else value
        return self.tape.add(f"{name}.sum", _SUM, [shortcut, branch], self._batch * fan_out * side_out**2)[0]


def lstm(
    steps: int, *, layers: int = 4, hidden: int = 1024, batch: int = 64, inputs: int = 50, classes: int = 5000
) -> Network:
    """Return an LSTM unrolled over `steps` steps with a softmax loss at each; weights are the same at every step.

    The cell and hidden states of all layers at one step may end a segment together.
    """
    if steps < 1:
        raise InvalidOptionError(f"The LSTM has {steps} steps; it must have at least 1.")
    tape = Tape(weight_gradients=True)
    for layer in range(layers):
        tape.add_weight(f"input{layer}", ((hidden if layer else inputs) + 1) * _GATES * hidden)
        tape.add_weight(f"hidden{layer}", (hidden + 1) * _GATES * hidden)
    tape.add_weight("head", (hidden + 1) * classes)
    elements = batch * hidden
    states = [(tape.add_input(f"cell{k}", elements), tape.add_input(f"hidden{k}", elements)) for k in range(layers)]
    groups: dict[OpId, int] = {}
    losses: list[ValueId] = []
    for step in range(steps):
        value, fan_in = tape.add_input(f"x{step}", batch * inputs), inputs
        for layer in range(layers):
            name = f"step{step}.layer{layer}"
            states[layer] = _cell(tape, name, layer, (value, fan_in), states[layer], (batch, hidden))
            groups |= {len(tape) - 3: step, len(tape) - 1: step}
            value, fan_in = states[layer][1], hidden
        flops = 2.0 * batch * hidden * classes
        (scores,) = tape.add(f"step{step}.head", _MATRIX, [value], batch * classes, flops=flops, weight="head")
        losses += tape.add(f"step{step}.loss", _LOSS, [scores], 1)
    return _finish(f"LSTM, {steps} steps", tape, losses, groups)


def _cell(
    tape: Tape,
    name: str,
    layer: int,
    below: tuple[ValueId, int],
    state: tuple[ValueId, ValueId],
    shape: tuple[int, int],
) -> tuple[ValueId, ValueId]:
    """Add one LSTM cell; the last three ops make the new cell state, its tanh, and the new hidden state."""
    (value, fan_in), (cell, before), (batch, hidden) = below, state, shape
    wide, elements = batch * _GATES * hidden, batch * hidden
    flops = 2.0 * wide
    (one,) = tape.add(f"{name}.input", _MATRIX, [value], wide, flops=flops * fan_in, weight=f"input{layer}")
    (two,) = tape.add(f"{name}.hidden", _MATRIX, [before], wide, flops=flops * hidden, weight=f"hidden{layer}")
    (gates,) = tape.add(f"{name}.gates", _SUM, [one, two], wide)
    parts = tape.add(f"{name}.split", _SPLIT, [gates], elements, parts=_GATES)
    kinds = {"entry": _SIGMOID, "candidate": _TANH, "forget": _SIGMOID, "exit": _SIGMOID}
    entry, candidate, forget, leave = (
        tape.add(f"{name}.{gate}", kind, [part], elements)[0]
        for (gate, kind), part in zip(kinds.items(), parts, strict=True)
    )
    (old,) = tape.add(f"{name}.old", _PRODUCT, [forget, cell], elements)
    (new,) = tape.add(f"{name}.new", _PRODUCT, [entry, candidate], elements)
    (cell,) = tape.add(f"{name}.cell", _SUM, [old, new], elements)
    (squashed,) = tape.add(f"{name}.squashed", _TANH, [cell], elements)
    (out,) = tape.add(f"{name}.out", _PRODUCT, [leave, squashed], elements)
    return cell, out


def _finish(name: str, tape: Tape, losses: Sequence[ValueId], groups: dict[OpId, int]) -> Network:
    graph, costs, in_place = tape.finish(losses)
    return Network(name, graph, costs, in_place, groups, sum(tape.weights.values()))
