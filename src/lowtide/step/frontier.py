"""A walk along the instances that keeps the partial choices of which no other has fewer bytes and less cost.

Suffixes of `net` are taken as their least, so the walk solves a relaxation; where the variants of each block have the
same net, as they have if all leave the same gradients, it solves the rows themselves. Partial choices that a price per
byte (a Lagrange multiplier of one row) proves too slow are dropped. Exact unless more than `width` are left; the cost
is then instances times width times variants.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lowtide.step.policy import POLICY
from lowtide.step.problem import Choice
from lowtide.step.rows import Option, Rows

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Walked:
    """What a walk found.

    Attributes:
        choice: The best choice found, None if nothing fits.
        bound: No choice that fits costs less.
    """

    choice: Choice | None
    bound: float


def walk(rows: Rows, deadline: float) -> Walked:
    """Return the best choice and a lower bound, which is its cost unless the walk was cut short."""
    price = _best_price(rows)
    first = _walk(rows, price, POLICY.first_width, None, float("inf"))
    if first.choice is None:
        return Walked(None, float("inf"))
    if not first.cut:
        return Walked(first.choice, first.cost)
    second = _walk(rows, price, POLICY.width, first.cost, deadline)
    best = first if second.choice is None or second.cost >= first.cost else second
    return Walked(best.choice, max(0.0, price.root - 1.0) if second.cut else best.cost)


@dataclass(frozen=True, slots=True)
class _Price:
    """A price per unit of bytes, what is left to pay at each stage, and the lower bound it proves for the whole."""

    per_byte: Floats
    rest: Floats
    root: float


@dataclass(frozen=True, slots=True)
class _Pass:
    choice: Choice | None
    cost: int
    cut: bool


def _walk(rows: Rows, price: _Price, width: int, limit: int | None, deadline: float) -> _Pass:
    """Walk once; choices that cost `limit` or more are of no use."""
    nets = rows.least_nets()
    after, cost = np.zeros(1, np.int64), np.zeros(1, np.int64)
    trail: list[tuple[Ints, Ints]] = []
    cut = False
    for stage, options in enumerate(rows.options):
        if time.perf_counter() > deadline:
            return _Pass(None, 0, True)
        steps = _expand(rows, stage, options, after, nets[stage + 1])
        after, cost, parent, option = _pareto(after, cost, options, steps)
        score = cost + price.per_byte[stage + 1] * after + price.rest[stage + 1]
        kept = _kept(score, width, limit)
        cut = cut or (len(kept) == width)
        after, cost = after[kept], cost[kept]
        trail.append((parent[kept], option[kept]))
        if not len(kept):
            return _Pass(None, 0, cut)
    best = int(np.argmin(cost))
    return _Pass(_back(rows, trail, best), int(cost[best]), cut)


def _expand(rows: Rows, stage: int, options: tuple[Option, ...], after: Ints, net: int) -> npt.NDArray[np.bool_]:
    """Return which option may follow which partial choice."""
    add = np.array([o.after for o in options], np.int64)
    forward = np.array([o.forward_peak for o in options], np.int64)
    backward = np.array([o.backward_peak for o in options], np.int64)
    level = after[:, None]
    fits: npt.NDArray[np.bool_] = level + forward <= rows.forward[stage]
    fits &= level + (add + backward) <= rows.backward[stage] - net
    fits &= level + add <= min(rows.level[stage + 1], rows.turn[stage + 1] - net)
    if stage == 0 and min(rows.level[0], rows.turn[0] - rows.least_nets()[0]) < 0:
        fits[:] = False
    return fits


def _pareto(
    after: Ints, cost: Ints, options: tuple[Option, ...], fits: npt.NDArray[np.bool_]
) -> tuple[Ints, Ints, Ints, Ints]:
    """Return bytes, cost, parent and option of the longer choices, in order of bytes and of falling cost."""
    parent, option = np.nonzero(fits)
    longer = after[parent] + np.array([o.after for o in options], np.int64)[option]
    dearer = cost[parent] + np.array([o.cost for o in options], np.int64)[option]
    order = np.lexsort((dearer, longer))
    dear = dearer[order]
    least = np.minimum.accumulate(dear)
    order = order[np.concatenate((np.ones(min(1, len(dear)), np.bool_), dear[1:] < least[:-1]))]
    return longer[order], dearer[order], parent[order], option[order]


def _kept(score: Floats, width: int, limit: int | None) -> Ints:
    """Return those worth keeping; the first, which has the fewest bytes, is kept so that one fits at the end."""
    kept = np.arange(len(score)) if limit is None else np.flatnonzero(score <= limit)
    if len(kept) < width:
        return kept
    best = np.argpartition(score[kept[1:]], width - 2)[: width - 1]
    return np.sort(np.concatenate((kept[:1], kept[1:][best])))


def _back(rows: Rows, trail: list[tuple[Ints, Ints]], at: int) -> Choice:
    choice = []
    for options, (parent, option) in zip(reversed(rows.options), reversed(trail), strict=True):
        choice.append(options[int(option[at])].variant)
        at = int(parent[at])
    return tuple(reversed(choice))


def _best_price(rows: Rows) -> _Price:
    """Return the price and the row that prove most; the best price of a row is a slope between two variants."""
    caps = _caps(rows)
    rest = _suffix([min(o.cost for o in options) for options in rows.options])
    best = (float(rest[0]), 0.0, 0)
    for slope in _slopes(rows):
        spent = np.concatenate(([0.0], np.cumsum(_cheapest(rows, slope))))
        proved = spent - slope * caps + rest
        row = int(np.argmax(proved))
        best = max(best, (float(proved[row]), slope, row))
    root, slope, row = best
    ahead = _suffix(_cheapest(rows, slope)[:row]) - slope * caps[row] + rest[row]
    per_byte = np.where(np.arange(len(caps)) <= row, slope, 0.0)
    return _Price(per_byte, np.concatenate((ahead, rest[row + 1 :])), root)


def _cheapest(rows: Rows, slope: float) -> list[float]:
    """Return the least of cost and priced bytes of each instance."""
    menus = {id(options): options for options in rows.options}
    least = {key: min(o.cost + slope * o.after for o in options) for key, options in menus.items()}
    return [least[id(options)] for options in rows.options]


def _slopes(rows: Rows) -> list[float]:
    pairs = {(o.after - p.after, p.cost - o.cost) for options in set(rows.options) for o in options for p in options}
    slopes = sorted({cost / size for size, cost in pairs if size > 0 and cost > 0})
    return slopes[:: 1 + len(slopes) // POLICY.slopes]


def _caps(rows: Rows) -> Floats:
    """Return what the prefix of k instances can be at most."""
    nets = rows.least_nets()
    caps = [min(level, turn - net) for level, turn, net in zip(rows.level, rows.turn, nets, strict=True)]
    for k, options in enumerate(rows.options):
        caps[k] = min(caps[k], rows.forward[k] - min(o.forward_peak for o in options))
        caps[k + 1] = min(caps[k + 1], rows.backward[k] - nets[k + 1] - min(o.backward_peak for o in options))
    return np.array(caps, np.float64)


def _suffix(values: list[float] | list[int]) -> Floats:
    return np.concatenate((np.cumsum(np.array(values, np.float64)[::-1])[::-1], [0.0]))
