"""AOTAutograd: it traces forward and backward into one joint graph and runs the two graphs that are made of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config
from torch._functorch._aot_autograd.descriptors import (
    InputMutationAOTOutput,
    SubclassGetAttrAOTInput,
    SubclassSizeAOTInput,
    SubclassStrideAOTInput,
)
from torch._inductor import config as inductor_config
from torch.fx.graph import _BoxedCodeGen

from lowtide.pytorch.compiler.tangent_layouts import Layouts, TraceAgain, accept_any_layout

# Inputs that are parts of one that is made of tensors.
_PARTS = (SubclassGetAttrAOTInput, SubclassSizeAOTInput, SubclassStrideAOTInput)

# A run takes its arguments as a list and empties it, so that they are freed as the graph uses them up.
Run = Callable[[list[Any]], Any]
Result = TypeVar("Result")


@dataclass(frozen=True)
class JointGraph:
    """Forward and backward in one graph.

    Attributes:
        module: The graph; every node carries its fake tensor in `meta["val"]`.
        num_forward_outputs: How many of its outputs belong to forward; the others are gradients of its inputs.
        parameters: Positions of the inputs that live as long as the model.
        retrace: Returns the graph for tangents at these positions to have these strides; None if that is not possible.
    """

    module: fx.GraphModule
    num_forward_outputs: int
    parameters: tuple[int, ...]
    retrace: Callable[[Layouts], JointGraph] | None = field(default=None, compare=False)


class RunnableStep(Protocol):
    """What a joint graph is made into: two graphs in AOTAutograd's calling convention, and how each is run."""

    @property
    def forward_graph(self) -> fx.GraphModule:
        """Takes the inputs; returns the outputs and what is saved."""

    @property
    def backward_graph(self) -> fx.GraphModule:
        """Takes what was saved and the tangents; returns a gradient or None for each input."""

    def forward_run(self, graph: fx.GraphModule) -> Run:
        """Return what runs the forward graph, given as AOTAutograd has completed it."""

    def backward_run(self, graph: fx.GraphModule) -> Run:
        """Return what runs the backward graph, given as AOTAutograd has completed it."""


def compile_step(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    lower: Callable[[JointGraph], RunnableStep],
    untrained: Callable[[fx.GraphModule], Run],
) -> Callable[..., Any]:
    """Return what runs `module`, differentiably, as the step that is made of its joint graph.

    Args:
        module: A graph as Dynamo has traced it.
        inputs: Its inputs.
        lower: Makes the step of the joint graph.
        untrained: Makes the run of a graph in which nothing needs a gradient.
    """
    # Graphs inside of the graph come first; the last one is the whole.
    steps: list[RunnableStep] = []
    again = TraceAgain.of(module, inputs)

    def partition(joint: JointGraph) -> tuple[fx.GraphModule, fx.GraphModule]:
        if again is not None and not steps:
            joint = replace(joint, retrace=_retracing(joint, again))
        steps.append(lower(joint))
        return steps[-1].forward_graph, steps[-1].backward_graph

    return _compile(
        module,
        inputs,
        partition=partition,
        forward=lambda graph: steps[-1].forward_run(graph),
        backward=lambda graph: steps[-1].backward_run(graph),
        untrained=untrained,
    )


def read_joint(module: fx.GraphModule, inputs: Sequence[Any], read: Callable[[JointGraph], Result]) -> Result | None:
    """Return what `read` makes of the joint graph of `module`, or None if nothing in it needs a gradient.

    AOTAutograd cannot be asked for the joint graph alone: the functions that export one refuse graphs that Dynamo made
    of models with parameters or that change their inputs. So it is left by an exception, which ends here.
    """
    results: list[Result] = []

    def partition(joint: JointGraph) -> tuple[fx.GraphModule, fx.GraphModule]:
        results.append(read(joint))
        raise _JointGraphRead

    try:
        _compile(module, inputs, partition=partition, forward=run_of, backward=run_of, untrained=run_of)
    except _JointGraphRead:
        return results[-1]
    return None


