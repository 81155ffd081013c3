"""What a plan of a block takes, as the step planner sees it; and the step in which no block has a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lowtide.plan.core.problem import Problem
from lowtide.plan.core.result import Plan
from lowtide.schedule.simulate import Trace
from lowtide.step.problem import Block, StepProblem, Variant

# The plans of each block; none of a block that has no graph.
Menus = Sequence[Sequence[Plan]]


def plan_variant(problem: Problem, trace: Trace) -> Variant:
    """Return what a schedule with this trace takes as a block of a step; nothing is proved of it."""
    forward, backward = trace.bytes_during[: trace.boundary], trace.bytes_during[trace.boundary :]
    after, graph = trace.saved_bytes, problem.graph
    # Outputs and gradients are there when backward ends, whatever the plan.
    end = sum(graph.values[value].bytes for value in graph.outputs) - after if backward else 0
    return Variant(
        forward_peak=max((*forward, after)),
        forward_after=after,
        backward_peak=max((*(size - after for size in backward), end, 0)),
        backward_after=end,
        seconds=max(trace.seconds - problem.baseline.seconds, 0.0),
        bound_seconds=0.0,
        floor_bytes=0,
    )


def same_price(one: Variant, other: Variant) -> bool:
    """Return True if two variants take the same, whatever is proved of them."""
    return replace(one, bound_seconds=0.0, floor_bytes=0) == replace(other, bound_seconds=0.0, floor_bytes=0)


def plain_step(problem: StepProblem, menus: Menus) -> StepProblem:
    """Return the step in which every block runs each op once, in the given order; it has one choice.

    Of a block without a graph it is the first variant, which recomputes nothing.
    """
    blocks = tuple(
        Block(block.name, (plan_variant(menu[0].problem, menu[0].problem.baseline) if menu else block.variants[0],))
        for block, menu in zip(problem.blocks, menus, strict=True)
    )
    return replace(problem, blocks=blocks, fixed=())
