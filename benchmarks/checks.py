"""What the table of planners must show, computed from its rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from common import Row

BEST = "auto"
GAP_LIMITS = {"median": 0.01, "90th percentile": 0.03, "maximum": 0.05}
SECONDS_LIMIT = 20.0
# Seconds are added in another order by another schedule.
ROUNDING = 1e-9
SHOWN = 8


@dataclass(frozen=True)
class Check:
    """A claim, whether it holds, and where it does not."""

    claim: str
    figures: str
    against: tuple[str, ...] = ()
    tested: bool = True

    @property
    def holds(self) -> bool:
        """Whether nothing speaks against it."""
        return not self.against

    def __str__(self) -> str:
        """Return one line, with the first few places where it does not hold."""
        verdict = "not tested" if not self.tested else ("yes" if self.holds else "**no**")
        more = f" and {len(self.against) - SHOWN} more" if len(self.against) > SHOWN else ""
        where = f" ({'; '.join(self.against[:SHOWN])}{more})" if self.against else ""
        return f"{self.claim}: {verdict}; {self.figures}{where}"


def checks(rows: Sequence[Row]) -> list[Check]:
    """Return all checks of a table."""
    return [never_worse(rows), feasible(rows), gaps(rows), monotone(rows), quick(rows)]


def failed(found: Sequence[Check]) -> bool:
    """Whether a check that could be made does not hold."""
    return any(check.tested and not check.holds for check in found)


def never_worse(rows: Sequence[Row]) -> Check:
    """Check that no planner has less overhead than auto at any point where both fit."""
    against, count = [], 0
    for point, auto in _auto(rows).items():
        for other in _others(rows, point):
            if not (other.get("fits") and auto.get("fits")):
                continue
            count += 1
            if other["overhead"] < auto["overhead"] - ROUNDING:
                against.append(
                    f"{_name(point)}: {other['planner']} {other['overhead']:.3%} against {auto['overhead']:.3%}"
                )
    return Check("auto is never slower than another planner", f"{count} comparisons", tuple(against), tested=count > 0)


def feasible(rows: Sequence[Row]) -> Check:
    """Check that auto fits the budget wherever any planner does."""
    against, fitting = [], 0
    points = _auto(rows)
    for point, auto in points.items():
        fitting += bool(auto.get("fits"))
        able = [other["planner"] for other in _others(rows, point) if other.get("fits")]
        if able and not auto.get("fits"):
            against.append(f"{_name(point)}: {able[0]} fits")
    figures = f"auto fits at {fitting} of {len(points)} points"
    return Check("auto fits wherever any planner does", figures, tuple(against), tested=bool(points))


def gaps(rows: Sequence[Row]) -> Check:
    """Check the spread of what auto's overhead may be above the least one there is.

    That is of all schedules in the given order; where auto's is faster than all of them, of those in its own order,
    about which less is proved. There the gap to the given order would be nothing; how that is spread is shown, too.
    """
    fitting = {point: row for point, row in _auto(rows).items() if row.get("fits")}
    known = {point: row["gap"] for point, row in fitting.items() if row.get("gap") is not None}
    against = [f"{_name(point)}: no bound" for point in fitting if point not in known]
    if not known:
        return Check("auto is proved to be near the optimum", "no bounds", tuple(against), tested=bool(fitting))
    spread = _spread(known.values())
    figures = ", ".join(f"{what} {value:.2%} of {GAP_LIMITS[what]:.0%}" for what, value in spread.items())
    against += [f"{what} {value:.2%}" for what, value in spread.items() if value > GAP_LIMITS[what]]
    against += [f"{_name(point)}: {gap:.2%}" for point, gap in known.items() if gap > GAP_LIMITS["maximum"]]
    faster = [point for point, row in fitting.items() if is_faster(row)]
    if faster:
        given = _spread(given_gap(fitting[point]) for point in known)
        spread_given = ", ".join(f"{what} {value:.2%}" for what, value in given.items())
        figures += f"; faster than all in the given order at {len(faster)} of them; to that order: {spread_given}"
    return Check("auto is proved to be near the optimum", f"gaps of {len(known)} points: {figures}", tuple(against))


def given_gap(row: Row) -> float:
    """Return what the overhead may be above the least one in the given order, or in its own if none of those fits."""
    given = row.get("given_bound")
    return float(row["gap"]) if given is None else max(0.0, row["overhead"] - given)


def is_faster(row: Row) -> bool:
    """Whether the schedule is faster than any in the given order can be."""
    given = row.get("given_bound")
    return given is not None and given > row["overhead"] + ROUNDING


def _spread(values: Iterable[float]) -> dict[str, float]:
    known = sorted(values)
    return {"median": median(known), "90th percentile": percentile(known, 90), "maximum": known[-1]}


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the least of the sorted `values` that at least `percent` % of them do not exceed."""
    return values[max(0, -(-len(values) * percent // 100) - 1)]


def monotone(rows: Sequence[Row]) -> Check:
    """Check that auto is never slower with more memory."""
    against, pairs = [], 0
    points = _auto(rows)
    for model in dict.fromkeys(model for model, _ in points):
        curve = sorted((percent, row) for (name, percent), row in points.items() if name == model)
        for (less, tight), (more, roomy) in pairwise(curve):
            if not tight.get("fits"):
                continue
            pairs += 1
            if not roomy.get("fits") or roomy["overhead"] > tight["overhead"] + ROUNDING:
                against.append(f"{model}: {more} % is slower than {less} %")
    return Check("more memory is never slower", f"{pairs} pairs of budgets", tuple(against), tested=pairs > 0)


def quick(rows: Sequence[Row]) -> Check:
    """Check the seconds that auto plans."""
    points = _auto(rows)
    taken = {point: row["planning_seconds"] for point, row in points.items() if "planning_seconds" in row}
    against = [f"{_name(point)}: out of time" for point, row in points.items() if "out_of_time" in row]
    against += [f"{_name(point)}: {seconds:.1f} s" for point, seconds in taken.items() if seconds > SECONDS_LIMIT]
    figures = f"at most {max(taken.values(), default=0):.1f} s, median {median(taken.values()) if taken else 0:.1f} s"
    claim = f"auto plans within {SECONDS_LIMIT:.0f} s"
    return Check(claim, figures, tuple(against), tested=bool(points))


Point = tuple[str, int]


def _auto(rows: Sequence[Row]) -> dict[Point, Row]:
    return {(row["model"], row["percent"]): row for row in rows if row.get("planner") == BEST}


def _others(rows: Sequence[Row], point: Point) -> list[Row]:
    return [row for row in rows if (row["model"], row.get("percent")) == point and row.get("planner") != BEST]


def _name(point: Point) -> str:
    return f"{point[0]} at {point[1]} %"
