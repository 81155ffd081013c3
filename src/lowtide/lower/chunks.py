"""A backward graph that runs in chunks: every chunk ends where a group of gradients leaves.

The chunks together run the same ops in the same order as the graph does, and a tensor is freed at the same place: what
a later chunk reads waits in between, and a chunk is handed a list that it empties.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from torch import fx

from lowtide.capture.alias import view_base
from lowtide.lower.emit_graphs import deliver
from lowtide.pytorch.compiler.joint_graph import Run, run_of

Gradients = dict[int, Any]


@dataclass(frozen=True)
class Part:
    """Which part of a backward pass a run is.

    Attributes:
        number: Its number, from 0.
        is_last: Whether it is the last one.
        num_gradients: How many of its results leave, at the end of them.
    """

    number: int
    is_last: bool
    num_gradients: int


class Observer(Protocol):
    """Runs graphs in the place of their caller, to see what goes in and what it takes."""

    def forward(self, run: Run, args: list[Any]) -> Any:
        """Return `run(args)` of a forward graph."""

    def begin_backward(self, args: Sequence[Any]) -> None:
        """Note the arguments of a backward graph, before any of it runs."""

    def backward(self, run: Run, args: list[Any], part: Part) -> Any:
        """Return `run(args)` of a part of a backward graph."""


@dataclass(frozen=True)
class Chunk:
    """Some ops of a backward graph.

    Attributes:
        run: Runs them.
        reads: Names of what it is given.
        last_read: Those of them that no later chunk reads.
        makes: Names of the first results.
        gradients: Positions of the inputs that get the other results.
    """

    run: Run
    reads: tuple[str, ...]
    last_read: frozenset[str]
    makes: tuple[str, ...]
    gradients: tuple[int, ...]

    def gradients_from(self, waiting: dict[str, Any]) -> Gradients:
        """Run it on what is waiting, by name; add what it makes for later chunks, and return gradients by position."""
        results = self.run([waiting.pop(name) if name in self.last_read else waiting[name] for name in self.reads])
        waiting.update(zip(self.makes, results, strict=False))
        return dict(zip(self.gradients, results[len(self.makes) :], strict=True))


@dataclass(frozen=True)
class ChunkedBackward:
    """A backward graph in chunks.

    Attributes:
        arguments: Names of its arguments.
        chunks: The chunks.
        num_gradients: How many gradients there are, None among them.
        observers: See the runs; the last one is the outermost.
    """

    arguments: tuple[str, ...]
    chunks: tuple[Chunk, ...]
    num_gradients: int
    observers: tuple[Observer, ...] = ()

    def start(self, args: list[Any]) -> Iterator[Gradients]:
        """Return gradients by position, as they are there; the list of arguments is emptied at once."""
        for observer in self.observers:
            observer.begin_backward(args)
        read = {name for chunk in self.chunks for name in chunk.reads}
        waiting = {name: arg for name, arg in zip(self.arguments, args, strict=True) if name in read}
        args.clear()
        return self._run(waiting)

    def _run(self, waiting: dict[str, Any]) -> Iterator[Gradients]:
        for chunk in self.chunks:
            # No variable keeps them: autograd takes a gradient that nobody else has, and copies any other.
            yield chunk.gradients_from(waiting)

    def whole(self, args: list[Any]) -> list[Any]:
        """Return all gradients at once."""
        found: list[Any] = [None] * self.num_gradients
        for gradients in self.start(args):
            for position, gradient in gradients.items():
                found[position] = gradient
        return found

    def observed(self, observers: Sequence[Observer]) -> ChunkedBackward:
        """Return the same, seen by observers."""
        last = len(self.chunks) - 1
        chunks = list(self.chunks)
        for observer in observers:
            for number, chunk in enumerate(chunks):
                part = Part(number, number == last, len(chunk.gradients))
                chunks[number] = replace(chunk, run=partial(observer.backward, chunk.run, part=part))
        return replace(self, chunks=tuple(chunks), observers=(*self.observers, *observers))


def in_one_piece(module: fx.GraphModule) -> ChunkedBackward:
    """Return the backward graph `module` as one chunk."""
    arguments = tuple(node.name for node in module.graph.find_nodes(op="placeholder"))
    output = next(reversed(module.graph.find_nodes(op="output")))
    number = len(output.args[0])
    chunk = Chunk(run_of(module), arguments, frozenset(arguments), (), tuple(range(number)))
    return ChunkedBackward(arguments, (chunk,), number)


def cut(module: fx.GraphModule, parameters: Mapping[int, str]) -> ChunkedBackward:
    """Return the backward graph `module` in chunks.

    A chunk goes on after its gradients are made as long as ops follow that read their storages, or those of the
    parameters they are for: whoever receives a gradient may write into both.

    Args:
        module: A graph with deliveries.
        parameters: Names of the graph's arguments that are the parameters at these positions.
    """
    nodes = list(module.graph.nodes)
    output = nodes.pop()
    ends = _ends(nodes, parameters)
    outputs: Sequence[Any] = output.args[0]
    leaving = {position for _, group in ends for position in group}
    rest = {position: node for position, node in enumerate(outputs) if position not in leaving}
    present = {position: node for position, node in rest.items() if isinstance(node, fx.Node)}
    groups = [*ends, (len(nodes) - 1, present)] if present or not ends else _to_the_end(ends, len(nodes) - 1)
    body = [node for node in nodes if node.op != "placeholder"]
    places = {node: place for place, node in enumerate(nodes)}
    chunk_of = {node: _first(groups, places[node]) for node in body}
    last: dict[fx.Node, int] = {}
    for node in body:
        for source in node.all_input_nodes if node.target is not deliver else ():
            last[source] = max(last.get(source, 0), chunk_of[node])
    for number, (_, group) in enumerate(groups):
        for node in group.values():
            last[node] = max(last.get(node, 0), number)
    chunks = [
        _chunk(module, [node for node in body if chunk_of[node] == number], group, partial(_reads_at, last, number))
        for number, (_, group) in enumerate(groups)
    ]
    arguments = tuple(node.name for node in nodes if node.op == "placeholder")
    return ChunkedBackward(arguments, tuple(chunks), len(outputs))


def _to_the_end(ends: list[tuple[int, dict[int, fx.Node]]], last: int) -> list[tuple[int, dict[int, fx.Node]]]:
    """Let the last group's chunk go to the end of the graph."""
    return [*ends[:-1], (last, ends[-1][1])]


