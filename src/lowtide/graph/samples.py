"""Small graphs with costs, for tests, examples and documentation."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from lowtide.graph.build import GraphBuilder
from lowtide.graph.costs import Costs
from lowtide.graph.ir import Graph, ValueId

Sample = tuple[Graph, Costs]


def chain(n: int, *, size: int = 100) -> Sample:
    """Return `n` ops in a row, without phases; each reads the one before it and the last is the output."""
    builder = GraphBuilder()
    value = builder.add_input("x", size)
    for k in range(n):
        (value,) = builder.add_op(f"f{k}", [value], [(f"v{k}", size)], module=f"layer{k}")
    return builder.build(outputs=[value]), builder.costs()


def training_chain(n: int, *, sizes: Sequence[int] | None = None, seconds: Sequence[float] | None = None) -> Sample:
    """Return a chain of `n` layers with its backward pass; each layer's gradient reads the layer's input.

    Args:
        n: Number of layers.
        sizes: Bytes of each layer's output, 100 by default.
        seconds: Time of each layer's forward, 1 by default; its backward takes twice as long.
    """
    sizes = sizes or [100] * n
    seconds = seconds or [1.0] * n
    builder = GraphBuilder()
    values = [builder.add_input("x", sizes[0] if n else 0)]
    for k in range(n):
        values += builder.add_op(f"f{k}", [values[k]], [(f"v{k}", sizes[k])], module=f"layer{k}", seconds=seconds[k])
    builder.begin_backward()
    (gradient,) = builder.add_op("loss_grad", [values[-1]], [("g", sizes[-1] if n else 1)], kind="gradient")
    for k in reversed(range(n)):
        size = sizes[k - 1] if k else 1
        (gradient,) = builder.add_op(
            f"b{k}",
            [gradient, values[k]],
            [(f"g{k}", size)],
            kind="gradient",
            module=f"layer{k}",
            seconds=2 * seconds[k],
        )
    return builder.build(outputs=[gradient]), builder.costs()


class _Tape:
    """Records forward ops and writes their backward pass, in which each op's gradient reads the op's inputs."""

    def __init__(self) -> None:
        self.builder = GraphBuilder()
        self._ops: list[tuple[str, tuple[ValueId, ...], ValueId, int, float]] = []
        self._sizes: dict[ValueId, int] = {}

    def add_input(self, name: str, size: int) -> ValueId:
        value = self.builder.add_input(name, size)
        self._sizes[value] = size
        return value

    def add(self, name: str, inputs: Sequence[ValueId], size: int, seconds: float = 1.0) -> ValueId:
        module = name.rpartition(".")[0]
        (value,) = self.builder.add_op(name, inputs, [(name, size)], seconds=seconds, module=module)
        self._sizes[value] = size
        self._ops.append((name, tuple(inputs), value, size, seconds))
        return value

    def finish(self) -> Sample:
        """Add the backward pass, starting from the last op, and return the joint graph."""
        self.builder.begin_backward()
        _, _, last, size, _ = self._ops[-1]
        gradients = dict.fromkeys([last], self.builder.add_op("loss_grad", [last], [("g", size)], kind="gradient")[0])
        results = []
        for name, inputs, value, _, seconds in reversed(self._ops):
            if value not in gradients:
                continue
            parts = [(f"g_{name}_{j}", self._sizes[u]) for j, u in enumerate(inputs)]
            made = self.builder.add_op(
                f"b_{name}",
                [gradients[value], *inputs],
                parts,
                kind="gradient",
                seconds=2 * seconds,
                module=name.rpartition(".")[0],
            )
            for u, gradient in zip(inputs, made, strict=True):
                if u in gradients:
                    (gradient,) = self.builder.add_op(
                        f"sum_{name}_{u}", [gradients[u], gradient], [(f"s_{name}_{u}", self._sizes[u])], seconds=0.1
                    )
                gradients[u] = gradient
                if self._is_input(u):
                    results.append(gradient)
        return self.builder.build(outputs=results[-1:]), self.builder.costs()

    def _is_input(self, value: ValueId) -> bool:
        return all(value != made for _, _, made, _, _ in self._ops)


def skip_chain(n: int, *, skip: int = 3, size: int = 100) -> Sample:
    """Return the training graph of `n` layers of which every `skip`-th adds the value `skip` layers before it."""
    tape = _Tape()
    values = [tape.add_input("x", size)]
    for k in range(n):
        values.append(tape.add(f"layer{k}.f", [values[-1]], size))
        if (k + 1) % skip == 0:
            values.append(tape.add(f"layer{k}.add", [values[-1], values[-1 - skip]], size, 0.1))
    return tape.finish()


def unet(depth: int, *, size: int = 1024) -> Sample:
    """Return the training graph of a U-Net: sizes halve on the way down; the way up reads each level's value."""
    tape = _Tape()
    value = tape.add_input("x", size)
    skips = []
    for level in range(depth):
        value = tape.add(f"down{level}.conv1", [value], size >> level, 4.0)
        value = tape.add(f"down{level}.conv2", [value], size >> level, 4.0)
        skips.append(value)
        value = tape.add(f"down{level}.pool", [value], max(1, size >> (level + 1)), 0.5)
    value = tape.add("middle.conv", [value], max(1, size >> depth), 4.0)
    for level in reversed(range(depth)):
        value = tape.add(f"up{level}.up", [value], size >> level, 0.5)
        value = tape.add(f"up{level}.cat", [value, skips[level]], 2 * (size >> level), 0.3)
        value = tape.add(f"up{level}.conv1", [value], size >> level, 4.0)
        value = tape.add(f"up{level}.conv2", [value], size >> level, 4.0)
    return tape.finish()


