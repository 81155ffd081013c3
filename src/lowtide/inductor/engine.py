"""One graph through Inductor: its joint graph is planned, both halves are compiled, and the final code is run dry."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import fx

from lowtide.capture.program import Program
from lowtide.errors import CaptureError, InfeasibleBudgetError, UnsupportedBackwardError
from lowtide.graph.costs import Costs
from lowtide.inductor.dry_run import DryRun, Half, dry_run
from lowtide.inductor.fit import Candidate, Fitted, fit, remaining_inputs, shape_of
from lowtide.inductor.plan import InductorPlan
from lowtide.inductor.policy import POLICY, FitPolicy
from lowtide.inductor.step_program import make_step_program, missing_tangents
from lowtide.plan.core.problem import Problem
from lowtide.plan.core.result import Outcome, Plan
from lowtide.plan.diagnose.infeasible import AskedBudget
from lowtide.progress import Progress, silent
from lowtide.pytorch.compiler.joint_graph import JointGraph, Run
from lowtide.pytorch.dispatch_modes import without_modes
from lowtide.pytorch.inductor.generate import Generated
from lowtide.pytorch.running_autograd import node_of_running_graph
from lowtide.units import format_bytes


@dataclass(frozen=True)
class Wishes:
    """What a graph is planned for.

    Attributes:
        asked: The budget.
        eager_bytes: The peak of the step in eager training.
        costs: Returns the costs of a program's ops.
        solve: Returns the plan for a problem, or the one of least peak known.
        num_outputs: How many results the graph has for the user.
        losses_only: Expect gradients for scalar outputs alone, where there are any.
        on_forward: Is told of each forward run, with its autograd node or None.
        progress: Is told what is being done.
    """

    asked: AskedBudget
    eager_bytes: int
    costs: Callable[[Program], Costs]
    solve: Callable[[Problem], Plan]
    num_outputs: int
    losses_only: bool
    on_forward: Callable[[Any], None]
    progress: Progress = silent


class StepCompilation:
    """Cuts one joint graph as a plan says whose code fits, and runs the code; see `PlannedCompilation`.

    Attributes:
        plan: The plan; it is complete when both halves are compiled.
        error: What is wrong with the final code, if anything is.
    """

    def __init__(self, wishes: Wishes, policy: FitPolicy = POLICY) -> None:
        self.wishes = wishes
        self.policy = policy
        self.plan: InductorPlan | None = None
        self._program: Program | None = None
        self._missing: frozenset[int] = frozenset()
        self._fitted = Fitted()
        self._forward: Half | None = None

    def split(self, joint: JointGraph) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return the two graphs of a joint graph that run the fastest plan whose code fits."""
        if self._program is not None:
            raise CaptureError(
                'engine="inductor" plans one graph, and this one has graphs inside of it. Use the exact engine.'
            )
        wishes = self.wishes
        self._missing = missing_tangents(joint, losses_only=wishes.losses_only)
        program = self._program = make_step_program(joint, self._missing)
        # The compiler traces in fake mode; costs are measured on real tensors.
        with without_modes():
            costs = wishes.costs(program)

        def plan_within(asked: int) -> Plan:
            with without_modes():
                return wishes.solve(Problem(program.graph, costs, max(asked, 1)))

        self._fitted = fit(
            program,
            plan_within,
            wishes.asked.left_bytes,
            num_visible=wishes.num_outputs,
            policy=self.policy,
            progress=wishes.progress,
        )
        best = self._fitted.best
        if best is None:
            raise self._infeasible()
        return best.halves.forward, best.halves.backward

    @property
    def identity(self) -> str:
        """A text that is another one for every schedule, budget and way to compile."""
        if self._fitted.best is None:
            return f"lowtide {self.wishes.asked.bytes}"
        best = self._fitted.best
        parts = (self.wishes.asked.bytes, best.plan.fingerprint, best.plan.schedule, best.tuning)
        return f"lowtide {hashlib.sha256(repr(parts).encode()).hexdigest()}"

    def options_of(self, *, is_backward: bool) -> dict[str, Any]:
        """Return the options of Inductor's that the accepted code of a half was generated with."""
        best = self._fitted.best
        return {} if best is None else best.tuning.of_half(is_backward=is_backward)

    def remaining_inputs(self, graph: fx.GraphModule) -> Sequence[int]:
        """Return the positions of the inputs of a backward graph that come."""
        return remaining_inputs(graph)

    def forward_run(self, code: Generated, examples: Sequence[Any], run: Run) -> Run:
        """Return what runs forward."""
        self._forward = Half(code, examples)
        on_forward = self.wishes.on_forward

        def forward(args: list[Any]) -> Any:
            on_forward(node_of_running_graph())
            return run(args)

        return forward

    def backward_run(self, code: Generated, examples: Sequence[Any], run: Run) -> Run:
        """Return what runs backward; raise if the step does not fit after all."""
        assert self._program is not None
        assert self._fitted.best is not None
        assert self._forward is not None
        final = dry_run(self._forward, Half(code, examples), shape_of(self._program))
        if final.peak_bytes > self.wishes.asked.left_bytes:
            raise self._infeasible(final)
        self.plan = self._plan_of(self._fitted.best, final)
        read = tuple(bool(node.users) for node in self._program.tangents)
        return _Tangents(read, self._missing, examples).hand_to(run)

    def _plan_of(self, best: Candidate, final: DryRun) -> InductorPlan:
        wishes = self.wishes
        least = self._fitted.least
        values = {each.name: getattr(best.plan, each.name) for each in fields(Plan)}
        values["outcome"] = Outcome.FITS if best.plan.num_recomputed else Outcome.NOTHING_TO_DO
        values["min_peak_bytes"] = least.found.peak_bytes if least is not None else final.peak_bytes
        return InductorPlan(
            **values,
            code_bytes=final.peak_bytes,
            code_saved_bytes=final.saved_bytes,
            asked_bytes=wishes.asked.left_bytes,
            eager_bytes=wishes.eager_bytes,
            tuning=best.tuning.name,
            num_tries=self._fitted.num_tries,
        )

    def _infeasible(self, final: DryRun | None = None) -> InfeasibleBudgetError:
        """Return the error that names the least peak of code that was seen."""
        asked, eager, least = self.wishes.asked, self.wishes.eager_bytes, self._fitted.least
        peaks = [each.peak_bytes for each in (final, None if least is None else least.found) if each is not None]
        # Code that was found to be larger when it was compiled is no proof that less works.
        least_bytes = max(peaks) if final is not None else min(peaks)
        return InfeasibleBudgetError(
            f"No plan was found whose code, generated by Inductor, fits the budget of {asked}.\n"
            f"The code of least peak of the {self._fitted.num_tries} that were generated takes {least_bytes} bytes "
            f"({format_bytes(least_bytes)}), which is {100 * least_bytes / max(eager, 1):.1f} % of the eager step's "
            f"{format_bytes(eager)}.\nWhat would help:\n- Raise the budget to {least_bytes} bytes or more.\n"
            "- Use the exact engine, which is the default: it runs ops one by one and often reaches less.\n"
            "- Make the batch smaller.",
            budget_bytes=asked.bytes,
            least_bytes=asked.held_bytes + least_bytes,
        )


