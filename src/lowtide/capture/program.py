"""The program: a joint fx graph, the `Graph` made of it, and the maps between the two."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from lowtide.capture.fused_op import Call, Made, in_sequence
from lowtide.graph.ir import Graph, OpId, ValueId
from lowtide.pytorch.ops import changes_its_input, is_op, op_name


@dataclass(frozen=True, slots=True)
class Tail:
    """A call that writes its result over an argument; see `capture.inplace_fusion`.

    Attributes:
        node: The call in the joint graph, where it makes a new tensor.
        over: The argument.
    """

    node: fx.Node
    over: fx.Node


@dataclass(frozen=True)
class Program:
    """A captured training step.

    Attributes:
        module: The joint graph: forward and backward in one.
        graph: Its ops and values.
        device: Where it runs; values elsewhere cost nothing.
        num_forward_outputs: How many of the joint graph's outputs belong to forward.
        calls: For every op its fx node; None for the arrival of the tangents, and for deliveries.
        owners: For every value the fx node that holds its storage first.
        values: For every fx node that is a tensor, the value whose storage it is or views.
        replays: For ops whose recomputation differs from their first run, what to call instead.
        tails: For ops of several calls, those behind the first, which write over what it made.
        parameters: Positions of the inputs that live as long as the model.
        deliveries: For ops that deliver gradients, the positions of the inputs that get them.
    """

    module: fx.GraphModule
    graph: Graph
    device: torch.device
    num_forward_outputs: int
    calls: tuple[fx.Node | None, ...]
    owners: tuple[fx.Node, ...]
    values: Mapping[fx.Node, ValueId]
    replays: Mapping[OpId, Call]
    tails: Mapping[OpId, tuple[Tail, ...]]
    parameters: frozenset[int]
    deliveries: Mapping[OpId, tuple[int, ...]] = field(default_factory=dict)

    @cached_property
    def delivered(self) -> frozenset[int]:
        """Positions of the inputs whose gradients leave backward before it ends."""
        return frozenset(position for group in self.deliveries.values() for position in group)

    @cached_property
    def primals(self) -> tuple[fx.Node, ...]:
        """Placeholders of forward, in order."""
        return tuple(node for node in self._placeholders if not is_tangent(node))

    @cached_property
    def objects(self) -> tuple[fx.Node, ...]:
        """Placeholders of forward that are no tensors and that something reads, in order."""
        return tuple(node for node in self.primals if node.users and not is_tensor(node))

    @cached_property
    def tangents(self) -> tuple[fx.Node, ...]:
        """Placeholders of backward: the gradients that arrive from outside, in order."""
        return tuple(node for node in self._placeholders if is_tangent(node))

    @cached_property
    def _placeholders(self) -> list[fx.Node]:
        return self.module.graph.find_nodes(op="placeholder")

    @cached_property
    def forward_outputs(self) -> tuple[Any, ...]:
        """What forward returns: fx nodes, None, or constants."""
        return self._outputs[: self.num_forward_outputs]

    @cached_property
    def handed_over(self) -> frozenset[int]:
        """Positions in `forward_outputs` of what is written into inputs when forward has ended, and dies then."""
        made = {k: self.values[node] for k, node in enumerate(self.forward_outputs) if node in self.values}
        kept = set(self.graph.outputs)
        return frozenset(
            position
            for position, value in made.items()
            if value not in kept and self.graph.values[value].producer is not None
        )

    @cached_property
    def backward_outputs(self) -> tuple[Any, ...]:
        """What backward returns: a gradient node or None for every primal."""
        return self._outputs[self.num_forward_outputs :]

    @cached_property
    def _outputs(self) -> tuple[Any, ...]:
        return tuple(output_node(self.module).args[0])  # type: ignore[arg-type]

    @cached_property
    def owned(self) -> Mapping[fx.Node, tuple[fx.Node, ...]]:
        """For every call node with a tuple result, its `getitem` nodes."""
        items: dict[fx.Node, list[fx.Node]] = {}
        for node in self.owners:
            if is_getitem(node):
                items.setdefault(node.args[0], []).append(node)  # type: ignore[arg-type]
        return {call: tuple(nodes) for call, nodes in items.items()}

    def call(self, op: OpId) -> Call | None:
        """Return target, args and kwargs of `op` with fake tensors in place of nodes.

        None if nothing is called or only a condition is checked, which costs nothing worth counting.
        """
        node = self.calls[op]
        if node is None or op_name(node.target).startswith("_assert"):
            return None
        return self._whole(op, (node.target, node.args, node.kwargs))  # type: ignore[arg-type]

    def replay_call(self, op: OpId) -> Call | None:
        """Return the same as `call`, for a recomputation of `op`."""
        return self._whole(op, self.replays[op]) if op in self.replays else self.call(op)

    def reads(self, op: OpId, *, replay: bool) -> Iterator[fx.Node]:
        """Yield the fx nodes that a first run or a recomputation of `op` reads."""
        node = self.calls[op]
        if node is None:
            return
        if replay and op in self.replays:
            _, args, kwargs = self.replays[op]
            yield from nodes_in((args, kwargs))
        else:
            yield from node.all_input_nodes
        made = self.graph.ops[op].outputs
        for tail in self.tails.get(op, ()):
            yield from (source for source in tail.node.all_input_nodes if self.values.get(source) not in made)

    def _whole(self, op: OpId, call: Call) -> Call:
        """Return `call`, the first one of `op`, and those of its tails as one, with fake tensors in place of nodes."""
        tails = self.tails.get(op, ())
        if not tails:
            return _with_values(call)
        made = self.graph.ops[op].outputs
        users = self.calls[op].users  # type: ignore[union-attr]
        index: dict[ValueId, Any] = {
            self.values[item]: item.args[1] for item in users if is_getitem(item) and item in self.values
        }

        def stand_in(source: fx.Node) -> Any:
            fake: Any = source.meta.get("val")
            value = self.values.get(source)
            return Made(index.get(value), fake) if value is not None and value in made else fake

        rest = [
            (tail.node.target, *fx.node.map_arg((tail.node.args, dict(tail.node.kwargs)), stand_in)) for tail in tails
        ]
        return in_sequence, (_with_values(call), *rest), {}


def is_tangent(node: fx.Node) -> bool:
    """Return True if `node` is a placeholder for a gradient that arrives from outside."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def is_tensor(node: fx.Node) -> bool:
    """Return True if `node` is a tensor; inputs may be other objects, such as the mesh of devices of a `DTensor`."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def is_getitem(node: fx.Node) -> bool:
    """Return True if `node` takes one result out of a tuple."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"


