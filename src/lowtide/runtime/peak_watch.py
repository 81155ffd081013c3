"""Measures the first step of every plan; a plan that turns out to exceed its budget is replaced.

Predictions are exact where every op's temporaries are known. They may not be: an op of the user's may need more on real
data than on made-up data, or costs may be estimates. What the first step shows is taken into account: the temporaries
of ops that are not PyTorch's own are corrected one by one, and what is left unexplained is kept free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lowtide.capture.async_collectives import buffer_bytes
from lowtide.capture.program import Program
from lowtide.capture.recompute_rules import is_foreign
from lowtide.costs.op_signature import signature
from lowtide.graph.costs import Costs
from lowtide.graph.ir import OpId
from lowtide.lower.chunks import Part
from lowtide.lower.emit_graphs import label_of
from lowtide.measure import Recording, can_record, record_parts
from lowtide.plan.core.result import Plan
from lowtide.pytorch.compiler.joint_graph import Run
from lowtide.pytorch.storages import storage_bytes


@dataclass
class Corrections:
    """What first steps have shown.

    Attributes:
        workspace_bytes: Measured temporaries of ops, by the signature of their call.
        estimated: True if estimated temporaries were found to be too small, so that they are measured from then on.
        unexplained_bytes: What steps needed beyond their corrected prediction.
        overdrawn: Plans that need more than their budget.
    """

    workspace_bytes: dict[str, int] = field(default_factory=dict)
    estimated: bool = False
    unexplained_bytes: int = 0
    overdrawn: list[Plan] = field(default_factory=list)

    def apply(self, program: Program, costs: Costs, measure: Callable[[], Costs]) -> Costs:
        """Return `costs` with the temporaries that were found to be larger; unexplained ones may be any op's.

        Args:
            program: The program.
            costs: Its costs.
            measure: Measures them.
        """
        if self.estimated:
            measured = measure()
            costs = Costs(costs.seconds, measured.workspace_bytes, f"{costs.source}, temporaries {measured.source}")
        if not self.workspace_bytes and not self.unexplained_bytes:
            return costs
        calls = [program.call(op) for op in range(len(program.graph.ops))]
        known = [0 if call is None else self.workspace_bytes.get(signature(call), 0) for call in calls]
        workspace = (max(pair) + self.unexplained_bytes for pair in zip(costs.workspace_bytes, known, strict=True))
        return Costs(costs.seconds, tuple(workspace), costs.source)


def is_measured(costs: Costs) -> bool:
    """Return True if the temporaries in `costs` were measured."""
    return "measured on" in costs.source


class PeakWatch:
    """Measures steps of one plan until one was measured as a whole, and notes what it shows."""

    def __init__(self, plan: Plan, program: Program, corrections: Corrections) -> None:
        self.plan = plan
        self.program = program
        self.corrections = corrections
        self.foreign = _foreign_ops(program)
        self._forward: Recording | None = None
        self._backward = Recording(0, {})
        # Whether gradients that leave before the end are copied and freed there.
        first = next(iter(program.deliveries), None)
        self._lets_go = first is not None and not set(program.graph.ops[first].inputs) <= set(program.graph.outputs)
        # What a step has shown whose prediction is not known yet.
        self._waits = False
        self._shown: tuple[Recording, Recording] | None = None
        # True if no further step is measured. What is recorded is this thread's: it lacks what another one frees.
        self.is_done = _has_buffers_of_others(program)

    def forward(self, run: Run, args: list[Any]) -> Any:
        """Return the result of a forward run."""
        if self.is_done or not can_record(self.program.device):
            return run(args)
        result, self._forward = record_parts(lambda: run(args), self._labels())
        return result

    def begin_backward(self, args: Sequence[Any]) -> None:
        """Note that a backward run begins."""
        del args
        self._backward = Recording(0, {})

    def backward(self, run: Run, args: list[Any], part: Part) -> Any:
        """Return the result of a part of a backward run."""
        if self.is_done or self._forward is None or not can_record(self.program.device):
            return run(args)
        result, recorded = record_parts(lambda: run(args), self._labels())
        leaving = result[len(result) - part.num_gradients :] if self._lets_go else ()
        recording = self._backward = _joined(self._backward, recorded, sum(map(storage_bytes, leaving)))
        if not part.is_last:
            return result
        # An op of the user's may need more another time.
        self.is_done = not self.foreign or self._waits
        if self._waits:
            self._shown = self._forward, recording
        else:
            self._note(self._forward, recording)
        return result

    def wait(self) -> None:
        """Keep what the running step shows until it is known what is predicted for it."""
        self._waits = True

    def follow(self, plan: Plan, program: Program) -> None:
        """Compare the step that was kept, or else the next one, with a prediction of what has run."""
        self.plan, self.program, self._waits = plan, program, False
        self.foreign = _foreign_ops(program)
        shown, self._shown = self._shown, None
        self.is_done = shown is not None and not self.foreign
        if shown is not None:
            self._note(*shown)

    def _labels(self) -> list[str]:
        return [label_of(op) for op in self.foreign]

    def _note(self, forward: Recording, backward: Recording) -> None:
        """Compare a step with its prediction; what was there when backward began is taken to be as predicted."""
        trace = self.plan.trace
        ahead = trace.boundary + (1 if self._tangents_arrive() else 0)
        before = trace.bytes_after[ahead - 1] if ahead else 0
        measured = max(forward.peak_bytes, before + backward.peak_bytes)
        if measured <= self.plan.promised_bytes or self.plan in self.corrections.overdrawn:
            return
        found = {op: max(r.inside_bytes.get(label_of(op), 0) for r in (forward, backward)) for op in self.foreign}
        explained = self._with(found)
        for op, size in found.items():
            call = self.program.call(op)
            if call is not None and size > self.plan.problem.costs.workspace_bytes[op]:
                self.corrections.workspace_bytes[signature(call)] = size
        if is_measured(self.plan.problem.costs):
            self.corrections.unexplained_bytes += max(0, measured - explained)
        elif measured > explained:
            self.corrections.estimated = True
        self.corrections.overdrawn.append(self.plan)

    def _tangents_arrive(self) -> bool:
        backward = self.plan.schedule.backward
        return bool(backward) and self.program.calls[backward[0]] is None

    def _with(self, found: dict[OpId, int]) -> int:
        """Return the predicted peak with these temporaries."""
        problem = self.plan.problem
        workspace = list(problem.costs.workspace_bytes)
        for op, size in found.items():
            workspace[op] = max(workspace[op], size)
        costs = Costs(problem.costs.seconds, tuple(workspace), problem.costs.source)
        return type(problem)(problem.graph, costs, problem.budget_bytes).price(self.plan.schedule).peak_bytes


def _has_buffers_of_others(program: Program) -> bool:
    """Return True if another thread may free what ops of `program` allocate: buffers of collectives on the CPU."""
    return any(node is not None and buffer_bytes(node, program.device) for node in program.calls)


def _joined(before: Recording, then: Recording, freed: int) -> Recording:
    """Return the recording of two parts of one run, behind which so many bytes are freed unseen."""
    labels = {*before.inside_bytes, *then.inside_bytes}
    inside = {each: max(before.inside_bytes.get(each, 0), then.inside_bytes.get(each, 0)) for each in labels}
    level = before.left_bytes
    return Recording(max(before.peak_bytes, level + then.peak_bytes), inside, level + then.left_bytes - freed)


def _foreign_ops(program: Program) -> list[OpId]:
    """Return the ops that are not PyTorch's own."""
    return [op for op, node in enumerate(program.calls) if node is not None and is_foreign(node)]