def _first(groups: Sequence[tuple[int, Any]], place: int) -> int:
    return next(number for number, (end, _) in enumerate(groups) if place <= end)


def _ends(nodes: Sequence[fx.Node], parameters: Mapping[int, str]) -> list[tuple[int, dict[int, fx.Node]]]:
    """Return for each delivery where its chunk ends, and its gradients by position."""
    roots: dict[fx.Node, fx.Node] = {}
    last_read: dict[fx.Node, int] = {}
    by_name = {node.name: node for node in nodes}
    for place, node in enumerate(nodes):
        base = view_base(node) if node.op == "call_function" and node.target is not deliver else None
        roots[node] = node if base is None else roots[base]
        for source in node.all_input_nodes:
            last_read[roots[source]] = place
    ends: list[tuple[int, dict[int, fx.Node]]] = []
    end = -1
    for place, node in enumerate(nodes):
        if node.target is not deliver:
            continue
        positions, *gradients = node.args
        group: dict[int, fx.Node] = dict(zip(positions, gradients, strict=True))  # type: ignore[arg-type]
        shared = [roots[gradient] for gradient in group.values()]
        shared += [roots[by_name[parameters[each]]] for each in group if parameters.get(each) in by_name]
        end = max(end, place, *(last_read[root] for root in shared if root in last_read))
        ends.append((end, group))
    return ends


def _reads_at(last: Mapping[fx.Node, int], number: int, node: fx.Node) -> int:
    """Return how many chunks behind chunk `number` still read `node`'s result, counted from it; below 0 for none."""
    return last.get(node, -1) - number


def _chunk(
    module: fx.GraphModule, body: Sequence[fx.Node], group: Mapping[int, fx.Node], later: Callable[[fx.Node], int]
) -> Chunk:
    """Return the chunk of the nodes in `body`, which delivers `group`; `later` says how long a result is read."""
    own = [node for node in body if node.target is not deliver]
    inside = set(own)
    used = dict.fromkeys(source for node in own for source in node.all_input_nodes if source not in inside)
    used.update(dict.fromkeys(node for node in group.values() if node not in inside))
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in used:
        copies[node] = graph.placeholder(node.name)
    for node in own:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    makes = [node for node in own if later(node) > 0]
    graph.output((*(copies[node] for node in makes), *(copies[node] for node in group.values())))
    return Chunk(
        run_of(fx.GraphModule(module, graph)),
        tuple(node.name for node in used),
        frozenset(node.name for node in used if later(node) <= 0),
        tuple(node.name for node in makes),
        tuple(group),
    )