def is_mutable(node: fx.Node) -> bool:
    """Return True if `node` says that it writes into one of its arguments."""
    return changes_its_input(node.target)


def may_write(node: fx.Node) -> bool:
    """Return True if `node` may write into what it reads: its schema says so, or it has none."""
    known = is_op(node.target) or is_getitem(node)
    return node.op not in ("placeholder", "get_attr", "output") and (is_mutable(node) or not known)


def output_node(module: fx.GraphModule) -> fx.Node:
    """Return the output node of `module`."""
    found: fx.Node = next(reversed(module.graph.find_nodes(op="output")))
    return found


def nodes_in(structure: Any) -> list[fx.Node]:
    """Return the fx nodes inside nested arguments, each once, in order."""
    found: dict[fx.Node, None] = {}
    fx.node.map_arg(structure, lambda node: found.setdefault(node))
    return list(found)


def _with_values(call: Call) -> Call:
    target, args, kwargs = call
    return target, *fx.node.map_arg((args, dict(kwargs)), _value_of)


def _value_of(node: fx.Node) -> Any:
    """Return the fake tensor of `node`, or the graph that an op such as `cond` takes as an argument."""
    if node.op == "get_attr" and "val" not in node.meta:
        found = getattr(node.graph.owning_module, str(node.target), None)
        return found if isinstance(found, fx.GraphModule) else None
    return node.meta.get("val")
