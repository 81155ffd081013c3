"""Inductor's joint graph as a program, and the two graphs that a schedule of it is compiled from.

Random numbers are drawn once, as seeds that are kept; what is computed from them may be computed again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from lowtide.capture.build_program import fold, refuse_unplannable
from lowtide.capture.program import Program
from lowtide.capture.unused_tangents import unlikely_tangents, without_tangents
from lowtide.errors import CaptureError
from lowtide.graph.ir import Op, OpId, ValueId
from lowtide.lower.emit_graphs import Emitter, descriptors_of, repeated_ops, saved_values
from lowtide.pytorch.compiler.joint_graph import JointGraph
from lowtide.pytorch.inductor.compile import is_generator_of
from lowtide.pytorch.ops import takes_graphs
from lowtide.schedule.steps import Schedule


def make_step_program(joint: JointGraph, missing: frozenset[int]) -> Program:
    """Return the program of a joint graph as Inductor has prepared it: with its decompositions and its rewrites.

    Nothing of it is normalised: the bits are to be those of Inductor's code.

    Args:
        joint: The joint graph.
        missing: Positions of the tangents that are taken not to come.
    """
    _refuse(joint)
    module = without_tangents(joint.module, missing) if missing else joint.module
    program = fold(module, num_forward_outputs=joint.num_forward_outputs, parameters=joint.parameters)
    if not is_generator_of(program.device):
        raise CaptureError(
            f'engine="inductor" reads the code that Inductor writes for the CPU, and this model computes on '
            f"{program.device}, or Inductor is set to write C++ (torch._inductor.config.cpp_wrapper). Use the exact "
            "engine, which is the default."
        )
    ops = tuple(map(_drawn_once, program.graph.ops))
    return replace(program, graph=replace(program.graph, ops=ops))


def missing_tangents(joint: JointGraph, *, losses_only: bool) -> frozenset[int]:
    """Return the positions of the tangents that are not expected to come."""
    return unlikely_tangents(joint.module) if losses_only else frozenset()


def _refuse(joint: JointGraph) -> None:
    refuse_unplannable(joint.module)
    nested = [str(node.target) for node in joint.module.graph.nodes if takes_graphs(node.target)]
    if nested:
        raise CaptureError(
            f'engine="inductor" does not plan ops that run graphs of their own, and this model has {nested[0]}. Use '
            "the exact engine, which is the default."
        )


def _drawn_once(op: Op) -> Op:
    """Return `op`, pinned if it draws from the random number generator.

    Inductor draws seeds in forward, and computes masks and noise from them and from their place: these may be computed
    again, and are the same. Other random ops have no seed.
    """
    return replace(op, pinned=op.pinned or "it draws random numbers", replay_bytes=0) if op.random else op


@dataclass(frozen=True)
class Halves:
    """The two graphs, in AOTAutograd's calling convention.

    Attributes:
        forward: Takes the primals; returns the outputs and what is saved.
        backward: Takes what was saved and the tangents; returns a gradient or None for every primal.
        saved: The values that are saved, in order.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    saved: tuple[ValueId, ...]


class _PlainEmitter(Emitter):
    """Emits nothing but ops: random ones are never repeated, and others' ops are not labelled."""

    def _emit_first(self, op: OpId, node: fx.Node) -> fx.Node:
        args, kwargs = self._arguments(node.args, node.kwargs)
        return self._copy(node, node.target, args, kwargs, again=False)


def lower_step(program: Program, schedule: Schedule) -> Halves:
    """Return the graphs that run `schedule`; the program is not changed."""
    saved = tuple(saved_values(program, schedule))
    return Halves(_forward(program, schedule, saved), _backward(program, schedule, saved), saved)


def _forward(program: Program, schedule: Schedule, saved: tuple[ValueId, ...]) -> fx.GraphModule:
    emitter = _PlainEmitter(program, repeated_ops(schedule))
    for node in program.primals:
        emitter.take(node)
    for op in schedule.forward:
        emitter.run(op)
    returned = [emitter.output(node) for node in program.forward_outputs]
    kept = [emitter.resolve(program.owners[value]) for value in saved]
    kept += [emitter.resolve(node) for node in program.objects]
    return emitter.finish((*returned, *kept), descriptors_of(program)[: len(returned)])


def _backward(program: Program, schedule: Schedule, saved: tuple[ValueId, ...]) -> fx.GraphModule:
    emitter = _PlainEmitter(program, repeated_ops(schedule), seen=set(schedule.forward))
    for value in saved:
        emitter.take(program.owners[value])
    for node in (*program.objects, *program.tangents):
        emitter.take(node)
    for op in schedule.backward:
        emitter.run(op)
    gradients: list[Any] = [emitter.output(node) for node in program.backward_outputs]
    return emitter.finish(tuple(gradients), descriptors_of(program)[program.num_forward_outputs :])
