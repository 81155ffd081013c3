"""Which gradients of one captured graph leave early, and through which gates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from lowtide.capture.arrival_order import arrival_order
from lowtide.capture.deliveries import Deliveries, group
from lowtide.capture.program import is_tangent, output_node
from lowtide.distributed.gates import GatedStep, Gates
from lowtide.distributed.replicas import Buckets
from lowtide.errors import warn
from lowtide.pytorch.compiler.joint_graph import JointGraph, RunnableStep


@dataclass
class Doors:
    """The way out of one captured graph for its gradients.

    Attributes:
        replica: Whose buckets wait for them; without one, they leave as usual.
        module: The traced forward.
        inputs: Its inputs.
    """

    replica: Buckets | None
    module: fx.GraphModule
    inputs: Sequence[Any]
    _order: tuple[int, ...] = ()
    _groups: tuple[tuple[int, ...], ...] = field(default=())

    def deliveries(self, joint: JointGraph, *, whole: bool) -> Deliveries | None:
        """Return which gradients of the joint graph leave backward before it ends, or None.

        Those of a block of a step, which is not the `whole` of it, leave together at its end.

        They all do, one group after the other, or none: what the graph's node returns itself is there when the node has
        run, which is before the first gate.
        """
        if self.replica is None or not self._find_order(joint):
            return None
        differentiable = {position for position, each in enumerate(_gradients(joint)) if each is not None}
        if not whole or differentiable != set(self._order):
            return None
        sizes = {position: _bytes(self.inputs[position]) for position in self._order}
        self._groups = group(self._order, sizes)
        return Deliveries(self._groups, kept=not self.replica.keeps_views, copied_share=self._hook_share())

    def gated(self, step: RunnableStep) -> RunnableStep:
        """Return the step, which lets gradients leave through gates."""
        return step if self.replica is None else GatedStep(step)

    def call(self, graph: Callable[..., Any]) -> Callable[..., Any]:
        """Return what calls the compiled graph, with gates before it."""
        replica = self.replica
        if replica is None or not self._order:
            return graph
        return Gates(self._order, self._groups, lambda: replica.awaits_order).call(graph)

    def _hook_share(self) -> float:
        assert self.replica is not None
        memory = self.replica.hook_memory
        if memory is None:
            names = ", ".join(getattr(hook, "__name__", repr(hook)) for hook in self.replica.hooks)
            warn(
                f"What the communication hook {names} allocates is not known, so it comes on top of the planned peak. "
                "Known are allreduce_hook, fp16_compress_hook, bf16_compress_hook and powerSGD_hook."
            )
        return 0.0 if memory is None else memory.in_step

    def _find_order(self, joint: JointGraph) -> bool:
        """Find the order of the gradients of parameters; return True if there are any."""
        primals = [node for node in joint.module.graph.find_nodes(op="placeholder") if not is_tangent(node)]
        if len(primals) != len(self.inputs):
            # Inputs that are views of each other were taken together.
            return False
        gradients = _gradients(joint)
        wanted = {position for position in joint.parameters if gradients[position] is not None}
        found = [position for position in arrival_order(self.module, self.inputs) if position in wanted]
        self._order = (*found, *sorted(wanted.difference(found)))
        return bool(self._order)


def _gradients(joint: JointGraph) -> Sequence[Any]:
    outputs: Sequence[Any] = output_node(joint.module).args[0]  # type: ignore[assignment]
    return outputs[joint.num_forward_outputs :]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
