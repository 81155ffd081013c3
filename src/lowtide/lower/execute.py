"""Running lowered graphs: quickly, observed, and with another backward where other gradients come than planned."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from lowtide.capture.arrived_gradients import Arrived, TracedGradients
from lowtide.capture.program import Program
from lowtide.errors import LowtideWarning
from lowtide.lower.chunks import ChunkedBackward, Observer, cut, in_one_piece
from lowtide.lower.emit_graphs import Lowered
from lowtide.pytorch.compiler.joint_graph import Run, run_of
from lowtide.pytorch.ops import SOFTMAX, UNSAFE_VIEW, is_op, softmax
from lowtide.pytorch.running_autograd import node_of_running_graph

aten = torch.ops.aten

_RESHAPES = {aten.reshape.default, aten.view.default, UNSAFE_VIEW}
_SAME_SHAPE = {*_RESHAPES, aten.expand.default}
# A detach is traced as itself or, from PyTorch 2.15 on, as an alias.
_SAME_TENSOR = {aten.detach.default, aten.alias.default}
_VIEWS = {*_SAME_SHAPE, *_SAME_TENSOR, aten.t.default}
_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    SOFTMAX: softmax,
    UNSAFE_VIEW: torch.reshape,
    aten.add.Tensor: torch.add,
    aten.addmm.default: torch.addmm,
    aten.bmm.default: torch.bmm,
    aten.cat.default: torch.cat,
    aten.div.Tensor: torch.div,
    aten.exp.default: torch.exp,
    aten.expand.default: Tensor.expand,
    aten.mm.default: torch.mm,
    aten.mul.Tensor: torch.mul,
    aten.native_layer_norm.default: torch.native_layer_norm,
    aten.permute.default: torch.permute,
    aten.relu.default: torch.relu,
    aten.reshape.default: torch.reshape,
    aten.sigmoid.default: torch.sigmoid,
    aten.sub.Tensor: torch.sub,
    aten.sum.dim_IntList: torch.sum,
    aten.t.default: torch.t,
    aten.tanh.default: torch.tanh,
    aten.transpose.int: torch.transpose,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.view.default: Tensor.view,
}


def quicken(module: fx.GraphModule) -> fx.GraphModule:
    """Return a module that computes the same as `module` and is quicker to run; `module` is not changed."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in list(graph.nodes):
        if node.target in _VIEWS:
            _shorten(node)
    for node in reversed(list(graph.nodes)):
        if node.target in _VIEWS and not node.users:
            graph.erase_node(node)
        elif node.target in _FUNCTIONS and not node.kwargs:
            node.target = _FUNCTIONS[node.target]
    return fx.GraphModule(module, graph)


def _shorten(node: fx.Node) -> None:
    """Let the users of a view read what it is a view of, where that is the same tensor."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    if node.target in _RESHAPES and source.target in _RESHAPES:
        node.args = (source.args[0], *node.args[1:])
        source = source.args[0]
        assert isinstance(source, fx.Node)
    same = _replacement(node, source)
    # What is returned must stay a tensor of its own: two results that are one object would share what happens to them.
    if same is not None and all(is_op(user.target) for user in node.users):
        node.replace_all_uses_with(same)


def _replacement(node: fx.Node, source: fx.Node) -> fx.Node | None:
    if node.target in _SAME_TENSOR:
        return source
    if node.target is aten.t.default:
        return source.args[0] if source.target is aten.t.default else None  # type: ignore[return-value]
    shape, before = _shape(node), _shape(source)
    return source if shape is not None and shape == before else None


def _shape(node: fx.Node) -> tuple[int, ...] | None:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, Tensor) else None


def run_quickly(module: fx.GraphModule) -> Run:
    """Return what runs `module` op by op; it takes the list of arguments and empties it."""
    return run_of(quicken(module))


def backward_of(module: fx.GraphModule, program: Program, observers: Sequence[Observer] = ()) -> ChunkedBackward:
    """Return what runs the backward graph `module` of `program`, in chunks if it delivers gradients before it ends."""
    quick = quicken(module)
    if not program.deliveries:
        return in_one_piece(quick).observed(observers)
    names = {position: program.primals[position].name for position in program.delivered}
    return cut(quick, names).observed(observers)


@dataclass(frozen=True)
class LoweredVariant:
    """A captured graph lowered as one plan says, and how it is run.

    Attributes:
        lowered: The graphs.
        gradients: The tangents that the graph was traced with.
        planned: Those that the plan expects.
        program: The program for them.
        backward_for: Builds what runs the backward pass for others.
        observers: See the runs of the planned graphs; the last one is the outermost.
        on_forward: Is told of each forward run, with its autograd node or None.
    """

    lowered: Lowered
    gradients: TracedGradients
    planned: Arrived
    program: Program
    backward_for: Callable[[Arrived], ChunkedBackward]
    observers: tuple[Observer, ...]
    on_forward: Callable[[Any], None]

    @property
    def forward_graph(self) -> fx.GraphModule:
        """The graph of the forward pass."""
        return self.lowered.forward

    @property
    def backward_graph(self) -> fx.GraphModule:
        """The graph of the planned backward pass."""
        return self.lowered.backward

    def forward_run(self, graph: fx.GraphModule) -> Run:
        """Return what runs the forward graph."""
        observed = run_quickly(graph)
        for observer in self.observers:
            observed = partial(observer.forward, observed)

        def run(args: list[Any]) -> Any:
            self.on_forward(node_of_running_graph())
            return observed(args)

        return run

    def backward_run(self, graph: fx.GraphModule) -> Run:
        """Return what runs the backward graph, or another one if other tangents come than planned."""
        backward_for = self.choice(graph)
        return lambda args: backward_for(args).whole(args)

    def choice(self, graph: fx.GraphModule) -> Callable[[list[Any]], ChunkedBackward]:
        """Return what chooses the backward for given arguments: the planned one, if the planned tangents have come."""
        num_tangents = len(self.gradients.strides)
        runs: dict[Arrived, ChunkedBackward] = {self.planned: backward_of(graph, self.program, self.observers)}

        def choose(args: list[Any]) -> ChunkedBackward:
            arrived = self.gradients.read(args[len(args) - num_tangents :])
            if arrived not in runs:
                if not self.planned.missing <= arrived.missing:
                    _warn_of_unplanned_gradient()
                runs[arrived] = self.backward_for(arrived)
            return runs[arrived]

        return choose


def _warn_of_unplanned_gradient() -> None:
    warnings.warn(
        "A gradient came for an output that is not the loss, so this step runs another backward than the planned one "
        "and its peak is not guaranteed. Return only what the loss is computed from, or compute the whole loss inside.",
        LowtideWarning,
        stacklevel=2,
    )
