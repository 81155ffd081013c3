"""Plans of a step from what is known of it: for another budget, or with menus of another planner."""

from __future__ import annotations

import time
from dataclasses import replace

from lowtide.plan.core.planner import AbstractPlanner
from lowtide.plan.core.result import Plan
from lowtide.plan.menu import make_menu
from lowtide.progress import Progress, silent
from lowtide.step.choose import NothingFits, choose_variants, least_peak
from lowtide.step.plan import StepPlan
from lowtide.step.plan_variant import Menus
from lowtide.step.problem import Block, StepProblem
from lowtide.step.step_block import StepBlock

# Long enough for the proof of most steps; what it leaves unproved is told.
_CHOOSE_SECONDS = 4.0


def best_plan(
    problem: StepProblem, menus: Menus, *, planner: str, seconds: float = 0.0, choose_seconds: float = _CHOOSE_SECONDS
) -> StepPlan:
    """Return the plan of least time that fits, or, if none is found, the one of least peak.

    Args:
        problem: The step.
        menus: For every block, the plans of its variants.
        planner: Who made the menus.
        seconds: Time spent planning so far.
        choose_seconds: Time for the choice.
    """
    begin = time.perf_counter()
    try:
        chosen = choose_variants(problem, seconds=choose_seconds)
    except NothingFits:
        chosen = least_peak(problem)
    return StepPlan.of(problem, menus, chosen, planner=planner, seconds=seconds + time.perf_counter() - begin)


def with_budget(step: StepPlan, budget_bytes: int) -> StepPlan:
    """Return the plan of the same step and the same menus for another budget."""
    found = best_plan(replace(step.problem, budget_bytes=budget_bytes), step.menus, planner=step.planner)
    return replace(found, cut=step.cut)


def with_menus(step: StepPlan, planner: AbstractPlanner, name: str, progress: Progress = silent) -> StepPlan:
    """Return the plan of the same step with menus that `planner`, called `name`, makes; other blocks stay."""
    begin = time.perf_counter()
    made = [_made(*each, planner, progress) for each in zip(step.problem.blocks, step.menus, strict=True)]
    problem = replace(step.problem, blocks=tuple(block for block, _ in made))
    menus = [menu for _, menu in made]
    return replace(best_plan(problem, menus, planner=name, seconds=time.perf_counter() - begin), cut=step.cut)


def _made(
    block: Block, menu: tuple[Plan, ...], planner: AbstractPlanner, progress: Progress
) -> tuple[Block, tuple[Plan, ...]]:
    if not menu:
        return block, menu
    own = menu[0].problem
    made = StepBlock(block.name, make_menu(own.graph, own.costs, planner, progress))
    return made.as_block(), made.plans
