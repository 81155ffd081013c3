"""Oracles for lower sets: brute force over all chains, a recount of canonical strategies, and two known networks."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations

from lowtide.plan.planners.kusumoto_lower_sets.dag import Dag

Vertices = frozenset[int]


def random_dag(seed: int, *, max_vertices: int = 6) -> Dag:
    """Return a small random DAG, the same for the same seed, with several sources and sinks and empty vertices."""
    rng = random.Random(seed)
    n = rng.randint(1, max_vertices)
    reach = rng.choice((2, 3, n))
    before = []
    for vertex in range(n):
        near = range(max(0, vertex - reach), vertex)
        before.append(tuple(sorted(rng.sample(near, min(len(near), rng.choice((0, 1, 1, 1, 2, 3)))))))
    sizes = tuple(rng.choice((0, rng.randint(1, 9), rng.randint(1, 60))) for _ in range(n))
    return Dag(sizes, tuple(rng.choice((0, 1, 1, 2, 5)) for _ in range(n)), tuple(before))


def lower_sets(dag: Dag) -> list[Vertices]:
    """Return all lower sets, by trying every set of vertices."""
    everything = range(len(dag))
    subsets = (frozenset(chosen) for size in range(len(dag) + 1) for chosen in combinations(everything, size))
    return [chosen for chosen in subsets if all(chosen.issuperset(dag.predecessors[vertex]) for vertex in chosen)]


def chains(dag: Dag, sets: Iterable[Vertices] | None = None) -> Iterator[tuple[Vertices, ...]]:
    """Yield all chains of growing lower sets, taken from `sets`, that end with the set of all vertices."""
    family = list(lower_sets(dag) if sets is None else sets)

    def extend(chain: tuple[Vertices, ...]) -> Iterator[tuple[Vertices, ...]]:
        last = chain[-1] if chain else frozenset()
        if len(last) == len(dag):
            yield chain
        for larger in family:
            if last < larger:
                yield from extend((*chain, larger))

    return extend(())


def edges(dag: Dag) -> list[tuple[int, int]]:
    return [(tail, head) for head, before in enumerate(dag.predecessors) for tail in before]


def size(dag: Dag, vertices: Iterable[int]) -> int:
    return sum(dag.bytes[vertex] for vertex in set(vertices))


def time(dag: Dag, vertices: Iterable[int]) -> int:
    return sum(dag.ticks[vertex] for vertex in set(vertices))


def border(dag: Dag, lower: Vertices) -> set[int]:
    return {tail for tail, head in edges(dag) if tail in lower and head not in lower}


def judge(dag: Dag, chain: Sequence[Vertices]) -> tuple[int, int, int, int]:
    """Return peak, ticks saved, ticks saved if the last block is kept, and cached bytes, from the definitions alone."""
    cached: set[int] = set()
    before: Vertices = frozenset()
    peak = 0
    for lower in chain:
        heads = {head for tail, head in edges(dag) if tail in lower}
        tails = {tail for tail, head in edges(dag) if head in heads}
        later = size(dag, heads - lower) + size(dag, tails - lower)
        peak = max(peak, size(dag, cached) + 2 * size(dag, lower - before) + later)
        cached |= border(dag, lower)
        last, before = before, lower
    kept = cached | (set(chain[-1]) - last) if chain else set()
    return peak, time(dag, cached), time(dag, kept), size(dag, cached)


def recount(dag: Dag, chain: Sequence[Vertices]) -> list[int]:
    """Run a canonical strategy value by value, check that all it reads is there, and return the peak of each block."""
    arcs = edges(dag)
    values: set[int] = set()
    cached: set[int] = set()
    before: Vertices = frozenset()
    for lower in chain:
        for vertex in sorted(lower - before):
            assert values.issuperset(dag.predecessors[vertex]), "forward reads a value that is not there"
            values.add(vertex)
        cached |= border(dag, lower)
        values &= cached
        before = lower
    gradients: set[int] = set()
    peaks = []
    for place in reversed(range(len(chain))):
        lower, smaller = chain[place], chain[place - 1] if place else frozenset()
        for vertex in sorted(lower - smaller - values):
            assert values.issuperset(dag.predecessors[vertex]), "a recomputation reads a value that is not there"
            values.add(vertex)
        for vertex in sorted(lower - smaller, reverse=True):
            readers = {head for tail, head in arcs if tail == vertex}
            assert gradients.issuperset(readers), "a gradient is missing"
            assert values.issuperset(tail for tail, head in arcs if head in readers), "a value is missing in backward"
            gradients.add(vertex)
        peaks.append(size(dag, values) + size(dag, gradients))
        readers = {head for tail, head in arcs if tail in smaller} - smaller
        values &= smaller | {tail for tail, head in arcs if head in readers}
        gradients &= readers
    return peaks[::-1]


def discovered(dag: Dag) -> list[Vertices]:
    """Return the lower sets in the order of the paper's released program: as a depth-first search first meets them."""
    found: dict[Vertices, None] = {}

    def visit(lower: Vertices) -> None:
        if lower in found:
            return
        found[lower] = None
        for vertex in range(len(dag)):
            if vertex not in lower and lower.issuperset(dag.predecessors[vertex]):
                visit(lower | {vertex})

    visit(frozenset())
    return list(found)


