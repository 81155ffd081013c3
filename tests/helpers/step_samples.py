"""Plans of steps of several blocks to save, verify and report on; no model is needed."""

from __future__ import annotations

from lowtide.graph.costs import Costs
from lowtide.graph.ir import Graph
from lowtide.graph.samples import unet
from lowtide.plan.menu import make_menu
from lowtide.plan.registry import get
from lowtide.step.plan import StepPlan
from lowtide.step.plan_variant import plain_step
from lowtide.step.problem import Gap, StepProblem
from lowtide.step.replan import best_plan
from lowtide.step.simulate import simulate_step
from lowtide.step.step_block import StepBlock


def block_of(graph: Graph, name: str) -> StepBlock:
    costs = Costs(tuple(0.001 * (1 + index % 3) for index in range(len(graph.ops))), (8,) * len(graph.ops), "test")
    return StepBlock(name, make_menu(graph, costs, get("greedy")))


def step_plan(share: float = 0.6, *, runs: tuple[int, ...] = (0, 1, 1, 1), graphs: tuple[Graph, ...] = ()) -> StepPlan:
    """Return a plan for a step of two blocks, the second of which is a layer that runs three times."""
    graphs = graphs or (unet(4, size=2**18)[0], unet(6, size=2**20)[0])
    blocks = [block_of(graphs[0], "embedding"), block_of(graphs[1], "decoder.layers.0")]
    menus = [block.plans for block in blocks]
    # The code behind the last block makes a tensor, holds half of it, and lets go of it in backward.
    forward = (*(Gap(0, 0) for _ in runs), Gap(2**20, 2**19))
    backward = (*(Gap(0, 0) for _ in runs), Gap(0, -(2**19)))
    problem = StepProblem(tuple(block.as_block() for block in blocks), runs, forward, backward, 2**60)
    whole = simulate_step(plain_step(problem, menus), (0,) * len(runs)).peak_bytes
    budget = max(int(share * whole), 1)
    problem = StepProblem(problem.blocks, runs, forward, backward, budget)
    return best_plan(problem, menus, planner="greedy", choose_seconds=1.0)
