"""Hypothesis strategies for graphs, costs, schedules and problems."""

from __future__ import annotations

import os

from hypothesis import strategies as st

from lowtide.graph.build import GraphBuilder
from lowtide.graph.costs import Costs
from lowtide.graph.ir import Graph
from lowtide.plan.core.problem import Problem
from lowtide.schedule.steps import Schedule

sizes = st.integers(0, 40)


def examples(number: int) -> int:
    """Return how many examples to try: all in `make test-all`, which sets the variable, and an eighth otherwise."""
    return number if os.environ.get("LOWTIDE_ALL_EXAMPLES") else number // 8


@st.composite
def graphs(draw: st.DrawFn, *, max_ops: int = 7, marks: bool = True) -> tuple[Graph, Costs]:
    """Graphs of 1 to `max_ops` ops, with or without phases; with `marks`, also pinned and random ops and the like."""
    n = draw(st.integers(1, max_ops))
    boundary = draw(st.none() | st.integers(0, n))
    builder = GraphBuilder()
    values = [builder.add_input("x", draw(sizes))]
    if draw(st.booleans()):
        values.append(builder.add_input("w", draw(sizes), kind="parameter"))
    for k in range(n):
        if k == boundary:
            builder.begin_backward()
        inputs = draw(st.lists(st.sampled_from(values[-5:]), max_size=3))
        outputs = [(f"v{k}_{j}", draw(sizes)) for j in range(draw(st.sampled_from((1, 1, 1, 2))))]
        extra = draw(_marks(outputs)) if marks else {}
        values += builder.add_op(
            f"op{k}",
            inputs,
            outputs,
            seconds=float(draw(st.integers(0, 9))),
            workspace_bytes=draw(st.sampled_from((0, 0, 0, 7, 30))),
            **extra,
        )
    if boundary == n:
        builder.begin_backward()
    outputs = draw(st.lists(st.sampled_from(values), unique=True, max_size=3))
    graph = builder.build(outputs=outputs)
    forward = [value for op in graph.forward for value in graph.ops[op].outputs]
    handovers = draw(st.lists(st.sampled_from(forward), unique=True, max_size=1)) if forward and marks else []
    return builder.build(outputs=outputs, handovers=handovers), builder.costs()


@st.composite
def _marks(draw: st.DrawFn, outputs: list[tuple[str, int]]) -> dict[str, object]:
    kind = draw(st.sampled_from(("plain", "plain", "plain", "pinned", "random", "once")))
    if kind == "pinned":
        return {"pinned": "it has an effect"}
    if kind == "random":
        return {"random": True, "replay_bytes": draw(st.sampled_from((0, 3, 16)))}
    if kind == "once":
        return {"once": [outputs[-1][0]]}
    return {}


@st.composite
def problems(draw: st.DrawFn, *, max_ops: int = 7, marks: bool = True) -> Problem:
    """Problems whose budget lies between hopeless and ample."""
    graph, costs = draw(graphs(max_ops=max_ops, marks=marks))
    peak = Problem(graph, costs, 1).baseline.peak_bytes
    share = draw(st.integers(30, 105))
    return Problem(graph, costs, max(1, peak * share // 100))


@st.composite
def schedules(draw: st.DrawFn, graph: Graph) -> Schedule:
    """Legal schedules: first runs in the given order, and repeated runs of ops that may run again anywhere after."""
    passes: list[list[int]] = [list(graph.forward), list(graph.backward)]
    for _ in range(draw(st.integers(0, 5))):
        part = draw(st.integers(0, 1)) if graph.boundary is not None else 0
        steps = passes[part]
        place = draw(st.integers(0, len(steps)))
        before = set(passes[0]) if part else set()
        before.update(steps[:place])
        free = sorted(op for op in before if not graph.ops[op].pinned)
        if free:
            steps.insert(place, draw(st.sampled_from(free)))
    return Schedule(tuple(passes[0]), tuple(passes[1]))