@dataclass(frozen=True)
class _Tangents:
    """The gradients that arrive at a backward pass.

    Attributes:
        read: For each, whether the code takes it; they are the last arguments.
        missing: Which of them are taken not to come.
        examples: Fake tensors for the arguments of the code, which takes those alone that come.
    """

    read: tuple[bool, ...]
    missing: frozenset[int]
    examples: Sequence[Any]

    def hand_to(self, run: Run) -> Run:
        """Return what takes all arguments and runs the code with those that it takes."""

        def backward(args: list[Any]) -> Any:
            self._select(args)
            return run(args)

        return backward

    def _select(self, args: list[Any]) -> None:
        """Take out the tangents that do not come; put zeros in the place of others that have not."""
        first = len(args) - len(self.read)
        arrived = args[first:]
        del args[first:]
        if any(arrived[position] is not None for position in self.missing):
            raise UnsupportedBackwardError(
                'A gradient came for an output that is not the loss, and the code of engine="inductor" was planned for '
                "the loss alone. Return only what the loss is computed from, compute the whole loss inside of the "
                "model, or use the exact engine, which is the default."
            )
        for tangent, is_read in zip(arrived, self.read, strict=True):
            if is_read:
                args.append(_zeros(self.examples[len(args)]) if tangent is None else tangent)


def _zeros(example: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(example.shape, example.stride(), dtype=example.dtype, device=example.device)
    return made.zero_()
