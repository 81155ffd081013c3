"""Schedules from which a search starts: descents to a limit, or descents in ever smaller strides to the least peak."""

from __future__ import annotations

from lowtide.plan.search.descent import descend, tidy
from lowtide.plan.search.destroy_repair import SearchRandom, lower_peak
from lowtide.plan.search.drop_choice import DropPolicy
from lowtide.plan.search.edited_schedule import EditedSchedule
from lowtide.plan.search.policy import DESCENT, SEED, START
from lowtide.plan.search.problem_arrays import ProblemArrays


def descents(arrays: ProblemArrays, limit: int, *, first: bool = False) -> list[EditedSchedule]:
    """Return the tidied ends of the descents that reach `limit`, or of the `first` one that does."""
    found: list[EditedSchedule] = []
    # Where many layers are alike, many candidates are, too; a close look at one of a kind is enough.
    large = [DropPolicy(alike=1, tries=DESCENT.large_graph_tries)]
    for policy in large if arrays.num_ops > DESCENT.large_graph_ops else [DropPolicy(), DropPolicy(area=False)]:
        edited = EditedSchedule(arrays)
        if descend(edited, limit, policy) <= limit:
            tidy(edited, limit)
            found.append(edited)
            if first:
                break
    return found


def descend_low(arrays: ProblemArrays, limit: int) -> tuple[EditedSchedule, bool]:
    """Return an edited schedule within `limit` and True, or the one with the least peak that is found and False."""
    edited, peak = _least_peak(arrays, limit)
    if peak <= limit:
        tidy(edited, limit)
    return edited, peak <= limit


def _least_peak(arrays: ProblemArrays, enough: int) -> tuple[EditedSchedule, int]:
    """Return an edited schedule with the least peak that descents in ever smaller strides find, and that peak.

    They end early at a peak of at most `enough`, but nothing else depends on the budget: a later call with the least
    peak as its budget finds the same schedule.
    """
    edited = EditedSchedule(arrays)
    best_peak = edited.peak()
    for stride in START.least_peak_strides:
        while best_peak > enough and edited.work < START.least_peak_stride_work:
            edited.commit()
            peak = descend(edited, stride * best_peak, DropPolicy())
            if peak >= best_peak:
                edited.undo()
                break
            best_peak = peak
            tidy(edited, peak)
    if best_peak <= enough:
        return edited, best_peak
    return edited, lower_peak(edited, enough=enough, rng=SearchRandom(SEED), work=START.least_peak_repair_work)
