"""Gradients of a graph's inputs as eager adds them up: read by read.

Eager adds to the gradient of a value the shares of those that read it, the last reader's first. A graph that reads an
input several times would hand over the sum of its own shares. If a later graph, or Python code in between, reads the
same value too, the terms are then grouped in another way than in eager, and the last bits differ. Therefore each read
of such an input gets an input of its own, a view of the first: every share goes to autograd by itself, and autograd
adds them in eager's order.

Parameters are left alone: the shares of all of their readers would have to be kept until the graph's backward ends.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lowtide.pytorch.nested import tensor_leaves, tree_flatten, tree_unflatten
from lowtide.pytorch.ops import takes_graphs
from lowtide.pytorch.tensor_versions import version_of


@dataclass(frozen=True)
class SeparatedReads:
    """A graph in which reads have inputs of their own, behind the others.

    Attributes:
        module: The graph.
        viewed: For each added input, the position of the input that it is a view of.
        examples: Fake tensors for the added inputs.
    """

    module: fx.GraphModule
    viewed: tuple[int, ...] = ()
    examples: tuple[torch.Tensor, ...] = ()

    def call(self, graph: Callable[..., Any]) -> Callable[..., Any]:
        """Return `graph`, which is this one compiled, to be called without the added inputs."""

        def run(*args: Any) -> Any:
            return graph(*args, *(_view(args[position]) for position in self.viewed))

        return run if self.viewed else graph


def separate_reads(module: fx.GraphModule) -> SeparatedReads:
    """Return the graph with an input for every read of an input that is computed elsewhere; or as it is."""
    placeholders = module.graph.find_nodes(op="placeholder")
    readers = {position: _readers(node) for position, node in enumerate(placeholders) if _is_computed(node)}
    shared = {position: found for position, found in readers.items() if _can_be_separated(found)}
    if not shared or not torch.is_grad_enabled():
        return SeparatedReads(module)
    copied, copies = _copy(module)
    last = copies[placeholders[-1]]
    viewed: list[int] = []
    examples: list[torch.Tensor] = []
    for position, found in shared.items():
        original = placeholders[position]
        inputs = []
        for _ in range(sum(reader.reads for reader in found) - 1):
            with copied.graph.inserting_after(last):
                last = copied.graph.placeholder(f"{original.name}_{len(viewed)}")
            last.meta["example_value"] = _view(original.meta["example_value"])
            for name in _notes(original, last):
                setattr(last, name, None)
            inputs.append(last)
            viewed.append(position)
            examples.append(last.meta["example_value"])
        # What the graph gives back for the input itself arrives before what goes through a view, the newest view first.
        following = iter([*inputs, copies[original]])
        for reader in found:
            _hand_out(reader, copies[reader.node], [next(following) for _ in range(reader.reads)])
    copied.recompile()
    return SeparatedReads(copied, tuple(viewed), tuple(examples))


def _copy(module: fx.GraphModule) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """Return a copy, with what the compiler has noted at the graph and its inputs, and where the nodes have gone."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(module.graph, copies))
    copied = fx.GraphModule(module, graph)
    copied.meta = dict(module.meta)
    for one, other in ((module, copied), *((node, copies[node]) for node in module.graph.find_nodes(op="placeholder"))):
        for name, value in _notes(one, other).items():
            setattr(other, name, value)
    return copied, copies


def _notes(one: Any, other: Any) -> dict[str, Any]:
    """Return the attributes that `one` has been given and `other` lacks."""
    return {name: value for name, value in vars(one).items() if not hasattr(other, name)}


