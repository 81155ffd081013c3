"""When every value must be there: the facts about a problem that hold for every schedule, as plain lists.

Time is counted by first runs, which are in the given order: the first run of op `k` is the instant `2k`. Repeated runs
happen at unknown times in between. The end of forward and the end of the step are odd instants, so that nothing else
falls on them. A value is *due* at an instant if every schedule needs it there: when its op first runs, when an op that
reads it first runs, and at the end of the phase to which an output or a handover belongs. Between two instants at which
it is due, a value is either carried all the way or its op runs again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lowtide.graph.ir import Graph, OpId, ValueId
from lowtide.plan.bounds.policy import PROGRAM
from lowtide.plan.core.problem import Problem

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """Facts about a problem.

    Attributes:
        num_ops: Number of ops.
        forward_end: The instant at which forward ends.
        end: The instant at which the step ends.
        budget_bytes: The budget.
        bytes: For every value, its size; 0 for inputs and for values that are too small to matter.
        producer: For every value, the op that makes it, or -1.
        again: For every value, whether a repeated run makes it.
        reads: For every op, the values it reads that have a size.
        due: For every value with a size, the instants at which it is due, in order.
        lasting: For every value, whether it stays to the end of the step once forward has ended.
        own: For every op, the bytes that its first run needs whatever is kept: what it reads and writes, workspace, and
            outputs of forward if it belongs to backward.
        own_again: For every op, the bytes that a repeated run of it needs whatever is kept: what it reads and writes,
            but for what stays to the end, and workspace.
        touched_again: For every op, the values that a repeated run of it reads or writes.
        lasting_bytes: The bytes of the values that stay to the end of the step.
        replay: For every op, the bytes kept for a repeated run.
        cost: For every op, its seconds as a share of the step's.
    """

    num_ops: int
    forward_end: int
    end: int
    budget_bytes: int
    bytes: list[int]
    producer: list[int]
    again: list[bool]
    reads: list[list[ValueId]]
    due: list[list[int]]
    lasting: list[bool]
    own: Floats
    own_again: list[int]
    touched_again: list[list[ValueId]]
    lasting_bytes: int
    replay: list[int]
    cost: list[float]

    @staticmethod
    def of(problem: Problem) -> Lifetimes:
        """Return the lifetimes of the values of `problem`."""
        graph, costs = problem.graph, problem.costs
        producer = [-1 if value.producer is None else value.producer for value in graph.values]
        size = _sizes(graph, problem.budget_bytes)
        reads = [[v for v in dict.fromkeys(op.inputs) if size[v]] for op in graph.ops]
        forward_end, end = 2 * graph.num_forward - 1, 2 * len(graph.ops) - 1
        lasting = [v in graph.held and 0 <= 2 * producer[v] < forward_end for v in range(len(size))]
        again = [
            p >= 0 and not graph.ops[p].pinned and v not in graph.ops[p].first_run_only for v, p in enumerate(producer)
        ]
        touched_again = [sorted({*op.inputs, *graph.rewrites[k]}) for k, op in enumerate(graph.ops)]
        own_again = [
            workspace + sum(size[v] for v in touched if not lasting[v])
            for workspace, touched in zip(costs.workspace_bytes, touched_again, strict=True)
        ]
        base = problem.baseline.seconds
        return Lifetimes(
            num_ops=len(graph.ops),
            forward_end=forward_end,
            end=end,
            budget_bytes=problem.budget_bytes,
            bytes=size,
            producer=producer,
            again=again,
            reads=reads,
            due=_due(graph, size, forward_end, end),
            lasting=lasting,
            own=_own(problem, size, lasting, forward_end),
            own_again=own_again,
            touched_again=touched_again,
            lasting_bytes=sum(size[v] for v, is_lasting in enumerate(lasting) if is_lasting),
            replay=[op.replay_bytes for op in graph.ops],
            cost=[seconds / base if base else 0.0 for seconds in costs.seconds],
        )

    def is_fixed(self, value: ValueId, instant: int) -> bool:
        """Whether `value` is alive at `instant` in every schedule."""
        return instant in self.due[value] or (self.lasting[value] and instant > self.forward_end)


def _sizes(graph: Graph, budget: int) -> list[int]:
    """Return the size of every value, 0 for inputs and for the smallest, negligible ones."""
    size = [0 if value.producer is None else value.bytes for value in graph.values]
    left = PROGRAM.negligible_share * budget
    for value in sorted(range(len(size)), key=size.__getitem__):
        left -= size[value]
        if left < 0:
            break
        size[value] = 0
    return size


def _due(graph: Graph, size: Sequence[int], forward_end: int, end: int) -> list[list[int]]:
    due: list[list[int]] = [[] for _ in size]
    for value, producer in ((v, fact.producer) for v, fact in enumerate(graph.values) if size[v]):
        assert producer is not None
        instants = {2 * producer, *(2 * reader for reader in graph.readers[value])}
        in_forward = 2 * producer < forward_end
        if value in graph.handovers or (value in graph.held and in_forward):
            instants.add(forward_end)
        if value in graph.held:
            # From the end of forward on, an output of forward is there anyway: nothing is open about it.
            instants = {i for i in instants if i <= forward_end} if in_forward else instants | {end}
        due[value] = sorted(instants)
    return due


def _own(problem: Problem, size: Sequence[int], lasting: Sequence[bool], forward_end: int) -> Floats:
    """Return the bytes of every first run that nothing can avoid."""
    graph = problem.graph
    stays = {value for value, is_lasting in enumerate(lasting) if is_lasting}
    stays_bytes = sum(size[value] for value in stays)
    own = np.array(problem.costs.workspace_bytes, dtype=np.float64)
    for k, op in enumerate(graph.ops):
        touched = {*op.inputs, *op.outputs}
        own[k] += sum(size[value] for value in touched)
        if 2 * k > forward_end:
            own[k] += stays_bytes - sum(size[value] for value in touched & stays)
    return own


def first_run(op: OpId) -> int:
    """Return the instant of the first run of `op`."""
    return 2 * op
