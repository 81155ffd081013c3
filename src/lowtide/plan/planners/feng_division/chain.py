"""Cutting a row of vertices under a threshold, and the best cut over all thresholds.

Between two kept vertices lies a segment; it costs what lies strictly inside it. With a threshold no segment may cost
more, except a single step from a vertex to the next: in a chain thresholds begin at the most expensive step, and in a
graph such a step is divided further.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from lowtide.errors import InvalidGraphError
from lowtide.plan.planners.feng_division.terms import Terms, minimise

_FEWEST = 2


@dataclass(frozen=True)
class Row:
    """Vertices in a row; the first and the last one cost nothing.

    Attributes:
        stored: For every vertex, the cost of keeping it.
        inside: For every vertex, its cost inside a segment.
        between: For every vertex but the last, the cost of what lies between it and the next.
    """

    stored: tuple[int, ...]
    inside: tuple[int, ...]
    between: tuple[int, ...]

    @cached_property
    def counted(self) -> list[int]:
        """For every vertex its cost inside a segment: 0 for the first and the last one."""
        return [0, *self.inside[1:-1], 0]

    @cached_property
    def before(self) -> list[int]:
        """For every vertex the cost of all that comes before it."""
        return [0, *accumulate(own + gap for own, gap in zip(self.counted[:-1], self.between, strict=True))]


def cut(row: Row, limit: int) -> tuple[int, list[int]]:
    """Return the least cost of vertices to keep so that no segment costs more than `limit`, and these vertices.

    A shortest path over the vertices: an arc leads from one to another if the segment between them is allowed. The
    first vertex from which an arc leads to the next moves to the right only, so a queue of the least costs in the
    window makes this linear. Where costs are equal fewer vertices are kept, then later ones.
    """
    last = len(row.stored) - 1
    before, counted = row.before, row.counted
    best: list[tuple[int, int]] = [(0, 0)]
    came_from = [0]
    window: deque[int] = deque([0])
    for vertex in range(1, last + 1):
        while window[0] < vertex - 1 and before[vertex] - before[window[0]] - counted[window[0]] > limit:
            window.popleft()
        cost, count = best[window[0]]
        came_from.append(window[0])
        here = (cost + row.stored[vertex], count + 1) if vertex < last else (cost, count)
        best.append(here)
        while window and best[window[-1]] >= here:
            window.pop()
        window.append(vertex)
    path, vertex = [], came_from[last]
    while vertex:
        path.append(vertex)
        vertex = came_from[vertex]
    return best[last][0], path[::-1]


@dataclass(frozen=True, slots=True)
class ChainCut:
    """The best cut of a row.

    Attributes:
        checkpoints: The vertices kept, by position.
        total: Cost of keeping them plus `max_term`.
        max_term: Cost of the most expensive segment.
    """

    checkpoints: tuple[int, ...]
    total: int
    max_term: int


def solve_chain(
    stored: Sequence[int], *, inside: Sequence[int] | None = None, between: Sequence[int] | None = None
) -> ChainCut:
    """Return the checkpoints of a chain that minimise their cost plus the cost of the most expensive segment.

    Example:
        ```python
        solve_chain([1] * 10)
        #> ChainCut(checkpoints=(3, 6), total=4, max_term=2)
        ```

    Args:
        stored: For every vertex the cost of keeping it; those of the first and the last are not used.
        inside: For every vertex its cost inside a segment, `stored` by default.
        between: For every vertex but the last the cost of what lies between it and the next, 0 by default.
    """
    row = Row(
        stored=tuple(stored),
        inside=tuple(stored if inside is None else inside),
        between=tuple([0] * (len(stored) - 1) if between is None else between),
    )
    check_row(row)
    terms = Terms([(row.before, row.counted)])
    total, limit, path = minimise(terms, lambda limit: cut(row, limit), least=max(row.between))
    return ChainCut(tuple(path), total, limit)


def check_row(row: Row) -> None:
    """Raise `InvalidGraphError` unless `row` has two vertices or more, and costs of at least 0 for all of them."""
    count = len(row.stored)
    if count < _FEWEST or len(row.inside) != count or len(row.between) != count - 1:
        raise InvalidGraphError(
            f"A chain of {count} vertices with {len(row.inside)} costs inside and {len(row.between)} between; it needs "
            "two vertices or more, a cost inside for each, and one between for each but the last."
        )
    if min(*row.stored, *row.inside, *row.between) < 0:
        raise InvalidGraphError(f"A cost of {min(*row.stored, *row.inside, *row.between)}; costs must be at least 0.")
