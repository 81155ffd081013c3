"""A joint graph without the gradients that will not come.

A model that returns its loss and more (logits, hidden states) is differentiated through the loss alone, as a rule. The
joint graph nevertheless has a tangent for every output, and PyTorch would fill the missing ones with zeros as large as
the outputs. Here such tangents are taken to be zero and what depends on nothing else is removed, as plain autograd
never computes it.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx

from lowtide.capture.program import is_tangent, output_node
from lowtide.pytorch.fake_tensors import FakeTensor, fake_mode_of
from lowtide.pytorch.nested import tree_leaves

aten = torch.ops.aten


def unlikely_tangents(module: fx.GraphModule) -> frozenset[int]:
    """Return the positions of tangents that will probably not come: those of tensors, if there is one of a scalar."""
    fakes = [node.meta["val"] for node in tangents_of(module)]
    sizes = [fake.numel() if isinstance(fake, torch.Tensor) else None for fake in fakes]
    unlikely = (index for index, size in enumerate(sizes) if size not in (1, None))
    return frozenset(unlikely) if 1 in sizes else frozenset()


def tangents_of(module: fx.GraphModule) -> list[fx.Node]:
    """Return the placeholders of tangents, in order."""
    return [node for node in module.graph.find_nodes(op="placeholder") if is_tangent(node)]


def without_tangents(module: fx.GraphModule, missing: Collection[int]) -> fx.GraphModule:
    """Return a copy of the joint graph in which the tangents at `missing` are zero and used by nothing."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    outputs = graph.graph_copy(module.graph, copies)
    result = graph.output(outputs)
    result.meta = copy.copy(output_node(module).meta)
    tangents = tangents_of(module)
    zeros = _ZeroPropagation(graph, {copies[tangents[index]] for index in missing})
    zeros.run()
    retrace(graph, zeros.stale)
    return fx.GraphModule(module, graph)


class _ZeroPropagation:
    """Propagates zeros through backward; every backward op is linear in the gradients it reads."""

    def __init__(self, graph: fx.Graph, zeros: set[fx.Node]) -> None:
        self.graph = graph
        self.zeros = zeros
        self.gradients = {node for node in graph.nodes if is_tangent(node)}
        # Nodes that read a tensor in another layout than when they were traced.
        self.stale: set[fx.Node] = set()

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if node.op == "output":
                continue
            sources = [source for source in node.all_input_nodes if source in self.gradients]
            if sources:
                self.gradients.add(node)
                self._visit(node, sources)
        result = next(reversed(self.graph.find_nodes(op="output")))
        result.args = (tuple(None if item in self.zeros else item for item in result.args[0]),)
        for node in reversed(list(self.graph.nodes)):
            if node in self.zeros and node.op != "placeholder":
                self.graph.erase_node(node)

    def _visit(self, node: fx.Node, sources: list[fx.Node]) -> None:
        zeros = [source for source in sources if source in self.zeros]
        if len(zeros) == len(sources):
            self.zeros.add(node)
        elif zeros and not self._pass_on(node):
            for source in zeros:
                self._fill_with_zeros(node, source)

    def _pass_on(self, node: fx.Node) -> bool:
        """Replace a sum of a gradient and a zero by the gradient, where that changes neither shape nor type.

        The gradient may have another layout than the sum had; what is computed from it then has, too, as in eager.
        """
        if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
            return False
        (other,) = [source for source in node.args if source not in self.zeros]
        if not isinstance(other, fx.Node) or not _is_alike(other.meta["val"], node.meta["val"]):
            return False
        if other.meta["val"].stride() != node.meta["val"].stride():
            self.stale.update(user for user in node.users if user.op != "output")
        self.stale.discard(node)
        node.replace_all_uses_with(other)
        self.gradients.add(other)
        self.graph.erase_node(node)
        return True

    def _fill_with_zeros(self, node: fx.Node, source: fx.Node) -> None:
        """Give an op that needs the tensor a real one full of zeros."""
        if not isinstance(source.meta.get("val"), torch.Tensor):
            raise ValueError(f"{node.name} reads several results of {source.name}, of which none will come")
        like: torch.Tensor = source.meta["val"]
        kwargs: dict[str, Any] = {"dtype": like.dtype, "device": like.device, "pin_memory": False}
        with self.graph.inserting_before(node):
            filled = self.graph.call_function(aten.zeros.default, (list(like.shape),), kwargs)
        filled.meta = copy.copy(node.meta)
        with fake_mode_of(like):
            filled.meta["val"] = aten.zeros.default(list(like.shape), **kwargs)
        node.replace_input_with(source, filled)


def _is_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype


def retrace(graph: fx.Graph, stale: Collection[fx.Node]) -> None:
    """Compute the fake results of `stale` nodes, and of all that follow from them, a second time."""
    pending = set(stale)
    for node in graph.nodes:
        if node.op != "call_function" or not (node in pending or pending.intersection(node.all_input_nodes)):
            continue
        pending.add(node)
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda source: source.meta["val"])
        fakes = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor)]
        with fake_mode_of(fakes[0]) if fakes else nullcontext():
            try:
                node.meta["val"] = node.target(*args, **kwargs)
            except RuntimeError:
                if node.target is not aten.view.default:
                    raise
                node.target = aten.reshape.default
                node.meta["val"] = aten.reshape.default(*args, **kwargs)
