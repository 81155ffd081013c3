"""The road from a joint graph to what runs: capture, plan, choose variants, lower.

`lowtide.plan` takes the first two steps, `lowtide.wrap` takes all four.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from lowtide.blocks.step.session import StepSession
from lowtide.capture.arrived_gradients import AS_TRACED, Arrived
from lowtide.capture.captured_graph import CapturedGraph, capture
from lowtide.capture.deliveries import Deliveries
from lowtide.capture.program import Program
from lowtide.errors import UnsupportedBackwardError
from lowtide.graph.ir import ValueId
from lowtide.lower.chunks import ChunkedBackward, Observer
from lowtide.lower.emit_graphs import Handover, accumulated, handover, lower, repeated_ops, saved_values
from lowtide.lower.execute import LoweredVariant, backward_of
from lowtide.lower.other_backward import lower_other_backward, schedule_of
from lowtide.lower.read_checksums import InputChecksums
from lowtide.lower.variants import LazyVariant, Turn, VariantSwitch, shared_handover
from lowtide.plan.core.problem import Problem
from lowtide.plan.core.result import Plan
from lowtide.pytorch.compiler.joint_graph import JointGraph
from lowtide.pytorch.dispatch_modes import without_modes
from lowtide.runtime.improvements import Improvement, StagedGraph
from lowtide.runtime.late_layouts import Late
from lowtide.runtime.model_plans import Session
from lowtide.runtime.peak_watch import PeakWatch
from lowtide.schedule.expand import expand
from lowtide.schedule.simulate import Trace
from lowtide.schedule.steps import Schedule


def lower_joint(
    joint: JointGraph, session: Session, *, losses_only: bool, deliveries: Deliveries | None = None
) -> LoweredVariant | VariantSwitch:
    """Return what runs a joint graph as `session` plans it: as the whole of a step, or as a block of it.

    Args:
        joint: The graph.
        session: Plans it.
        losses_only: Expect gradients for scalar outputs alone, where there are any.
        deliveries: Which gradients leave before the end.
    """
    captured = capture(joint, losses_only=losses_only, deliveries=deliveries)
    session.compare_ranks(captured.program)
    if session.is_in_parts():
        return lower_block(captured, session, losses_only=losses_only)
    planned = plan_graph(captured, session)
    improvement = session.improvements.of(planned.plan)
    if improvement is not None:
        return lower_staged(planned, improvement, session, losses_only=losses_only)
    variants = choose_variants(planned)
    return lower_graph(planned, variants, session, losses_only=losses_only)


def lower_block(captured: CapturedGraph, session: Session, *, losses_only: bool) -> VariantSwitch:
    """Return what runs a graph that is one block of a step: any plan of its menu, chosen at each call."""
    program = captured.program
    with without_modes():
        menu = session.find_menu(program)
    schedules = [entry.plan.schedule for entry in menu]
    spares = [(program, expand(program.graph, _kept_in_any_case(program, each))) for each in schedules]
    needed = [handover(program, each, spare) for each, spare in zip(schedules, spares, strict=True)]
    borders = _borders(program)
    shared = shared_handover(needed, borders)

    def on_forward(node: Any) -> None:
        session.ran = True
        if node is not None:
            _prepare_backward(node, losses_only=losses_only)

    def lower_variant(schedule: Schedule, spare: tuple[Program, Schedule]) -> LoweredVariant:
        lowered = lower(program, schedule, spare, shared=shared)

        kept = frozenset(lowered.frame.saved)

        def backward_for(arrived: Arrived) -> ChunkedBackward:
            other = captured.arriving(arrived)
            plan = schedule_of(other, program, schedule, kept)
            return backward_of(lower_other_backward(other, plan, lowered.frame), other)

        checks = (InputChecksums(program, schedule, lowered.frame),) if session.verifies else ()
        return LoweredVariant(lowered, captured.gradients, AS_TRACED, program, backward_for, checks, on_forward)

    variants = tuple(
        LazyVariant.of(program, schedule, own, shared, partial(lower_variant, schedule, spare))
        for schedule, spare, own in zip(schedules, spares, needed, strict=True)
    )

    def price_for(arrived: Arrived) -> list[tuple[Problem, Trace]]:
        other = captured.arriving(arrived)
        problem = Problem(other.graph, session.costs_of(other), 1)
        saved = [{*own.saved, *shared.saved} for own in needed]
        run = [schedule_of(other, program, *each) for each in zip(schedules, saved, strict=True)]
        return [(problem, problem.price(each)) for each in run]

    number = session.step.add(menu, program.device, price_for, gradient_bytes=parameter_gradient_bytes(program))
    director = BlockDirector(session.step, number, program.parameters, program.handed_over)
    return VariantSwitch(variants, program.num_forward_outputs, borders, director)


@dataclass(frozen=True)
class BlockDirector:
    """One block's line to the session.

    Attributes:
        session: The session.
        number: The block.
        parameters: Positions of the arguments that live as long as the model.
        handed_over: Positions of the results that are written into arguments and die when forward has ended.
    """

    session: StepSession
    number: int
    parameters: Collection[int]
    handed_over: Collection[int] = ()

    def begin_forward(self, args: Sequence[Any]) -> Turn:
        """Return what to run for these arguments."""
        others = [arg for position, arg in enumerate(args) if position not in self.parameters]
        return self.session.begin_forward(self.number, others, [args[position] for position in self.parameters])

    def end_forward(self, turn: Turn, outputs: Sequence[Any]) -> None:
        """Note that a forward has returned."""
        self.session.end_forward(turn, [each for k, each in enumerate(outputs) if k not in self.handed_over])

    def begin_backward(self, turn: Turn, arrived: Arrived) -> None:
        """Note that the backward of a turn begins, for these gradients."""
        self.session.begin_backward(turn, arrived)

    def end_backward(self, turn: Turn, gradients: Sequence[Any]) -> None:
        """Note that a backward has returned."""
        of_inputs = [each for position, each in enumerate(gradients) if position not in self.parameters]
        of_parameters = [each for position, each in enumerate(gradients) if position in self.parameters]
        self.session.end_backward(turn, of_inputs, of_parameters)

    @property
    def keeps_values(self) -> bool:
        """False while blocks run for their sequence alone."""
        return self.session.keeps_values


def parameter_gradient_bytes(program: Program) -> int:
    """Return the bytes of the gradients that a backward returns for parameters."""
    made = [node for position, node in enumerate(program.backward_outputs) if position in program.parameters]
    values = {program.values[node] for node in made if node in program.values}
    return sum(program.graph.values[value].bytes for value in values)


def _borders(program: Program) -> frozenset[ValueId]:
    """Return the values that others may hold: inputs that are no parameters, and outputs."""
    values = program.graph.values
    inputs = [value for value, each in enumerate(values) if each.producer is None and each.kind == "input"]
    return frozenset((*inputs, *program.graph.outputs))


@dataclass(frozen=True)
class PlannedGraph:
    """A captured graph with a plan.

    Attributes:
        captured: The graph.
        expected: The gradients that the plan expects.
        program: The program for them, for which the plan is.
        plan: The plan.
    """

    captured: CapturedGraph
    expected: Arrived
    program: Program
    plan: Plan


def plan_graph(captured: CapturedGraph, session: Session) -> PlannedGraph:
    """Return the plan for the gradients that are expected to come.

    If others come, another backward runs. Being ready for it may keep bytes alive that the plan does not count; the
    graph is then planned for all gradients to come.
    """
    # A plan that the user gives may be one for all gradients.
    expected = AS_TRACED if session.is_given_for(captured.program) else _expected(captured, session)
    planned = _plan_for(captured, expected, session)
    if expected.missing and choose_variants(planned).extra_bytes:
        planned = _plan_for(captured, replace(expected, missing=frozenset()), session)
    session.record(planned.plan)
    return planned


def _expected(captured: CapturedGraph, session: Session) -> Arrived:
    """Return the gradients that will probably come: those for which the graph was found to need another plan."""
    return session.late.expected(captured.program.graph) or Arrived(captured.unlikely)


def _plan_for(captured: CapturedGraph, expected: Arrived, session: Session) -> PlannedGraph:
    program = captured.arriving(expected)
    # The compiler traces in fake mode; costs are measured on real tensors.
    with without_modes():
        return PlannedGraph(captured, expected, program, session.find_plan(program))


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


def lower_staged(
    planned: PlannedGraph, improvement: Improvement, session: Session, *, losses_only: bool
) -> VariantSwitch:
    """Return what runs a first plan, and the better one from when it is there on."""
    captured = planned.captured
    shared = Handover((), tuple(accumulated(captured.program)))
    room = _room(planned)

    def variant_for(plan: Plan) -> LazyVariant:
        found = replace(planned, plan=plan)
        variants = choose_variants(found)
        own = handover(found.program, plan.schedule, (captured.program, variants.for_all))
        make = partial(lower_graph, found, variants, session, losses_only=losses_only, shared=shared)
        return LazyVariant.of(found.program, plan.schedule, own, shared, make)

    def judge(found: Plan) -> bool:
        better = replace(planned, plan=found)
        is_slower = found.trace.seconds > planned.plan.trace.seconds
        if is_slower or session.step.blocks or variant_for(found).num_slots > room:
            return False
        return not (better.expected.missing and choose_variants(better).extra_bytes) and _keeps_promise(better, session)

    def better() -> Plan | None:
        session.improvements.settle(improvement)
        return improvement.better

    improvement.judge = judge
    director = StagedGraph([variant_for(planned.plan)], planned.plan, better, variant_for)
    return VariantSwitch(director.variants, captured.program.num_forward_outputs, frozenset(), director, room)


def _room(planned: PlannedGraph) -> int:
    """Return how many tensors any plan of the graph may want to hand over.

    No plan keeps all that plain training keeps, all inputs, and the states of all random ops besides; but nothing stops
    one from keeping many small values in the place of a large one. Such a plan would not be taken over.
    """
    program, graph = planned.captured.program, planned.program.graph
    plain = saved_values(program, Schedule.keep_all(program.graph))
    inputs = [value for value, each in enumerate(graph.values) if each.producer is None]
    random = [op for op in graph.forward if graph.ops[op].random]
    return len({*plain, *inputs, *saved_values(planned.program, planned.plan.schedule)}) + len(random)


def _keeps_promise(better: PlannedGraph, session: Session) -> bool:
    """Return True if a plan fits by all that steps have shown since it was asked for."""
    plan, promised = better.plan, better.plan.promised_bytes
    costs = session.corrected(better.program, plan.problem.costs)
    if Problem(plan.problem.graph, costs, promised).price(plan.schedule).peak_bytes > promised:
        return False
    kept = choose_variants(better).kept
    for arrived in session.late.seen(better.captured.program.graph):
        other = better.captured.arriving(arrived)
        run = schedule_of(other, better.program, plan.schedule, kept)
        if Problem(other.graph, session.costs_of(other), promised).price(run).peak_bytes > promised:
            return False
    return True


def lower_graph(
    planned: PlannedGraph,
    variants: BackwardVariants,
    session: Session,
    *,
    losses_only: bool,
    shared: Handover | None = None,
) -> LoweredVariant:
    """Return the graphs that run the plan, whose forward also serves the other backward passes."""
    captured, program, plan = planned.captured, planned.program, planned.plan
    lowered = lower(program, plan.schedule, (captured.program, variants.for_all), shared=shared)

    watch = PeakWatch(plan, program, session.corrections)
    checks = (InputChecksums(program, plan.schedule, lowered.frame),) if session.verifies else ()
    observers: tuple[Observer, ...] = (watch, *checks)

    def backward_for(arrived: Arrived) -> ChunkedBackward:
        other = captured.arriving(arrived)
        schedule = schedule_of(other, program, plan.schedule, variants.kept)
        backward = backward_of(lower_other_backward(other, schedule, lowered.frame), other)
        if arrived.layouts == planned.expected.layouts:
            return backward
        session.late.add(Late(watch, captured.program.graph, arrived, other, schedule, is_only=not watch.is_done))
        watch.wait()
        return backward.observed(observers)

    def on_forward(node: Any) -> None:
        session.ran = True
        if node is not None:
            _prepare_backward(node, losses_only=losses_only)

    return LoweredVariant(lowered, captured.gradients, planned.expected, program, backward_for, observers, on_forward)


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
