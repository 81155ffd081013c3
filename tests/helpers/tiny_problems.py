"""Random problems small enough for brute force, and their optimum."""

import random

from lowtide.graph.build import GraphBuilder
from lowtide.plan.core.problem import Problem
from lowtide.plan.planners.brute_force import BruteForce


def random_graph(seed):
    """Return a tiny graph with costs; a third of them have phases, two thirds pinned, random and other marked ops."""
    rng = random.Random(seed)
    n = rng.randint(4, 9)
    boundary = rng.choice([None, None, n // 2, n // 2, rng.randint(0, n)])
    builder = GraphBuilder()
    values = [builder.add_input("x", rng.randint(0, 40))]
    for k in range(n):
        if k == boundary:
            builder.begin_backward()
        near = values[-rng.choice([3, 5, 8]) :]
        if boundary and k >= boundary and rng.random() < 0.7:
            near = values
        inputs = rng.sample(near, min(len(near), rng.choice([1, 1, 2, 2, 3])))
        outputs = [(f"v{k}_{j}", rng.randint(0, 40)) for j in range(rng.choice((1, 1, 1, 2)))]
        values += builder.add_op(
            f"op{k}",
            inputs,
            outputs,
            seconds=float(rng.randint(0, 9)),
            workspace_bytes=rng.choice((0, 0, 0, 7, 30)),
            **(marks(rng, outputs) if seed % 3 else {}),
        )
    if boundary == n:
        builder.begin_backward()
    graph = builder.build()
    outputs = rng.sample(values, min(len(values), rng.choice([0, 1, 1, 2, 3])))
    forward = [value for op in graph.forward for value in graph.ops[op].outputs]
    handovers = rng.sample(forward, 1) if forward and rng.random() < 0.2 else []
    return builder.build(outputs=outputs, handovers=handovers), builder.costs()


def marks(rng, outputs):
    kind = rng.choice(["plain"] * 8 + ["pinned", "random", "once"])
    if kind == "pinned":
        return {"pinned": "it has an effect"}
    if kind == "random":
        return {"random": True, "replay_bytes": rng.choice((0, 3, 16))}
    if kind == "once":
        return {"once": [outputs[-1][0]]}
    return {}


def least_peak(graph, costs):
    problem = Problem(graph, costs, 1)
    return problem.price(BruteForce().propose(problem).schedule).peak_bytes


def optimum_of(problem):
    proposal = BruteForce().propose(problem)
    trace = problem.price(proposal.schedule)
    return problem.overhead(trace) if problem.fits(trace) else None


def cases(seeds):
    """Yield problems whose budgets lie between the least peak, less a little, and the peak of plain training."""
    for seed in seeds:
        graph, costs = random_graph(seed)
        peak = Problem(graph, costs, 1).baseline.peak_bytes
        if peak <= 1:
            continue
        least = least_peak(graph, costs)
        if least < peak:
            yield seed, least, Problem(graph, costs, random.Random(seed).randint(max(1, least - 2), peak - 1))
