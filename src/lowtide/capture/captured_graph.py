"""A captured graph and its programs: one for every set of gradients that may come.

They share the forward ops, so that one forward graph can serve the backward of each.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import fx

from lowtide.capture.arrived_gradients import Arrived, Layout, TracedGradients
from lowtide.capture.build_program import make_program
from lowtide.capture.deliveries import Deliveries
from lowtide.capture.normalise import keeping_kernels
from lowtide.capture.program import Program
from lowtide.capture.unused_tangents import unlikely_tangents, without_tangents
from lowtide.errors import UnsupportedBackwardError, warn
from lowtide.graph.ir import Graph, Value
from lowtide.pytorch.compiler.joint_graph import JointGraph
from lowtide.pytorch.dispatch_modes import without_modes


@dataclass(frozen=True)
class CapturedGraph:
    """A joint graph and its program.

    Attributes:
        joint: The joint graph, normalised.
        program: The program for all gradients to come.
        unlikely: Positions of the tangents that are not expected to come.
        deliveries: Which gradients leave before the end.
    """

    joint: JointGraph
    program: Program
    unlikely: frozenset[int]
    deliveries: Deliveries | None = None
    _retraced: dict[tuple[Layout, ...], JointGraph] = field(default_factory=dict, compare=False, repr=False)

    @property
    def gradients(self) -> TracedGradients:
        """The layouts of the tangents of `program`."""
        return TracedGradients.of([node.meta["val"] for node in self.program.tangents])

    @property
    def expected(self) -> Arrived:
        """The gradients that are expected to come, in the layouts of the trace."""
        return Arrived(self.unlikely)

    def arriving(self, arrived: Arrived) -> Program:
        """Return the program for other tangents than traced; it has the forward ops of `program`."""
        if not arrived.layouts:
            return self._without(self.joint, arrived.missing)
        if arrived.layouts not in self._retraced:
            # A backward pass is running, perhaps in a mode of the user's.
            with without_modes(), keeping_kernels():
                self._retraced[arrived.layouts] = self._retrace(arrived)
        return self._without(self._retraced[arrived.layouts], arrived.missing)

    def _without(self, joint: JointGraph, missing: frozenset[int]) -> Program:
        if not missing and joint is self.joint:
            return self.program
        module = without_tangents(joint.module, missing)
        return _program(module, joint, self.deliveries, like=self.program)

    def _retrace(self, arrived: Arrived) -> JointGraph:
        """Return the joint graph for tangents in other layouts, normalised; raise if its forward is another one."""
        joint = self.joint.retrace(arrived.strides) if self.joint.retrace is not None else None
        if joint is None or not has_same_forward(self.program, self._program_of(joint)):
            raise UnsupportedBackwardError(
                "Gradients of a planned graph came in another layout than that of its outputs (strides "
                f"{', '.join(str(list(each.strides)) for each in arrived.layouts)}), and its backward pass could not "
                "be traced again for them. Compute the whole loss inside of the model."
            )
        return joint

    def _program_of(self, joint: JointGraph) -> Program:
        return _program(joint.module, joint, self.deliveries, like=self.program)


def capture(joint: JointGraph, *, losses_only: bool, deliveries: Deliveries | None = None) -> CapturedGraph:
    """Return the captured graph of `joint`, whose module is normalised in place.

    Args:
        joint: As AOTAutograd has traced it.
        losses_only: Expect gradients for scalar outputs alone, where there are any.
        deliveries: Which gradients leave before the end.
    """
    if any(node.meta.get("recompute") is not None for node in joint.module.graph.nodes):
        warn(
            "The model checkpoints parts of itself (torch.utils.checkpoint). The budget decides instead: lowtide plans "
            "the whole graph as if it did not."
        )
    program = _program(joint.module, joint, deliveries)
    unlikely = unlikely_tangents(joint.module) if losses_only else frozenset()
    return CapturedGraph(joint, program, unlikely, deliveries)


def has_same_forward(one: Program, other: Program) -> bool:
    """Return True if two programs run the same forward ops on the same values, by their numbers."""
    first, second = one.graph, other.graph
    if first.boundary != second.boundary or one.num_forward_outputs != other.num_forward_outputs:
        return False
    return _forward_values(first) == _forward_values(second) and all(
        replace(first.ops[op], module="", source="") == replace(second.ops[op], module="", source="")
        for op in first.forward
    )


def _forward_values(graph: Graph) -> list[Value]:
    """Return the values that are there before backward, in order."""
    made = [value.producer is None or graph.is_forward(value.producer) for value in graph.values]
    return [value for value, early in zip(graph.values, made, strict=True) if early]


def _program(
    module: fx.GraphModule, joint: JointGraph, deliveries: Deliveries | None, like: Program | None = None
) -> Program:
    return make_program(
        module,
        num_forward_outputs=joint.num_forward_outputs,
        parameters=joint.parameters,
        like=like,
        deliveries=deliveries,
    )
