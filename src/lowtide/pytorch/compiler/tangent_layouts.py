"""Layouts of tangents: AOTAutograd guesses them while it traces; here they are what arrives.

It traces backward with tangents (the gradients of the graph's outputs) in the layout of the outputs, and copies what
arrives to that layout. Eager hands a gradient to its kernels as it is, and they add up in an order that depends on the
layout. So the copies are switched off, and backward can be traced again for tangents in other layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dynamo.convert_frame import compile_lock
from torch._functorch._aot_autograd import graph_compile
from torch._functorch._aot_autograd.schemas import MemoryFormatMeta, PlainTensorMeta, ViewAndMutationMeta
from torch._guards import TracingContext, tracing
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lowtide.pytorch.fake_tensors import FakeTensor, fake_mode_of

# Strides of tangents, by their position.
Layouts = Mapping[int, tuple[int, ...]]


class _Anything:
    """A size or strides that all others are equal to."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


_ANYTHING: Any = _Anything()


def accept_any_layout(metadata: ViewAndMutationMeta) -> None:
    """Let AOTAutograd hand tangents over as they arrive; tensors that are made of tensors are left alone."""
    for meta in metadata.subclass_tangent_meta:
        if isinstance(meta, PlainTensorMeta):
            meta.memory_format = MemoryFormatMeta(size=_ANYTHING, stride=_ANYTHING)


@contextmanager
def tracing_tangents(layouts: Layouts) -> Iterator[None]:
    """Let AOTAutograd trace backward with tangents that have these strides."""
    module: Any = graph_compile
    trace = module.aot_dispatch_autograd_graph

    def trace_laid_out(*args: Any, fw_metadata: ViewAndMutationMeta, **kwargs: Any) -> Any:
        for position, strides in layouts.items():
            fw_metadata.traced_tangents[position] = _laid_out(fw_metadata.traced_tangents[position], strides)
        return trace(*args, fw_metadata=fw_metadata, **kwargs)

    module.aot_dispatch_autograd_graph = trace_laid_out
    try:
        yield
    finally:
        module.aot_dispatch_autograd_graph = trace


def _laid_out(tangent: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    with fake_mode_of(tangent):
        return torch.empty_strided(tangent.shape, strides, dtype=tangent.dtype, device=tangent.device)


@dataclass(frozen=True)
class TraceAgain:
    """What is needed to trace a graph a second time, while a backward pass runs; it holds no data.

    Attributes:
        module: The graph as Dynamo has traced it.
        inputs: Fake tensors, and other inputs as they are.
        modes: Enters the modes in which it was traced.
    """

    module: fx.GraphModule
    inputs: tuple[Any, ...]
    modes: Callable[[ExitStack], None]

    @classmethod
    def of(cls, module: fx.GraphModule, inputs: Sequence[Any]) -> TraceAgain | None:
        """Return what traces `module` again, or None if there are no fake tensors for its inputs."""
        nodes = module.graph.find_nodes(op="placeholder")
        fakes = [_fake_input(node, each) for node, each in zip(nodes, inputs, strict=True)]
        plain = [not isinstance(each, torch.Tensor) or isinstance(each, FakeTensor) for each in fakes]
        if not all(plain) or not any(isinstance(each, FakeTensor) for each in fakes):
            return None
        return cls(_without_data(module), tuple(fakes), _present_modes({each.device.type for each in _tensors(fakes)}))

    @contextmanager
    def surroundings(self, layouts: Layouts) -> Iterator[None]:
        """Make it as if the compiler had just handed the graph over."""
        mode = fake_mode_of(_tensors(self.inputs)[0])
        with ExitStack() as stack:
            # The compiler traces one graph at a time; other threads may be tracing theirs.
            stack.enter_context(compile_lock)
            # Otherwise their calls of compiled models would be taken for a part of what is traced here.
            stack.enter_context(torch.compiler._compile_session_context())
            stack.enter_context(tracing(TracingContext(mode)))
            stack.enter_context(tracing_tangents(layouts))
            self.modes(stack)
            yield


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    return [each for each in values if isinstance(each, torch.Tensor)]


def _fake_input(node: fx.Node, given: Any) -> Any:
    if not isinstance(given, torch.Tensor) or isinstance(given, FakeTensor) or is_traceable_wrapper_subclass(given):
        return given
    return node.meta.get("example_value", given)


def _without_data(module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy whose nodes do not refer to the tensors of the call that was traced."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(module.graph, copies))
    copied = fx.GraphModule(module, graph)
    copied.meta = dict(module.meta)
    for node, made in ((module, copied), *((node, copies[node]) for node in module.graph.find_nodes(op="placeholder"))):
        for name, value in vars(node).items():
            if not hasattr(made, name):
                setattr(made, name, value)
    for made in copies.values():
        made.meta.pop("grapharg", None)
        if made.op != "placeholder":
            # It has an autograd graph, which holds the numbers that ops take as real tensors.
            made.meta.pop("example_value", None)
    return copied


def _present_modes(kinds: set[str]) -> Callable[[ExitStack], None]:
    """Return what enters the modes that are on now and change what is traced; `kinds` are types of devices."""
    casts = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in sorted(kinds)}
    cached, dtype = torch.is_autocast_cache_enabled(), torch.get_default_dtype()

    def enter(stack: ExitStack) -> None:
        stack.enter_context(torch.enable_grad())
        for kind, (enabled, kind_dtype) in casts.items():
            stack.enter_context(torch.autocast(kind, kind_dtype, enabled, cached))
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(dtype)

    return enter