def random_dag(seed: int, *, n: int = 12, phases: bool = True, max_bytes: int = 64, reach: int = 5) -> Sample:
    """Return a random graph of `n` ops, the same for the same `seed`.

    Args:
        seed: Seed of the random generator.
        n: Number of ops.
        phases: True if the later half of the ops is the backward phase.
        max_bytes: Largest size of a value.
        reach: How many values back an op may read.
    """
    rng = random.Random(seed)
    builder = GraphBuilder()
    values = [builder.add_input("x", rng.randint(1, max_bytes))]
    for k in range(n):
        if phases and k == n // 2:
            builder.begin_backward()
        recent = values[-reach:] if rng.random() < 0.7 else values
        inputs = rng.sample(recent, min(len(recent), rng.randint(1, 3)))
        outputs = [(f"v{k}_{j}", rng.randint(0, max_bytes)) for j in range(rng.choice((1, 1, 1, 2)))]
        values += builder.add_op(
            f"op{k}",
            inputs,
            outputs,
            seconds=float(rng.randint(1, 9)),
            workspace_bytes=rng.choice((0, 0, rng.randint(0, max_bytes))),
        )
    return builder.build(outputs=values[-1:]), builder.costs()


def transformer(layers: int, *, tokens: int = 128, dim: int = 64, heads: int = 4) -> Sample:
    """Return the training graph of a transformer of about 40 ops per layer, with parameter gradients as outputs.

    Sizes are those of 4-byte numbers; a matrix product costs its multiplications and additions, everything else the
    bytes it touches, at rates of 1e10 per second.
    """
    network = _Network(tokens * dim, tokens * tokens * heads, tokens, dim)
    x = network.builder.add_input("tokens", 4 * tokens * dim)
    for k in range(layers):
        at = f"layer{k}"
        normed = network.norm(f"{at}.norm1", x)
        query, key, value = (network.linear(f"{at}.{part}", normed, 1, 1) for part in ("query", "key", "value"))
        weights = network.softmax(f"{at}.softmax", network.product(f"{at}.scores", query, key, network.square))
        mixed = network.product(f"{at}.mix", weights, value, network.row)
        x = network.add(f"{at}.add1", x, network.linear(f"{at}.project", mixed, 1, 1))
        wide = network.linear(f"{at}.widen", network.norm(f"{at}.norm2", x), 1, 4)
        x = network.add(f"{at}.add2", x, network.linear(f"{at}.narrow", network.gelu(f"{at}.gelu", wide), 4, 1))
    return network.finish(network.norm("norm", x))