def _view(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view_as(tensor)


def _is_computed(node: fx.Node) -> bool:
    """Whether the input is a result that others may read too, and that nothing in the graph writes to."""
    example = node.meta.get("example_value")
    if not isinstance(example, torch.Tensor) or example.is_leaf:
        return False
    return example.requires_grad and version_of(example) == 0


@dataclass(frozen=True)
class _Reader:
    """A node that reads a value: which of the nodes among its arguments are the value, and how many reads these are.

    There are 0 reads if their number is not known.
    """

    node: fx.Node
    places: tuple[int, ...]
    reads: int


def _readers(node: fx.Node) -> list[_Reader]:
    """Return what reads the value of `node` and gives a gradient, in the graph's order.

    What returns its very argument (`x.float()` of a float) does not read it; those that read the result do.
    """
    same = {node}
    found: list[_Reader] = []
    for reader in node.graph.nodes:
        if reader.op == "output" or not same.intersection(reader.all_input_nodes):
            continue
        if _is_same(reader.meta.get("example_value"), node.meta["example_value"]):
            same.add(reader)
        elif _tensors_with_gradient(reader.meta.get("example_value")):
            places = tuple(index for index, source in enumerate(_sources(reader)) if source in same)
            found.append(_Reader(reader, places, _count_reads(reader, places)))
    return found


def _can_be_separated(readers: Sequence[_Reader]) -> bool:
    """Whether there are several reads, and all are known: else the sum of some would be a share among single ones."""
    return all(reader.reads for reader in readers) and sum(reader.reads for reader in readers) > 1


def _is_same(value: Any, original: torch.Tensor) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    return value.grad_fn is original.grad_fn and value.output_nr == original.output_nr


def _tensors_with_gradient(value: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tensor_leaves(value) if tensor.requires_grad]


def _sources(reader: fx.Node) -> list[fx.Node]:
    """Return the nodes among the arguments, those in nested ones too, as often as they are there."""
    found: list[fx.Node] = []
    fx.node.map_arg((reader.args, reader.kwargs), found.append)
    return found


def _with_sources(reader: fx.Node, sources: Iterable[Any]) -> tuple[Any, Any]:
    """Return the arguments with `sources` in the place of the nodes among them."""
    following = iter(sources)
    return fx.node.map_arg((reader.args, dict(reader.kwargs)), lambda _: next(following))


def _exchanged(items: Sequence[Any], places: Sequence[int], item: Any) -> list[Any]:
    return [item if index in places else each for index, each in enumerate(items)]


def _count_reads(reader: fx.Node, places: Sequence[int]) -> int:
    """Return how often autograd sees the arguments at `places` read, or 0 if that is not known.

    A function of several ops may read one several times, such as `F.rms_norm(x)`. It is tried out on tensors without
    data.
    """
    call = _call_of(reader)
    examples = [source.meta.get("example_value") for source in _sources(reader)]
    if call is None or any(example is None for example in examples):
        # What writes to another argument is one op.
        return int(len(places) == 1 and not takes_graphs(reader.target))
    twin = _detached(examples[places[0]])
    args, kwargs = _with_sources(reader, _exchanged(examples, places, twin))
    accumulator = torch.autograd.graph.get_gradient_edge(twin).node
    return max(1, _edges(_tensors_with_gradient(call(*args, **kwargs)), accumulator).total())


def _detached(example: Any) -> torch.Tensor:
    twin: torch.Tensor = example.detach()
    return twin.requires_grad_()


def _call_of(reader: fx.Node) -> Callable[..., Any] | None:
    """Return what the node calls, or None if it cannot be tried out: it runs graphs, or writes to arguments."""
    name = reader.target if isinstance(reader.target, str) else getattr(reader.target, "__name__", "_")
    if name.endswith("_") or name in ("setitem", *_IN_PLACE) or "out" in reader.kwargs:
        return None
    if takes_graphs(reader.target):
        return None
    if reader.op == "call_method":
        return lambda own, *args, **kwargs: getattr(own, name)(*args, **kwargs)
    return reader.target if reader.op == "call_function" else None  # type: ignore[return-value]


_IN_PLACE = tuple(name for name in dir(operator) if name.startswith("i") and hasattr(operator, f"__{name}__"))


def _edges(results: Iterable[torch.Tensor], target: Any) -> Counter[Any]:
    """Return the autograd nodes between `results` and the node `target` that give to it, with how many edges."""
    found: Counter[Any] = Counter()
    pending = [torch.autograd.graph.get_gradient_edge(result).node for result in results]
    seen = {*pending}
    while pending:
        node = pending.pop()
        for source, _ in node.next_functions:
            if source == target:
                found[node] += 1
            elif source is not None and source not in seen:
                seen.add(source)
                pending.append(source)
    return found


def _hand_out(reader: _Reader, copied: fx.Node, inputs: list[fx.Node]) -> None:
    """Let the reader read `inputs`, the first for the read whose share eager adds last."""
    args, kwargs = _with_sources(copied, _exchanged(_sources(copied), reader.places, inputs[-1]))
    call = _call_of(reader.node)
    if call is None or len(inputs) == 1:
        copied.args, copied.kwargs = args, kwargs
        return
    copied.op, copied.target = "call_function", _reading_separately(call)
    copied.args, copied.kwargs = (inputs, list(args), kwargs), {}


def _reading_separately(call: Callable[..., Any]) -> Callable[..., Any]:
    def read_separately(inputs: list[torch.Tensor], args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Return what `call` returns, and give each of its reads of the last of `inputs` its share by itself."""
        shares: list[torch.Tensor] = []
        value = _Shares.apply(shares, *inputs)  # type: ignore[no-untyped-call]
        leaves, spec = tree_flatten((args, kwargs))
        args, kwargs = tree_unflatten([value if leaf is inputs[-1] else leaf for leaf in leaves], spec)
        result = call(*args, **kwargs)
        for node in _edges(_tensors_with_gradient(result), value.grad_fn) if value.requires_grad else ():
            places = [index for index, (source, _) in enumerate(node.next_functions) if source == value.grad_fn]
            node.register_hook(lambda given, _, places=places: shares.extend(_those(given, places)))
        return result

    return read_separately


def _those(given: Sequence[torch.Tensor | None], places: Sequence[int]) -> list[torch.Tensor]:
    found = (given[place] for place in places)
    return [share for share in found if share is not None]


class _Shares(torch.autograd.Function):
    """The inputs, which are all the same, as one; in backward, each gets one of the shares that have come."""

    @staticmethod
    def forward(ctx: Any, shares: list[torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        ctx.shares, ctx.count = shares, len(inputs)
        return inputs[-1].view_as(inputs[-1])

    @staticmethod
    def backward(ctx: Any, total: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        shares, ctx.shares = ctx.shares, None
        if len(shares) > ctx.count:  # it reads in another way than when it was tried out
            shares = [total]
        missing = [None] * (ctx.count - len(shares))
        return (None, *missing, *reversed(shares))
