"""Measures the first step of every plan; a plan that turns out to exceed its budget is replaced.

Predictions are exact where every op's temporaries are known. They may not be: an op of the user's may need more on real
data than on made-up data, or costs may be estimates. What the first step shows is taken into account: the temporaries
of ops that are not PyTorch's own are corrected one by one, and what is left unexplained is kept free.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lowtide.capture.program import Program
from lowtide.capture.recompute_rules import is_foreign
from lowtide.costs.measured import measure_costs
from lowtide.costs.op_signature import signature
from lowtide.graph.costs import Costs
from lowtide.graph.ir import OpId
from lowtide.lower.emit_graphs import label_of
from lowtide.measure import Recording, can_record, record_parts
from lowtide.plan.core.result import Plan

# Scalar arguments of ops are tensors of a few bytes that the simulator does not count.
_SCALARS_BYTES = 1024


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

    def apply(self, program: Program, costs: Costs) -> Costs:
        """Return `costs` with the temporaries that were found to be larger; unexplained ones may be any op's."""
        if self.estimated:
            measured = measure_costs(program)
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
        self.foreign = [op for op, node in enumerate(program.calls) if node is not None and is_foreign(node)]
        self._forward: Recording | None = None
        self._done = False

    def forward(self, run: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        """Return the result of a forward run."""
        if self._done or not can_record(self.program.device):
            return run(args)
        result, self._forward = record_parts(lambda: run(args), self._labels())
        return result

    def backward(self, run: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        """Return the result of a backward run."""
        if self._done or self._forward is None or not can_record(self.program.device):
            return run(args)
        result, recording = record_parts(lambda: run(args), self._labels())
        # An op of the user's may need more another time.
        self._done = not self.foreign
        self._note(self._forward, recording)
        return result

    def _labels(self) -> list[str]:
        return [label_of(op) for op in self.foreign]

    def _note(self, forward: Recording, backward: Recording) -> None:
        """Compare a step with its prediction; what was there when backward began is taken to be as predicted."""
        trace = self.plan.trace
        ahead = trace.boundary + (1 if self._tangents_arrive() else 0)
        before = trace.bytes_after[ahead - 1] if ahead else 0
        measured = max(forward.peak_bytes, before + backward.peak_bytes)
        if measured <= self.plan.budget_bytes + _SCALARS_BYTES or self.plan in self.corrections.overdrawn:
            return
        found = {op: max(r.inside_bytes[label_of(op)] for r in (forward, backward)) for op in self.foreign}
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
