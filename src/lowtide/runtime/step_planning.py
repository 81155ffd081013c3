"""The plan of a step of several blocks, made on fake tensors: what a call is captured as, and which variants fit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from lowtide import device as devices
from lowtide.blocks.step.expected_gaps import expected_backward
from lowtide.blocks.step.gap_book import GapBook
from lowtide.blocks.step.module_places import ModulePlaces
from lowtide.blocks.step.rehearsal import Rehearsal, RunForm
from lowtide.capture.captured_graph import CapturedGraph
from lowtide.plan import registry
from lowtide.plan.diagnose.infeasible import AskedBudget
from lowtide.plan.menu import menu_planner
from lowtide.runtime.model_plans import Session
from lowtide.runtime.pipeline import parameter_gradient_bytes
from lowtide.step.peak import infeasible_step
from lowtide.step.plan import StepPlan
from lowtide.step.plan_variant import plain_step
from lowtide.step.problem import StepProblem, holding, with_scalars
from lowtide.step.replan import best_plan
from lowtide.step.simulate import simulate_step
from lowtide.step.step_block import StepBlock
from lowtide.step.surroundings import Gaps
from lowtide.units import Budget


class CallCapture:
    """The graphs that a call on fake tensors is captured as, and their runs."""

    def __init__(self) -> None:
        self.graphs: list[CapturedGraph] = []
        self.num_runs = 0
        self.rehearsal: Rehearsal | None = None
        self._trained: dict[int, list[bool]] = {}

    def add(self, captured: CapturedGraph) -> int:
        """Return the number of a captured graph; equal graphs have one."""
        graph = captured.program.graph
        for number, other in enumerate(self.graphs):
            if other.program.graph == graph:
                return number
        self.graphs.append(captured)
        return len(self.graphs) - 1

    def run(self, number: int, forward: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Return what a graph returns; once there is a rehearsal, it is told."""
        self.num_runs += 1
        if self.rehearsal is not None and number in self._trained:
            form = RunForm(forward, self._trained[number], self._kept(number))
            return self.rehearsal.run(number, form, args)
        results = forward(*args)
        self._trained[number] = [isinstance(each, torch.Tensor) and each.requires_grad for each in results]
        return results

    def _kept(self, number: int) -> list[int]:
        """Return the positions of the results of a graph that its own backward reads."""
        program = self.graphs[number].program
        graph = program.graph
        read = {value for op in graph.backward for value in graph.reads[op]}
        # What is written into inputs stands before the results.
        results = program.forward_outputs[program.num_forward_outputs - len(self._trained[number]) :]
        return [place for place, node in enumerate(results) if program.values.get(node) in read]


def plan_step(
    call: CallCapture, rehearsal: Rehearsal, places: ModulePlaces, session: Session, begin: float, *, copied_bytes: int
) -> StepPlan:
    """Return the plan of the step that was rehearsed; raise if none fits, unless the session may exceed the budget.

    Args:
        call: Its graphs.
        rehearsal: Its runs, and the code between them.
        places: The modules of the model, by which blocks are named.
        session: Makes the menus.
        begin: When planning began.
        copied_bytes: Copies that are there while a forward runs that may have to begin again.
    """
    blocks = _blocks(call, rehearsal, places, session)
    menus = [block.plans for block in blocks]
    instances = tuple(run.block for run in rehearsal.runs)
    gaps = _gaps(rehearsal, blocks, session)
    problem = StepProblem(
        blocks=tuple(block.as_block() for block in blocks),
        instances=instances,
        forward_gaps=with_scalars(holding(gaps.forward, copied_bytes)),
        backward_gaps=gaps.backward,
        budget_bytes=1,
    )
    whole = simulate_step(plain_step(problem, menus), (0,) * len(instances)).peak_bytes
    asked = _asked(session.settings.budget, whole, call.graphs[0].program.device)
    planner = registry.name_of(menu_planner(session.settings.planner))
    problem = replace(problem, budget_bytes=max(asked.bytes, 1))
    plan = session.with_cut(best_plan(problem, menus, planner=planner, seconds=time.perf_counter() - begin))
    plan = replace(plan, account=session.step.around.account(instances, plan.peak_bytes))
    if not plan.fits and not session.may_exceed:
        raise infeasible_step(plan, asked)
    return plan


def _gaps(rehearsal: Rehearsal, blocks: Sequence[StepBlock], session: Session) -> Gaps:
    """Return what happens between the blocks: code that was rehearsed, and what stands around them."""
    instances = tuple(run.block for run in rehearsal.runs)
    backward = rehearsal.backward_gaps or expected_backward(GapBook(), blocks, instances)
    *leaves, last = rehearsal.leaf_bytes
    runs = [
        replace(run.module, gradient_bytes=blocks[run.block].gradient_bytes, leaf_bytes=leaf)
        for run, leaf in zip(rehearsal.runs, leaves, strict=True)
    ]
    around = session.step.around
    around.begin_call()
    around.note(instances, runs, last)
    return around.add_to(Gaps(rehearsal.forward_gaps, backward), instances, None)


def _blocks(call: CallCapture, rehearsal: Rehearsal, places: ModulePlaces, session: Session) -> list[StepBlock]:
    """Return a block with a menu for every graph, named after the module that owns the parameters of its first run."""
    blocks = []
    for number, captured in enumerate(call.graphs):
        parameters = next((run.parameters for run in rehearsal.runs if run.block == number), ())
        name = places.owner(parameters)
        menu, gradients = session.find_menu(captured.program), parameter_gradient_bytes(captured.program)
        blocks.append(StepBlock(f"graph {number}" if name is None else name, menu, gradient_bytes=gradients))
    return blocks


def _asked(budget: Budget | None, whole_bytes: int, device: torch.device) -> AskedBudget:
    assert budget is not None
    free = devices.free_bytes(device) if budget.is_auto else budget.resolve(whole_bytes)
    return AskedBudget.of(budget, free, whole_bytes=whole_bytes)
