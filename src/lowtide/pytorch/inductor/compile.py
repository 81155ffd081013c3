"""Inductor as a compiler of both halves of a step: its joint graph is cut in two by us, and its code is run by us."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.output_code import CompiledFxGraph

from lowtide.errors import UnsupportedTorchError
from lowtide.pytorch.compiler.joint_graph import JointGraph, Run
from lowtide.pytorch.inductor.generate import Generated, without_other_inputs

Options = Mapping[str, Any]


class PlannedCompilation(Protocol):
    """What cuts a joint graph in two and takes the code of the halves."""

    def split(self, joint: JointGraph) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return the forward and the backward graph of a joint graph."""

    @property
    def identity(self) -> str:
        """A text that is another one for every way to cut and to compile: Inductor's caches are keyed by it."""

    def options_of(self, *, is_backward: bool) -> Options:
        """Return the options of Inductor's for a half, known once the graph is cut."""

    def forward_run(self, code: Generated, examples: Sequence[Any], run: Run) -> Run:
        """Return what runs forward, given its code, fake inputs, and what runs that code."""

    def backward_run(self, code: Generated, examples: Sequence[Any], run: Run) -> Run:
        """Return the same for backward."""

    def remaining_inputs(self, graph: fx.GraphModule) -> Sequence[int]:
        """Return the positions of the inputs of a backward graph that come; code is made for those alone."""


class _Partitioner(CustomPartitionerFn):
    """Hands Inductor's joint graph over; Inductor copies and pickles its configuration, and this is a part of it."""

    def __init__(self, compilation: PlannedCompilation) -> None:
        self.compilation = compilation

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        del joint_inputs
        parameters = tuple(kwargs.get("static_lifetime_input_indices") or ())
        return self.compilation.split(JointGraph(gm, kwargs["num_fwd_outputs"], parameters))

    def uuid(self) -> str:
        return self.compilation.identity

    def __deepcopy__(self, memo: Any) -> _Partitioner:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (self.uuid(),)


def compile_planned(
    module: fx.GraphModule, inputs: Sequence[Any], compilation: PlannedCompilation
) -> Callable[..., Any]:
    """Return what runs `module`, differentiably, by Inductor's code for the halves that `compilation` makes.

    Args:
        module: A graph as Dynamo has traced it.
        inputs: Its inputs.
        compilation: Cuts the joint graph in two and takes the code.
    """

    def compile_half(graph: fx.GraphModule, examples: Sequence[Any], **arguments: Any) -> Run:
        if arguments.get("is_inference"):
            found: Run = compile_fx_inner(graph, examples, **arguments)
            return found
        is_backward = bool(arguments.get("is_backward"))
        come = compilation.remaining_inputs(graph) if is_backward else range(len(examples))
        kept, chosen = without_other_inputs(graph, come), [examples[position] for position in come]
        with config.patch(dict(compilation.options_of(is_backward=is_backward))):
            compiled = compile_fx_inner(kept, chosen, **arguments)
        make = compilation.backward_run if is_backward else compilation.forward_run
        return _boxed(make(_code_of(compiled), chosen, compiled))

    patches = {"custom_partitioner_fn": _Partitioner(compilation), "cpp_wrapper": False}
    with functorch_config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True):
        compiled: Any = compile_fx(module, list(inputs), compile_half, config_patches=patches)  # type: ignore[arg-type]
    found: Callable[..., Any] = compiled
    return found


def _boxed(run: Run) -> Run:
    def boxed(args: list[Any]) -> Any:
        return run(args)

    boxed._boxed_call = True  # type: ignore[attr-defined]
    return boxed


def _code_of(compiled: object) -> Generated:
    """Return the code of a compiled graph; a graph that computes nothing has none."""
    if not isinstance(compiled, CompiledFxGraph):
        return Generated("", (), {})
    return Generated(compiled.source_code, (), dict(compiled.constants or {}))


def is_generator_of(device: torch.device) -> bool:
    """Return True if the code for `device` is of the kind that can be read here."""
    return device.type == "cpu" and not config.cpp_wrapper


def check_toolchain() -> None:
    """Raise `UnsupportedTorchError` if Inductor finds no C++ compiler."""
    try:
        get_cpp_compiler()
    except Exception as error:  # It raises what its search meets, besides an error of its own.
        raise UnsupportedTorchError(
            f'engine="inductor" needs a C++ compiler, because PyTorch compiles the code it generates, and none was '
            f"found (torch._inductor.config.cpp.cxx is {config.cpp.cxx!r}: {type(error).__name__}). Install one, such "
            "as g++ (`apt install g++`, `dnf install gcc-c++`) or clang (`xcode-select --install`), or name it in the "
            "environment variable CXX. The exact engine, which is the default, needs none: leave engine out."
        ) from error