class Layers:
    """Writes down a network layer by layer, as a DAG with the paper's times."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._sizes: list[int] = []
        self._ticks: list[int] = []
        self._before: list[tuple[int, ...]] = []

    def add(self, numbers: int, *before: int, ticks: int = 1) -> int:
        """Add a layer with `numbers` results per sample; return its vertex."""
        self._sizes.append(4 * self._batch * numbers)
        self._ticks.append(ticks)
        self._before.append(tuple(sorted(before)))
        return len(self._sizes) - 1

    def convolution(self, channels: int, side: int, *before: int) -> int:
        """Add a convolution and the ReLU after it."""
        numbers = channels * side * side
        return self.add(numbers, self.add(numbers, *before, ticks=10))

    def loss(self, before: int) -> Dag:
        """Add the loss, one number for the whole batch, and return the DAG."""
        self.add(0, before)
        return Dag((*self._sizes[:-1], 4), tuple(self._ticks), tuple(self._before))


def vgg19(batch: int = 32) -> Dag:
    """Return VGG-19 with Chainer's layers: five stages, flattening, three linear layers with dropout after two."""
    layers = Layers(batch)
    before: tuple[int, ...] = ()
    side = 224
    for channels, convolutions in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
        for _ in range(convolutions):
            before = (layers.convolution(channels, side, *before),)
        side //= 2
        before = (layers.add(channels * side * side, *before),)
    vertex = layers.add(512 * side * side, *before)
    for _ in range(2):
        for _layer in ("linear", "relu", "dropout"):
            vertex = layers.add(4096, vertex)
    return layers.loss(layers.add(1000, vertex))


def unet(batch: int = 8) -> Dag:
    """Return the U-Net with valid convolutions on 572 x 572 pixels; dropout at the bottom and one level above it."""
    layers = Layers(batch)
    before: tuple[int, ...] = ()
    side, skips = 572, []
    for level in range(5):
        channels = 64 << level
        vertex = layers.convolution(channels, side - 2, *before)
        vertex = layers.convolution(channels, side - 4, vertex)
        side -= 4
        if level >= 3:
            vertex = layers.add(channels * side * side, vertex)
        if level < 4:
            skips.append(vertex)
            side //= 2
            before = (layers.add(channels * side * side, vertex),)
    for level in reversed(range(4)):
        side *= 2
        channels = 64 << level
        wide = max(channels, 128)
        vertex = layers.add(wide * side * side, vertex)
        vertex = layers.add(wide * side * side, vertex)
        crop = layers.add(channels * side * side, skips[level])
        vertex = layers.add((wide + channels) * side * side, vertex, crop)
        vertex = layers.convolution(channels, side - 2, vertex)
        vertex = layers.convolution(channels, side - 4, vertex)
        side -= 4
    return layers.loss(layers.add(2 * side * side, vertex, ticks=10))