class _Network:
    """Records forward ops with their backward, each of which reads what PyTorch's kernels read."""

    _RATE = 1e10

    def __init__(self, row: int, square: int, tokens: int, dim: int) -> None:
        self.builder = GraphBuilder()
        self.row, self.square, self.tokens, self.dim = row, square, tokens, dim
        self._numbers: dict[ValueId, int] = {}
        self._backward: list[Callable[[], None]] = []
        self._gradients: dict[ValueId, ValueId] = {}
        self._results: list[ValueId] = []

    def norm(self, name: str, x: ValueId) -> ValueId:
        """Add a norm; its backward reads its input and the statistics."""
        y, statistics = self._op(name, [x], [self.row, 2 * self.tokens])
        self._backward.append(lambda: self._give(name, y, {x: [x, statistics]}))
        return y

    def gelu(self, name: str, x: ValueId) -> ValueId:
        """Add an activation; its backward reads its input."""
        (y,) = self._op(name, [x], [self._numbers[x]])
        self._backward.append(lambda: self._give(name, y, {x: [x]}))
        return y

    def softmax(self, name: str, x: ValueId) -> ValueId:
        """Add a softmax; its backward reads its output."""
        (y,) = self._op(name, [x], [self._numbers[x]])
        self._backward.append(lambda: self._give(name, y, {x: [y]}))
        return y

    def add(self, name: str, x: ValueId, other: ValueId) -> ValueId:
        """Add a sum; its backward hands the gradient on to both."""
        (y,) = self._op(name, [x, other], [self.row])

        def backward() -> None:
            gradient = self._gradients.pop(y)
            self._collect(name, x, gradient)
            self._collect(name, other, gradient)

        self._backward.append(backward)
        return y

    def product(self, name: str, x: ValueId, other: ValueId, numbers: int) -> ValueId:
        """Add a product of two activations; the gradient of each reads the other."""
        work = 2 * self.square * self.dim
        (y,) = self._op(name, [x, other], [numbers], work)
        self._backward.append(lambda: self._give(name, y, {x: [other], other: [x]}, work))
        return y

    def linear(self, name: str, x: ValueId, wide: int, out: int) -> ValueId:
        """Add a product with a parameter, whose gradient reads the input and is an output of the graph."""
        size = wide * out * self.dim * self.dim
        weight = self.builder.add_input(f"{name}.weight", 4 * size, kind="parameter")
        work = 2 * self.tokens * size
        (y,) = self._op(name, [x, weight], [out * self.row], work)

        def backward() -> None:
            made = self._op(f"b_{name}.weight", [self._gradients[y], x], [size], work, kind="gradient")
            self._results.append(made[0])
            self._give(name, y, {x: [weight]}, work)

        self._backward.append(backward)
        return y

    def finish(self, last: ValueId) -> Sample:
        """Add the backward pass and return the joint graph."""
        self.builder.begin_backward()
        (self._gradients[last],) = self._op("loss_grad", [last], [self.row], kind="gradient")
        for backward in reversed(self._backward):
            backward()
        return self.builder.build(outputs=self._results), self.builder.costs()

    def _op(
        self, name: str, inputs: Sequence[ValueId], numbers: Sequence[int], work: int = 0, kind: str = "activation"
    ) -> tuple[ValueId, ...]:
        touched = sum(numbers) + sum(self._numbers.get(value, 0) for value in inputs)
        outputs = [(f"{name}_{k}", 4 * count) for k, count in enumerate(numbers)]
        seconds = (work or 4 * touched) / self._RATE
        module = name.removeprefix("b_").rpartition(".")[0]
        made = self.builder.add_op(name, inputs, outputs, seconds=seconds, module=module, kind=kind)
        self._numbers.update(zip(made, numbers, strict=True))
        return made

    def _give(self, name: str, y: ValueId, reads: dict[ValueId, list[ValueId]], work: int = 0) -> None:
        """Add the gradients of the keys of `reads`, each of which reads the gradient of `y` and the values given."""
        gradient = self._gradients.pop(y)
        for k, (value, read) in enumerate(reads.items()):
            numbers = self._numbers.get(value, self.row)
            (made,) = self._op(f"b_{name}_{k}", [gradient, *read], [numbers], work, kind="gradient")
            self._collect(name, value, made)

    def _collect(self, name: str, value: ValueId, gradient: ValueId) -> None:
        if value in self._gradients:
            numbers = self._numbers.get(value, self.row)
            (gradient,) = self._op(
                f"b_{name}_sum_{value}", [self._gradients[value], gradient], [numbers], kind="gradient"
            )
        self._gradients[value] = gradient
