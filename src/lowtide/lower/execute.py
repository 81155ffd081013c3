"""Running lowered graphs: boxed calling convention, so that arguments are freed as the graph uses them up."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.graph import _BoxedCodeGen

from lowtide.capture.program import is_tangent
from lowtide.errors import LowtideWarning

aten = torch.ops.aten

_RESHAPES = {aten.reshape.default, aten.view.default, aten._unsafe_view.default}
_SAME_SHAPE = {*_RESHAPES, aten.expand.default}
# A detach is traced as itself or, from PyTorch 2.15 on, as an alias.
_SAME_TENSOR = {aten.detach.default, aten.alias.default}
_VIEWS = {*_SAME_SHAPE, *_SAME_TENSOR, aten.t.default}
_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    aten._softmax.default: torch._softmax,
    aten._unsafe_view.default: torch.reshape,
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
        source = node.args[0]
    same = _replacement(node, source)
    # What is returned must stay a tensor of its own: two results that are one object would share what happens to them.
    if same is not None and all(isinstance(user.target, torch._ops.OpOverload) for user in node.users):
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


_VARIANTS = "lowtide_variants"
_AROUND = "lowtide_around"
_MOST_FRAMES = 12

Builder = Callable[[frozenset[int]], fx.GraphModule]
Run = Callable[[list[Any]], Any]
Around = Callable[[Run, list[Any]], Any]


def boxed(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
    """Return a function that takes the list of arguments, empties it, and runs `module` op by op."""
    del example_inputs
    forward, around = _generate(module), module.meta.get(_AROUND)

    def run(args: list[Any]) -> Any:
        return forward(args) if around is None else around(forward, args)

    run._boxed_call = True  # type: ignore[attr-defined]
    _allow_retain_graph()
    return run


def boxed_forward(
    module: fx.GraphModule, example_inputs: Sequence[Any], *, on_run: Callable[[Any], None]
) -> Callable[[list[Any]], Any]:
    """Return the same as `boxed` for a forward graph; `on_run` is told of each run, with its autograd node or None."""
    plain = boxed(module, example_inputs)

    def run(args: list[Any]) -> Any:
        on_run(_autograd_node())
        return plain(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _autograd_node() -> Any:
    """Return the node of the autograd function whose forward is running, or None where it cannot be seen.

    AOTAutograd calls us from inside that forward and does not pass its context on; it is on the stack.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return None
        context = frame.f_locals.get("ctx")
        if isinstance(context, torch.autograd.function.BackwardCFunction):
            return context
        frame = frame.f_back
    return None


def boxed_backward(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
    """Return the same as `boxed` for a backward graph, which is made for certain tangents to come and others not to.

    Where others are missing, a variant of the graph is built that computes what autograd would then compute.
    """
    usual = boxed(module, example_inputs)
    if _VARIANTS not in module.meta:
        return usual
    silenced, build = module.meta[_VARIANTS]
    num_tangents = sum(is_tangent(node) for node in module.graph.find_nodes(op="placeholder"))
    runners: dict[frozenset[int], Callable[[list[Any]], Any]] = {silenced: usual}

    def run(args: list[Any]) -> Any:
        first = len(args) - num_tangents
        missing = frozenset(index for index in range(num_tangents) if args[first + index] is None)
        if missing not in runners:
            if not silenced <= missing:
                _warn_of_unplanned_gradient()
            runners[missing] = boxed(build(missing), example_inputs)
        return runners[missing](args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def run_around(module: fx.GraphModule, around: Around) -> fx.GraphModule:
    """Return `module`, of which every run is left to `around`, with the run and its arguments; the last goes first."""
    within = module.meta.get(_AROUND)
    module.meta[_AROUND] = around if within is None else _Nested(around, within)
    return module


@dataclass(frozen=True)
class _Nested:
    """One way to run a module around another."""

    outer: Around
    inner: Around

    def __call__(self, run: Run, args: list[Any]) -> Any:
        return self.outer(lambda args: self.inner(run, args), args)


def with_variants(backward: fx.GraphModule, silenced: frozenset[int], build: Builder) -> fx.GraphModule:
    """Return `backward`, made for the tangents at `silenced` to be missing, with a way to build it for others."""
    backward.meta[_VARIANTS] = (silenced, build)
    return backward


def _generate(module: fx.GraphModule) -> Callable[..., Any]:
    module = quicken(module)
    module.graph.set_codegen(_BoxedCodeGen())
    module.recompile()
    return module.forward


def _warn_of_unplanned_gradient() -> None:
    warnings.warn(
        "A gradient came for an output that is not the loss, so this step runs another backward than the planned one "
        "and its peak is not guaranteed. Return only what the loss is computed from, or compute the whole loss inside.",
        LowtideWarning,
        stacklevel=2,
    )


def _allow_retain_graph() -> None:
    """Tell AOTAutograd that no saved tensor is written over, so that backward may run again on a retained graph."""
    context = torch._guards.TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []
