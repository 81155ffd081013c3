"""Mirror counts: how often each forward op's result is dropped and computed again, as a schedule.

Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016, Algorithm 2. There the gradient graph
is built on copies of the forward ops; here the gradient ops exist already, and only the order of runs is asked for. The
copy of an op at level 1 is computed from copies at level 1, the copy at level 2 from copies at level 2, and so on, each
from the highest copy there is if an op has fewer. Gradient ops read the highest copies.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from lowtide.errors import InvalidOptionError
from lowtide.graph.ir import Graph, OpId, ValueId
from lowtide.schedule.steps import Schedule

_Copy = tuple[OpId, int]


def mirror(graph: Graph, counts: Mapping[OpId, int], *, kept: Collection[ValueId] = ()) -> Schedule:
    """Return the schedule in which backward reads the `counts[op]`-th copy of what each forward op makes.

    Forward runs as given. Backward runs as given, and a copy is run just before the first op that needs it, so a copy
    that nothing needs never runs. With counts of 0 and 1 this is `expand`.

    Args:
        graph: A graph with phases.
        counts: For each forward op 0 to keep its result, 1 to compute it once more from results that are kept, more for
            as many levels of copies. Ops that are not named have 0, and so have pinned ops whatever is said here.
        kept: Values that are kept although their op is copied. Outputs of the graph always are.
    """
    levels = _levels(graph, counts)
    stays = frozenset(kept) | graph.held
    done: set[_Copy] = set()
    backward: list[OpId] = []
    for op in graph.backward:
        backward += _pull(graph, op, levels, stays, done)
    return Schedule(tuple(graph.forward), tuple(backward))


def _levels(graph: Graph, counts: Mapping[OpId, int]) -> list[int]:
    """Return the number of copies of every op."""
    levels = [0] * len(graph.ops)
    for op, count in counts.items():
        if not 0 <= op < len(graph.ops):
            raise InvalidOptionError(f"A mirror count is given for op {op}; ops are 0 to {len(graph.ops) - 1}.")
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise InvalidOptionError(
                f"The mirror count of op {graph.ops[op].name!r} is {count!r}; it must be a whole number of at least 0."
            )
        if count and not graph.is_forward(op):
            raise InvalidOptionError(
                f"The mirror count of the backward op {graph.ops[op].name!r} is {count}; only forward ops have copies."
            )
        levels[op] = 0 if graph.ops[op].pinned else count
    return levels


def _pull(graph: Graph, op: OpId, levels: list[int], stays: frozenset[ValueId], done: set[_Copy]) -> list[OpId]:
    """Return the ops to run, `op` last, so that it finds the copies it reads; add those copies to `done`."""
    order: list[OpId] = []
    stack: list[tuple[_Copy, bool]] = [((op, 0), False)]
    while stack:
        copy, ready = stack.pop()
        if ready:
            order.append(copy[0])
            continue
        if copy in done:
            continue
        done.add(copy)
        stack.append((copy, True))
        stack += [(source, False) for source in _sources(graph, copy, levels, stays) if source not in done]
    return order


def _sources(graph: Graph, copy: _Copy, levels: list[int], stays: frozenset[ValueId]) -> Iterator[_Copy]:
    """Yield the copies that `copy` reads, last input first; results that are kept are there already."""
    op, level = copy
    for value in reversed(graph.ops[op].inputs):
        producer = graph.values[value].producer
        if producer is None or value in stays or not levels[producer]:
            continue
        if value not in graph.ops[producer].first_run_only:
            yield producer, min(level, levels[producer]) if level else levels[producer]
