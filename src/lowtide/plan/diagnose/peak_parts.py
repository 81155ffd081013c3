"""What is there at the peak of a plan, by cause, and the peak in words."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from lowtide.graph.ir import Graph
from lowtide.plan.core.account import MemoryAccount
from lowtide.plan.core.result import Outcome, Plan
from lowtide.plan.diagnose import alive_tensors as alive
from lowtide.plan.diagnose.alive_tensors import AliveTensor, at_source, phase_at_peak, short_target, tensors_at_peak
from lowtide.units import format_bytes


class Cause(Enum):
    """Why bytes are there at a peak."""

    GRADIENTS = "gradients"
    OUTPUTS = "outputs"
    OP = "op"
    HANDOVERS = "handovers"
    PASSING = "passing gradients"
    KEPT = "kept"
    STATES = "generator states"
    EARLIER = "earlier graphs"
    BLOCKS = "other blocks"
    BETWEEN = "code between blocks"
    PARAMETERS = "parameters"
    BUFFERS = "buffers"
    BATCH = "batch"
    OPTIMIZER = "optimizer state"
    BUCKETS = "gradient buckets"
    UPDATE = "update"


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of one cause at a peak.

    Attributes:
        cause: The cause.
        bytes: Their number.
        words: What they are.
        floor_bytes: Bytes of this cause that every schedule holds at one moment: no planner goes below.
    """

    cause: Cause
    bytes: int
    words: str
    floor_bytes: int = 0


_CAUSES = {
    alive.RETURNED_GRADIENT: Cause.GRADIENTS,
    alive.OUTPUT: Cause.OUTPUTS,
    alive.WRITTEN: Cause.OP,
    alive.READ: Cause.OP,
    alive.HANDOVER: Cause.HANDOVERS,
    alive.PASSING_GRADIENT: Cause.PASSING,
    alive.KEPT: Cause.KEPT,
    alive.GENERATOR_STATE: Cause.STATES,
}


def peak_parts(plan: Plan, unit: str = "op") -> tuple[Part, ...]:
    """Return what is there at the peak of `plan` by cause, largest first; the parts add up to the peak.

    Args:
        plan: The plan.
        unit: What ops are called: "op", or "block" in a chain.
    """
    if not plan.schedule.steps:
        return ()
    tensors = tensors_at_peak(plan)
    of: dict[Cause, list[AliveTensor]] = defaultdict(list)
    for tensor in tensors:
        of[_CAUSES[tensor.role]].append(tensor)
    op = plan.schedule.steps[plan.trace.peak_step]
    inside = plan.problem.costs.workspace_bytes[op]
    # The caller's generator state, put aside while an op repeats its random numbers.
    aside = plan.peak_bytes - inside - _total(tensors)
    extra = {Cause.OP: inside, Cause.STATES: aside}
    parts = [_part(plan, cause, of[cause], extra.get(cause, 0), unit) for cause in Cause]
    return sort_parts(parts)


@dataclass(frozen=True, slots=True)
class PeakFacts:
    """The peak of a plan, of one graph or of a step of several.

    Attributes:
        plan: The plan.
        peak_bytes: Its peak.
        parts: What is there.
        planner: Who made the plan.
        op: What runs, in words.
        moment: Where it is, the beginning of a sentence.
        proved: Whether it is proved that no schedule in the given order has a peak within the budget.
    """

    plan: Any
    peak_bytes: int
    parts: tuple[Part, ...]
    planner: str
    op: str
    moment: str
    proved: bool


def graph_peak(plan: Plan, unit: str = "op") -> PeakFacts:
    """Return the peak of the plan of one graph; `unit` is what ops are called."""
    return PeakFacts(
        plan=plan,
        peak_bytes=plan.peak_bytes,
        parts=peak_parts(plan, unit),
        planner=plan.planner,
        op=op_in_words(plan, unit),
        moment=_moment(plan, unit),
        proved=plan.outcome is Outcome.IMPOSSIBLE,
    )


def account_parts(account: MemoryAccount, peak: PeakFacts) -> tuple[Part, ...]:
    """Return what training takes at its peak by cause, largest first; the parts add up to the account's peak."""
    parts = [
        Part(Cause.PARAMETERS, account.parameter_bytes, "parameters"),
        Part(Cause.BUFFERS, account.buffer_bytes, "buffers"),
        Part(Cause.BATCH, account.batch_bytes, "the batch"),
        Part(Cause.OPTIMIZER, account.optimizer_bytes, "optimizer state"),
        Part(Cause.BUCKETS, account.bucket_bytes, "gradient buckets"),
    ]
    if is_in_update(account):
        gradients = account.gradient_bytes
        parts.append(Part(Cause.GRADIENTS, gradients, "parameter gradients", gradients))
        parts.append(Part(Cause.UPDATE, account.update_bytes, "temporaries of the optimizer's update"))
    else:
        parts += [*peak.parts, earlier_part(account.step_bytes - peak.peak_bytes)]
    return sort_parts(parts)


