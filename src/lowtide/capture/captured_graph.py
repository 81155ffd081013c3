"""One training graph of a call, captured: the programs that it can be planned as.

There is one program for every set of gradients that may come. They share the forward ops, so that one forward graph
can serve the backward of each.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from lowtide.capture.build_program import make_program
from lowtide.capture.program import Program
from lowtide.capture.unused_tangents import unlikely_tangents, without_tangents
from lowtide.errors import warn
from lowtide.pytorch.compiler.joint_graph import JointGraph


@dataclass(frozen=True)
class CapturedGraph:
    """A joint graph and its program.

    Attributes:
        joint: The joint graph, normalised.
        program: The program for all gradients to come.
        unlikely: Positions of the tangents that are not expected to come.
    """

    joint: JointGraph
    program: Program
    unlikely: frozenset[int]

    def without(self, missing: frozenset[int]) -> Program:
        """Return the program for the tangents at `missing` not to come; it has the forward ops of `program`."""
        if not missing:
            return self.program
        return _program(without_tangents(self.joint.module, missing), self.joint, like=self.program)


def capture(joint: JointGraph, *, losses_only: bool) -> CapturedGraph:
    """Return the captured graph of `joint`, whose module is normalised in place.

    Args:
        joint: As AOTAutograd has traced it.
        losses_only: Expect gradients for scalar outputs alone, where there are any.
    """
    if any(node.meta.get("recompute") is not None for node in joint.module.graph.nodes):
        warn(
            "The model checkpoints parts of itself (torch.utils.checkpoint). The budget decides instead: lowtide plans "
            "the whole graph as if it did not."
        )
    program = _program(joint.module, joint)
    return CapturedGraph(joint, program, unlikely_tangents(joint.module) if losses_only else frozenset())


def _program(module: fx.GraphModule, joint: JointGraph, like: Program | None = None) -> Program:
    return make_program(module, num_forward_outputs=joint.num_forward_outputs, parameters=joint.parameters, like=like)
