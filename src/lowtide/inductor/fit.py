"""The search for a plan whose generated code fits: plan, generate, run dry; accept what fits, else ask for less."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lowtide.capture.program import Program, is_tangent
from lowtide.inductor.dry_run import DryRun, Half, StepShape, dry_run
from lowtide.inductor.policy import POLICY, FitPolicy, Tuning
from lowtide.inductor.step_program import Halves, lower_step
from lowtide.lower.emit_graphs import descriptors_of
from lowtide.plan.core.result import Plan
from lowtide.progress import Progress, silent
from lowtide.pytorch.compiler.joint_graph import mutated_input
from lowtide.pytorch.inductor.generate import Strides, donated_inputs, generate, results_of, without_other_inputs
from lowtide.schedule.steps import Schedule
from lowtide.units import format_bytes

# Plans the program within so many bytes; a plan of more is the one of least peak known.
Planner = Callable[[int], Plan]


@dataclass(frozen=True)
class Candidate:
    """A plan with the code it leads to.

    Attributes:
        plan: The plan, made for what was asked of the planner.
        halves: Its graphs.
        tuning: How Inductor was asked to compile them.
        found: What their code takes.
    """

    plan: Plan
    halves: Halves
    tuning: Tuning
    found: DryRun

    @property
    def seconds(self) -> float:
        """What it is predicted to take, op by op."""
        return self.plan.trace.seconds


@dataclass
class Fitted:
    """What the search has tried.

    Attributes:
        best: The fastest candidate that fits, or None.
        least: The candidate of least peak.
        num_tries: How many there were.
    """

    best: Candidate | None = None
    least: Candidate | None = None
    num_tries: int = 0

    def add(self, candidate: Candidate, budget_bytes: int) -> None:
        """Note a candidate."""
        self.num_tries += 1
        peak = candidate.found.peak_bytes
        if self.least is None or peak < self.least.found.peak_bytes:
            self.least = candidate
        if peak <= budget_bytes and (self.best is None or candidate.seconds < self.best.seconds):
            self.best = candidate


def fit(
    program: Program,
    planner: Planner,
    budget_bytes: int,
    *,
    num_visible: int,
    policy: FitPolicy = POLICY,
    progress: Progress = silent,
) -> Fitted:
    """Return the fastest plan whose code fits the budget, and the one of least peak.

    Args:
        program: The step.
        planner: Plans it.
        budget_bytes: What the code may take.
        num_visible: How many results of forward the user sees, behind those that are written into inputs.
        policy: How long to search.
        progress: Is told what is being done.
    """
    fitted = Fitted()
    for tuning in policy.tunings:

        def attempt(plan: Plan, tuning: Tuning = tuning) -> Candidate:
            progress(f"generating code for a schedule of {format_bytes(plan.trace.peak_bytes)}")
            return try_plan(program, plan, tuning, num_visible=num_visible)

        for candidate in _tries(planner, attempt, budget_bytes, policy):
            fitted.add(candidate, budget_bytes)
        if fitted.best is not None:
            break
    return fitted


def _tries(
    planner: Planner, attempt: Callable[[Plan], Candidate], budget_bytes: int, policy: FitPolicy
) -> Iterator[Candidate]:
    """Yield candidates, each for what the error of the one before leaves to ask for."""
    bracket = _Bracket(budget_bytes, policy)
    seen: set[Schedule] = set()
    for _ in range(policy.tries):
        plan = planner(bracket.ask)
        if plan.schedule in seen:
            return
        seen.add(plan.schedule)
        candidate = attempt(plan)
        yield candidate
        if not bracket.moves_on(plan, candidate.found.peak_bytes):
            return


@dataclass
class _Bracket:
    """What to ask the planner for, between what was enough and what was too much.

    Attributes:
        budget_bytes: What the code may take.
        policy: How far to move.
        ask: What to ask for.
        fits: The most that led to code that fits.
        exceeds: The least that led to code that does not.
    """

    budget_bytes: int
    policy: FitPolicy
    ask: int = 0
    fits: int = 0
    exceeds: int | None = None

    def __post_init__(self) -> None:
        """Begin with the budget itself."""
        self.ask = self.budget_bytes

    def moves_on(self, plan: Plan, code_bytes: int) -> bool:
        """Set what to ask for after `plan`, whose code takes `code_bytes`; return False if that is of no use."""
        left = self.budget_bytes - code_bytes
        planned = plan.trace.peak_bytes
        if left < 0:
            self.exceeds = min(planned, self.exceeds or planned)
            wanted = int(self.policy.cautious * planned * self.budget_bytes / code_bytes)
        else:
            self.fits = max(planned, self.fits)
            wanted = planned + int(self.policy.bold * left)
        if left >= 0 and (code_bytes >= self.policy.close * self.budget_bytes or not plan.num_recomputed):
            return False
        if left < 0 and planned > self.ask:
            # The planner knows no plan of less.
            return False
        if wanted <= self.fits or (self.exceeds is not None and wanted >= self.exceeds):
            wanted = (self.fits + (self.exceeds or 2 * planned)) // 2
        changed = wanted != self.ask and wanted > 0
        self.ask = wanted
        return changed


def try_plan(program: Program, plan: Plan, tuning: Tuning, *, num_visible: int) -> Candidate:
    """Return what the code for `plan` takes."""
    halves = lower_step(program, plan.schedule)
    forward, backward = generate_halves(program, halves, tuning, num_visible=num_visible)
    return Candidate(plan, halves, tuning, dry_run(forward, backward, shape_of(program)))


def generate_halves(program: Program, halves: Halves, tuning: Tuning, *, num_visible: int) -> tuple[Half, Half]:
    """Return the code of both graphs as they will be compiled, and what they are called with."""
    examples = _examples(halves.forward)
    visible = visible_outputs(program, num_visible)
    forward = generate(halves.forward, examples, tuning.of_half(is_backward=False), visible=visible)
    inputs = _laid_out(_examples(halves.backward), forward.strides[program.num_forward_outputs :])
    donated = donated_inputs(halves.forward, halves.backward, program.num_forward_outputs)
    gradients = [k for k, node in enumerate(results_of(halves.backward)) if isinstance(node, fx.Node)]
    come = remaining_inputs(halves.backward)
    kept = without_other_inputs(halves.backward, come)
    chosen = [inputs[position] for position in come]
    options = tuning.of_half(is_backward=True)
    backward = generate(kept, chosen, options, visible=gradients, donated=donated)
    return Half(forward, examples), Half(backward, chosen)


def visible_outputs(program: Program, num_visible: int) -> list[int]:
    """Return the positions of the results of forward that the user sees, which come behind those written to inputs."""
    descriptors = descriptors_of(program)[: program.num_forward_outputs]
    first = sum(mutated_input(each) is not None for each in descriptors)
    return [k for k in range(first, first + num_visible) if isinstance(program.forward_outputs[k], fx.Node)]


def shape_of(program: Program) -> StepShape:
    """Return what surrounds the halves of a step."""
    gradients = {
        position: program.primals[position].meta["val"]
        for position, node in enumerate(program.backward_outputs)
        if isinstance(node, fx.Node) and position in program.parameters
    }
    come = sum(bool(node.users) for node in program.tangents)
    return StepShape(program.num_forward_outputs, program.handed_over, come, gradients)


def remaining_inputs(backward: fx.GraphModule) -> list[int]:
    """Return the positions of the inputs of a backward graph without the tangents that nothing reads."""
    nodes = backward.graph.find_nodes(op="placeholder")
    return [position for position, node in enumerate(nodes) if node.users or not is_tangent(node)]


def _examples(module: fx.GraphModule) -> list[Any]:
    return [node.meta.get("val") for node in module.graph.find_nodes(op="placeholder")]


def _laid_out(examples: Sequence[Any], strides: Sequence[Strides]) -> list[Any]:
    """Return `examples` with the first ones in the layouts that forward gives them."""
    found = list(examples)
    for position, wanted in enumerate(strides):
        example = found[position]
        if isinstance(example, torch.Tensor) and wanted is not None and tuple(example.stride()) != wanted:
            found[position] = example.as_strided(example.shape, wanted)
    return found