def _retracing(joint: JointGraph, again: TraceAgain) -> Callable[[Layouts], JointGraph]:
    """Return what makes the joint graph for tangents in other layouts, with the parameters of `joint`."""
    parameters = joint.parameters

    def retrace(layouts: Layouts) -> JointGraph:
        with again.surroundings(layouts):
            found = read_joint(again.module, again.inputs, lambda traced: traced)
        assert found is not None
        return replace(found, parameters=parameters)

    return retrace


class _JointGraphRead(Exception):  # noqa: N818 - a signal, not an error
    """Leaves AOTAutograd once the joint graph was read."""


def _compile(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    partition: Callable[[JointGraph], tuple[fx.GraphModule, fx.GraphModule]],
    forward: Callable[[fx.GraphModule], Run],
    backward: Callable[[fx.GraphModule], Run],
    untrained: Callable[[fx.GraphModule], Run],
) -> Callable[..., Any]:
    def split(
        joint: fx.GraphModule,
        joint_inputs: Any,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
        **_: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        del joint_inputs
        return partition(JointGraph(joint, num_fwd_outputs, _positions(joint, static_lifetime_input_indices or ())))

    compile_graph = aot_autograd(
        fw_compiler=_compiler(forward),
        bw_compiler=_compiler(backward),
        inference_compiler=_compiler(untrained),
        partition_fn=split,
    )
    # Eager runs backward without autocast unless the caller switches it on there.
    # Random numbers are drawn also where nothing reads them, as in eager: what is drawn next depends on it.
    with config.patch(backward_pass_autocast="off"), inductor_config.patch(fallback_random=True):
        compiled: Callable[..., Any] = compile_graph(module, inputs)
    return compiled


def _positions(joint: fx.GraphModule, inputs: Sequence[int]) -> tuple[int, ...]:
    """Return the positions of the joint graph's inputs that belong to these `inputs` of the function it was made of.

    A tensor that is made of tensors, such as a `DTensor`, is one input of the function and several of the graph: its
    parts, one after the other. Parts that are no tensors, such as a mesh of devices, are left out.
    """
    placeholders = joint.graph.find_nodes(op="placeholder")
    wholes = [_whole(node.meta.get("desc"), position) for position, node in enumerate(placeholders)]
    if not any(isinstance(node.meta.get("desc"), _PARTS) for node in placeholders):
        return tuple(inputs)
    number = {whole: count for count, whole in enumerate(dict.fromkeys(wholes))}
    return tuple(
        position
        for position, whole in enumerate(wholes)
        if number[whole] in inputs and isinstance(placeholders[position].meta.get("val"), torch.Tensor)
    )


def _whole(descriptor: Any, position: int) -> object:
    """Return what stands for the function's input of which an input of the graph is a part."""
    is_part = isinstance(descriptor, _PARTS)
    while isinstance(descriptor, _PARTS):
        descriptor = descriptor.base
    return descriptor if is_part else position


def _compiler(make_run: Callable[[fx.GraphModule], Run]) -> Callable[[fx.GraphModule, Any], Run]:
    """Return `make_run` as AOTAutograd calls it."""

    def compile_graph(graph: fx.GraphModule, example_inputs: Any) -> Run:
        del example_inputs
        made = make_run(graph)

        def run(args: list[Any]) -> Any:
            return made(args)

        run._boxed_call = True  # type: ignore[attr-defined]
        _correct_metadata()
        return run

    return compile_graph


def run_of(module: fx.GraphModule) -> Run:
    """Return what runs `module` op by op, by generated code that frees each tensor after its last use."""
    module.graph.set_codegen(_BoxedCodeGen())
    module.recompile()
    run: Run = module.forward
    return run


def _correct_metadata() -> None:
    """Tell AOTAutograd that backward may run again on a retained graph, and that it takes gradients as they come.

    No saved tensor is written over.
    """
    context = torch._guards.TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []
        accept_any_layout(context.fw_metadata)


def mutated_input(descriptor: Any) -> Any:
    """Return which input gets new contents from the output that `descriptor` describes, or None if it is no such."""
    return descriptor.mutated_input if isinstance(descriptor, InputMutationAOTOutput) else None
