"""Schedules to begin a search with: descents to a limit, or as low as descents in ever smaller strides get."""

from __future__ import annotations

from lowtide.plan.search.descent import descend, tidy
from lowtide.plan.search.destroy_repair import Dice, lower
from lowtide.plan.search.drop_choice import Taste
from lowtide.plan.search.edited_schedule import Timeline
from lowtide.plan.search.problem_arrays import Facts

SEED = 20160421
_STRIDES = (0.9, 0.97, 0.99)
_STRIDES_WORK, _FLOOR_WORK = 1_000_000, 1_000_000
# Above this number of ops, time is saved: only so many candidates are looked at closely in each round.
_LARGE = 4_000
_FEW = 60


def descents(facts: Facts, limit: int, *, first: bool = False) -> list[Timeline]:
    """Return the tidied ends of the descents that reach `limit`, or of the `first` one that does."""
    found: list[Timeline] = []
    # Where many layers are alike, many candidates are, too; a close look at one of a kind is enough.
    tastes = [Taste(alike=1, tries=_FEW)] if facts.num_ops > _LARGE else [Taste(), Taste(area=False)]
    for taste in tastes:
        timeline = Timeline(facts)
        if descend(timeline, limit, taste) <= limit:
            tidy(timeline, limit)
            found.append(timeline)
            if first:
                break
    return found


def go_low(facts: Facts, limit: int) -> tuple[Timeline, bool]:
    """Return a tidied timeline within `limit` and True, or the one with the least peak that is found and False."""
    timeline, peak = lowest(facts, limit)
    if peak <= limit:
        tidy(timeline, limit)
    return timeline, peak <= limit


def lowest(facts: Facts, enough: int) -> tuple[Timeline, int]:
    """Return a timeline with the least peak that descents in ever smaller strides find, and that peak.

    They end early at a peak of at most `enough`, but nothing else depends on the budget: a later call with the least
    peak as its budget takes the same road to the same schedule.
    """
    timeline = Timeline(facts)
    best_peak = timeline.peak()
    for stride in _STRIDES:
        while best_peak > enough and timeline.work < _STRIDES_WORK:
            timeline.commit()
            peak = descend(timeline, stride * best_peak, Taste())
            if peak >= best_peak:
                timeline.undo()
                break
            best_peak = peak
            tidy(timeline, peak)
    if best_peak <= enough:
        return timeline, best_peak
    return timeline, lower(timeline, enough=enough, dice=Dice(SEED), work=_FLOOR_WORK)
