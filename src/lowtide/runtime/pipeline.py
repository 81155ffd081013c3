"""The road from a joint graph to what runs: capture, plan, choose variants, lower.

`lowtide.plan` takes the first two steps, `lowtide.wrap` takes all four.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lowtide.capture.build_program import CapturedGraph, capture
from lowtide.capture.program import Program
from lowtide.errors import UnsupportedBackwardError
from lowtide.graph.ir import ValueId
from lowtide.lower.emit_graphs import Lowered, lower, lower_backward, repeated_ops, saved_values
from lowtide.lower.execute import LoweredVariant, Observer
from lowtide.lower.read_checksums import InputChecksums
from lowtide.plan.core.result import Plan
from lowtide.pytorch.compiler.joint_graph import JointGraph
from lowtide.pytorch.dispatch_modes import without_modes
from lowtide.runtime.model_plans import Session
from lowtide.runtime.peak_watch import PeakWatch
from lowtide.schedule.expand import expand
from lowtide.schedule.steps import Schedule


def plan_joint(joint: JointGraph, session: Session, *, losses_only: bool) -> PlannedGraph:
    """Return the plan that `session` makes for a joint graph; nothing is lowered."""
    captured = capture(joint, losses_only=losses_only)
    return plan_graph(captured, session)


def lower_joint(joint: JointGraph, session: Session, *, losses_only: bool) -> LoweredVariant:
    """Return what runs a joint graph as `session` plans it."""
    captured = capture(joint, losses_only=losses_only)
    planned = plan_graph(captured, session)
    variants = choose_variants(planned)
    return lower_graph(planned, variants, session, losses_only=losses_only)


@dataclass(frozen=True)
class PlannedGraph:
    """A captured graph with a plan.

    Attributes:
        captured: The graph.
        missing: Positions of the tangents that the plan expects not to come.
        program: The program without them, for which the plan is.
        plan: The plan.
    """

    captured: CapturedGraph
    missing: frozenset[int]
    program: Program
    plan: Plan


def plan_graph(captured: CapturedGraph, session: Session) -> PlannedGraph:
    """Return the plan for the gradients that are expected to come.

    If others come, another backward runs. Being ready for it may keep bytes alive that the plan does not count; the
    graph is then planned for all gradients to come.
    """
    # A plan that the user gives may be one for all gradients.
    expected = frozenset() if session.is_given_for(captured.program) else captured.unlikely
    planned = _plan_without(captured, expected, session)
    if planned.missing and choose_variants(planned).extra_bytes:
        planned = _plan_without(captured, frozenset(), session)
    session.record(planned.plan)
    return planned


def _plan_without(captured: CapturedGraph, missing: frozenset[int], session: Session) -> PlannedGraph:
    program = captured.without(missing)
    # The compiler traces in fake mode; costs are measured on real tensors.
    with without_modes():
        return PlannedGraph(captured, missing, program, session.find_plan(program))


@dataclass(frozen=True)
class BackwardVariants:
    """The backward passes that can follow the planned forward pass: the planned one, and one for all gradients.

    Attributes:
        kept: What any other backward than the planned one may read of forward; it recomputes the rest.
        for_all: The schedule of the backward for all gradients.
        extra_bytes: What forward must save for it beyond what the plan counts.
    """

    kept: frozenset[ValueId]
    for_all: Schedule
    extra_bytes: int


def choose_variants(planned: PlannedGraph) -> BackwardVariants:
    """Return the backward passes that the forward of `planned` serves."""
    every = planned.captured.program
    kept = _kept_in_any_case(planned.program, planned.plan.schedule)
    for_all = expand(every.graph, kept)
    counted = saved_values(planned.program, planned.plan.schedule)
    extra = set(saved_values(every, for_all)).difference(counted, every.graph.outputs)
    values = [every.graph.values[value] for value in extra]
    return BackwardVariants(kept, for_all, sum(value.bytes for value in values if value.producer is not None))


def _kept_in_any_case(program: Program, schedule: Schedule) -> frozenset[ValueId]:
    """Return what the plan saves, and the random results of forward for which it keeps no generator state."""
    graph = program.graph
    replayed = repeated_ops(schedule)
    drawn = [op for op in graph.forward if graph.ops[op].random and op not in replayed]
    return frozenset([*saved_values(program, schedule), *(value for op in drawn for value in graph.ops[op].outputs)])


def lower_graph(
    planned: PlannedGraph, variants: BackwardVariants, session: Session, *, losses_only: bool
) -> LoweredVariant:
    """Return the graphs that run the plan, whose forward also serves the other backward passes."""
    captured, program, plan = planned.captured, planned.program, planned.plan
    lowered = lower(program, plan.schedule, (captured.program, variants.for_all))

    def backward_without(missing: frozenset[int]) -> torch.fx.GraphModule:
        other = captured.without(missing)
        return lower_backward(other, expand(other.graph, variants.kept), lowered.frame)

    def on_forward(node: Any) -> None:
        session.ran = True
        if node is not None:
            _prepare_backward(node, losses_only=losses_only)

    return LoweredVariant(lowered, planned.missing, backward_without, _observers(planned, lowered, session), on_forward)


def _observers(planned: PlannedGraph, lowered: Lowered, session: Session) -> tuple[Observer, ...]:
    watch = PeakWatch(planned.plan, planned.program, session.corrections)
    if not session.verifies:
        return (watch,)
    return watch, InputChecksums(planned.program, planned.plan.schedule, lowered.frame)


def _prepare_backward(node: Any, *, losses_only: bool) -> None:
    """Make the autograd node of a forward run behave as the plan expects."""
    if losses_only:
        node.set_materialize_grads(False)
    node.register_prehook(_refuse_second_derivative)


def _refuse_second_derivative(gradients: Any) -> None:
    del gradients
    if torch.is_grad_enabled():
        raise UnsupportedBackwardError(
            "create_graph=True asks for a second derivative, which a planned graph does not have. Use "
            "lowtide.unwrap(model) for losses with gradient penalties, or leave that part of the model unwrapped."
        )
