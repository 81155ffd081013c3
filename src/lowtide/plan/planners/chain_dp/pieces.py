"""A training graph as a chain of pieces, each with its own stretch of the backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappush, heapreplace
from itertools import accumulate

from lowtide.graph.analysis import Link, chain_of
from lowtide.graph.costs import Costs
from lowtide.graph.ir import Graph, ValueId


@dataclass(frozen=True, slots=True)
class Piece:
    """One or several links of the chain, and the part of backward that belongs to them.

    Attributes:
        forward: Its forward ops, consecutive in the given order.
        value: The value that later pieces read, or None for the last piece.
        backward: Its backward ops, consecutive in the given order.
    """

    forward: range
    value: ValueId | None
    backward: range


@dataclass(frozen=True, slots=True)
class Pieces:
    """A graph as a chain of pieces.

    Attributes:
        graph: The graph.
        pieces: The pieces in the order of forward; backward runs through them the other way round.
        fixed: Values that are there during the whole of backward whatever is planned.
    """

    graph: Graph
    pieces: tuple[Piece, ...]
    fixed: frozenset[ValueId]

    def __len__(self) -> int:
        return len(self.pieces)


def pieces_of(graph: Graph, costs: Costs, most: int) -> Pieces:
    """Return `graph` as a chain of at most `most` pieces.

    A link whose value backward does not read is merged with the next one if that has no larger value and the link holds
    little else that backward reads: the next value is as good a checkpoint, and keeping both would be a waste. A chain
    with still more links is merged further: the links are divided into stretches of about equal weight, where the
    weight of a link is its share of all seconds plus its share of all bytes, and each stretch ends at its smallest
    value.
    """
    chain = chain_of(graph, costs)
    fixed = graph.always_there | chain.ambient
    links = _worthwhile(graph, chain.links)
    ends = _ends(links, most)
    starts = [0, *(links[end].ops.stop for end in ends)]
    forward = [range(start, links[end].ops.stop) for start, end in zip(starts, ends, strict=False)]
    values = [links[end].value for end in ends]
    backward = _backward_parts(graph, forward, values, fixed)
    return Pieces(graph, tuple(map(Piece, forward, values, backward)), fixed)


def chain_length(graph: Graph, costs: Costs) -> int:
    """Return the number of cut points in the forward pass of `graph`."""
    return len(chain_of(graph, costs).links) - 1


def _worthwhile(graph: Graph, links: Sequence[Link]) -> list[Link]:
    """Return `links` without the values that backward does not read and a later one no larger can stand for."""
    found = [links[-1]]
    for link in reversed(links[:-1]):
        following = found[-1]
        assert link.value is not None, "only the last link has no value"
        read = any(not graph.is_forward(reader) for reader in graph.readers[link.value])
        # A border before much that backward reads is worth its bytes: what is inside need not be there all at once.
        if read or following.value is None or following.bytes > link.bytes or link.inside_bytes > link.bytes:
            found.append(link)
        else:
            found[-1] = Link(
                range(link.ops.start, following.ops.stop),
                following.value,
                following.bytes,
                link.inside_bytes + following.inside_bytes,
                link.seconds + following.seconds,
            )
    return found[::-1]


def _ends(links: Sequence[Link], most: int) -> list[int]:
    """Return the links at which pieces end; the last link is one of them."""
    last = len(links) - 1
    if len(links) <= most:
        return list(range(len(links)))
    seconds = sum(link.seconds for link in links) or 1.0
    size = sum(link.bytes + link.inside_bytes for link in links) or 1
    weights = [link.seconds / seconds + (link.bytes + link.inside_bytes) / size for link in links]
    reached = list(accumulate(weights))
    # Heavy links leave stretches empty, so there may be more stretches than pieces.
    stretches = most - 1
    while len(wider := _fill(reached, 2 * stretches)) < most:
        stretches *= 2
        if len(wider) == last:
            break
    low, high = stretches, 2 * stretches
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if len(_fill(reached, middle)) < most else (low, middle)
    return [*(min(ends, key=lambda k: (links[k].bytes, -k)) for ends in _fill(reached, low)), last]


def _fill(reached: Sequence[float], stretches: int) -> list[list[int]]:
    """Return the links but the last, divided into stretches of equal weight, without those that are empty."""
    found: dict[int, list[int]] = {}
    whole = reached[-1] or 1.0
    for k in range(len(reached) - 1):
        found.setdefault(min(int(reached[k] / whole * stretches), stretches - 1), []).append(k)
    return list(found.values())


def _backward_parts(
    graph: Graph, forward: Sequence[range], values: Sequence[ValueId | None], fixed: frozenset[ValueId]
) -> list[range]:
    """Return the backward ops of every piece: stretches of the given order, the last piece first.

    A backward op points at the piece whose values it reads; the value between two pieces points at the later one. The
    stretches are those with the least sum of distances to the pieces pointed at, so that an op out of place does not
    move the others.
    """
    points: dict[ValueId, int] = {}
    for k, ops in enumerate(forward):
        points |= {made: k + (made == values[k]) for op in ops for made in graph.ops[op].outputs if made not in fixed}
    pointed = [
        max((points[value] for value in graph.ops[op].inputs if value in points), default=-1) for op in graph.backward
    ]
    reading = [at for at in pointed if at >= 0]
    fitted = iter(_falling_fit(reading))
    piece = len(forward) - 1
    ends = [graph.num_forward] * (len(forward) + 1)
    for op, at in zip(graph.backward, pointed, strict=True):
        if at >= 0:
            piece = next(fitted)
        ends[piece] = op + 1
    for k in reversed(range(len(forward))):
        ends[k] = max(ends[k], ends[k + 1])
    # Ops before the first one that reads anything, and after the last, belong to the outermost pieces.
    ends[0] = len(graph.ops)
    return [range(ends[k + 1], ends[k]) for k in range(len(forward))]


def _falling_fit(points: Iterable[int]) -> list[int]:
    """Return the row that never rises and has the least sum of distances to `points`."""
    # The least cost so far is a convex function of the row's last entry, bent at the places in the heap; above the
    # least of them it does not fall any more, so that is the best last entry.
    heap: list[int] = []
    fit = []
    for point in points:
        heappush(heap, point)
        if heap[0] < point:
            heapreplace(heap, point)
        fit.append(heap[0])
    for k in reversed(range(len(fit) - 1)):
        fit[k] = max(fit[k], fit[k + 1])
    return fit
