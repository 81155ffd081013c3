"""Code for a graph without compiling it: Inductor is left as soon as the text of its wrapper is there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.graph_compile import collect_fw_donated_buffer_idxs
from torch._guards import TracingContext
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V

Strides = tuple[int, ...] | None


@dataclass(frozen=True)
class Generated:
    """The code for one graph.

    Attributes:
        source: The text of the Python module that allocates, calls kernels and frees; "" if nothing is computed.
        strides: The strides of its results; None where they are as traced.
        constants: Tensors that the module refers to, by name.
    """

    source: str
    strides: tuple[Strides, ...]
    constants: Mapping[str, torch.Tensor]


class _CodeIsThere(BaseException):
    """Leaves Inductor."""

    def __init__(self, code: Generated) -> None:
        self.code = code


def generate(
    graph: fx.GraphModule,
    examples: Sequence[Any],
    options: Mapping[str, Any],
    *,
    visible: Sequence[int],
    donated: Sequence[int] | None = None,
) -> Generated:
    """Return the code that Inductor makes of `graph`, which is not changed.

    Args:
        graph: A forward or a backward graph.
        examples: Fake tensors for its inputs.
        options: Options of Inductor's.
        visible: Positions of the results whose layout must be as traced.
        donated: Positions of the inputs whose memory may be written over; given for a backward graph alone.
    """
    copied = copy_of(graph)
    next(reversed(copied.graph.find_nodes(op="output"))).meta["user_visible_output_idxs"] = list(visible)
    if not any(node.op == "call_function" for node in copied.graph.nodes):
        return Generated("", (), {})
    patched = config.patch({**options, "fx_graph_cache": False, "cpp_wrapper": False})
    with _leaving_at_code(), patched, _donating(donated):
        try:
            compile_fx_inner(copied, list(examples), is_backward=donated is not None)
        except _CodeIsThere as left:
            return left.code
    raise AssertionError("Inductor made no code")


def copy_of(module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a graph that may be changed; nodes keep their fake tensors."""
    graph = fx.Graph()
    output = graph.output(graph.graph_copy(module.graph, {}))
    output.meta = dict(next(reversed(module.graph.find_nodes(op="output"))).meta)
    return fx.GraphModule(module, graph)


def without_other_inputs(module: fx.GraphModule, positions: Sequence[int]) -> fx.GraphModule:
    """Return a graph like `module` that takes the inputs at `positions` alone; nothing reads the others."""
    count = len(module.graph.find_nodes(op="placeholder"))
    if len(positions) == count:
        return module
    kept = copy_of(module)
    placeholders = kept.graph.find_nodes(op="placeholder")
    for position in set(range(count)).difference(positions):
        kept.graph.erase_node(placeholders[position])
    kept.recompile()
    return kept


def donated_inputs(forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int) -> list[int]:
    """Return the positions of the saved tensors whose memory backward may write over: nobody else has them.

    Args:
        forward: Its results are the outputs, and behind them what is saved.
        backward: The backward graph.
        num_outputs: How many outputs there are.
    """
    results = [_fake(node) for node in results_of(forward)]
    inputs = [_fake(node) for node in forward.graph.find_nodes(op="placeholder")]
    gradients = [_fake(node) for node in results_of(backward)]
    return collect_fw_donated_buffer_idxs(inputs, results[:num_outputs], gradients, results[num_outputs:])


def results_of(module: fx.GraphModule) -> Sequence[Any]:
    """Return what a graph returns: nodes, None, or constants."""
    found: Any = next(reversed(module.graph.find_nodes(op="output"))).args[0]
    return list(found)


def _fake(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, fx.Node) else None


@contextmanager
def _leaving_at_code() -> Iterator[None]:
    before = GraphLowering.save_output_code
    GraphLowering.save_output_code = staticmethod(_leave)
    try:
        yield
    finally:
        GraphLowering.save_output_code = before


def _leave(source: str) -> None:
    lowering: Any = V.graph
    strides = tuple(map(_strides, lowering.graph_outputs))
    raise _CodeIsThere(Generated(source, strides, dict(lowering.constants)))


def _strides(result: Any) -> Strides:
    if not getattr(result, "has_tensor_output", lambda: False)():
        return None
    return tuple(int(stride) for stride in result.get_layout().stride)


@contextmanager
def _donating(positions: Sequence[int] | None) -> Iterator[None]:
    """Let Inductor know which inputs of a backward graph it may write over."""
    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    if positions is None or context is None:
        yield
        return
    context.fw_metadata = _Donated(list(positions))  # type: ignore[assignment]
    try:
        yield
    finally:
        context.fw_metadata = metadata


@dataclass
class _Donated:
    """The one note about a graph that Inductor asks for while it generates code."""

    bw_donated_idxs: list[int]