def is_in_update(account: MemoryAccount) -> bool:
    """Whether the peak of training is in the optimizer's update and not in forward or backward."""
    return account.gradient_bytes + account.update_bytes > account.step_bytes


def earlier_part(held_bytes: int) -> Part:
    """Return what other graphs of the same call hold."""
    return Part(Cause.EARLIER, held_bytes, "kept for backward by other graphs of this call")


def sort_parts(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Return the parts that are not empty, largest first."""
    return tuple(sorted((part for part in parts if part.bytes), key=lambda part: -part.bytes))


def op_in_words(plan: Plan, unit: str = "op") -> str:
    """Return what runs at the peak: "mm in head (models/net.py:12)", or "Linear backward of block 3" in a chain."""
    op = plan.problem.graph.ops[plan.schedule.steps[plan.trace.peak_step]]
    place = f" {'in' if unit == 'op' else f'of {unit}'} {op.module}" if op.module else ""
    return f"{short_target(op.target)}{place}{at_source(op.source)}"


def _part(plan: Plan, cause: Cause, tensors: Sequence[AliveTensor], extra: int, unit: str) -> Part:
    size = _total(tensors) + extra
    words, graph = cause.value, plan.problem.graph
    floor = 0
    if cause is Cause.GRADIENTS:
        words, floor = _gradients_in_words(graph), _held_bytes(graph, gradients=True)
    elif cause is Cause.OUTPUTS:
        words, floor = _outputs_in_words(tensors), _held_bytes(graph, gradients=False)
    elif cause is Cause.OP:
        words, floor = _alone_in_words(tensors, extra, unit), size
    elif cause is Cause.HANDOVERS:
        words = "new contents of buffers, until forward ends"
    elif cause is Cause.PASSING:
        words = f"gradients of activations that wait; {_largest(tensors)}"
    elif cause is Cause.KEPT:
        words = f"{_kept_in_words(plan)}; {_largest(tensors)}"
    elif cause is Cause.STATES:
        words = "states of random generators, to repeat what they drew"
    return Part(cause, size, words, floor)


def _gradients_in_words(graph: Graph) -> str:
    """Return whose gradients stay: they are of parameters if each has a parameter of its size."""
    values = [graph.values[value] for value in graph.held]
    sizes = Counter(value.bytes for value in values if value.kind == "gradient" and value.bytes)
    parameters = Counter(value.bytes for value in graph.values if value.kind == "parameter")
    return "parameter gradients" if sizes <= parameters else "gradients of parameters and inputs"


def _held_bytes(graph: Graph, *, gradients: bool) -> int:
    values = [graph.values[value] for value in graph.held]
    return sum(
        value.bytes for value in values if value.producer is not None and (value.kind == "gradient") == gradients
    )


def _outputs_in_words(tensors: Sequence[AliveTensor]) -> str:
    arriving = any(tensor.kind == "tangent" for tensor in tensors)
    return f"outputs that the caller holds{', and the gradients of outputs' if arriving else ''}"


def _alone_in_words(tensors: Sequence[AliveTensor], inside: int, unit: str) -> str:
    read = _total([tensor for tensor in tensors if tensor.role == alive.READ])
    written = _total([tensor for tensor in tensors if tensor.role == alive.WRITTEN])
    named = {"inputs": read, "outputs": written, "temporaries": inside}
    sizes = [f"{name} of {format_bytes(size)}" for name, size in named.items() if size]
    return f"this {unit} alone: {', '.join(sizes)}"


def _kept_in_words(plan: Plan) -> str:
    return "activations kept for later" if phase_at_peak(plan) == "forward" else "activations saved for backward"


def _largest(tensors: Sequence[AliveTensor]) -> str:
    if not tensors:
        return ""
    first = tensors[0]
    return f"the largest is {format_bytes(first.bytes)}, {first.what}{at_source(first.source)}"


def _total(tensors: Sequence[AliveTensor]) -> int:
    return sum(tensor.bytes for tensor in tensors)


def _moment(plan: Plan, unit: str = "op") -> str:
    step, steps = plan.trace.peak_step + 1, len(plan.schedule.steps)
    return f"At that peak, in {phase_at_peak(plan)} at step {step} of {steps}, {op_in_words(plan, unit)},"
