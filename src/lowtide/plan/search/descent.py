"""Descent: drop one value after the other until the peak is within a limit, then take out runs that were not needed."""

from __future__ import annotations

from lowtide.plan.search.drop_choice import DropPolicy, best_drop
from lowtide.plan.search.edited_schedule import EditedSchedule
from lowtide.plan.search.ledger import SHIFT, Ints, Run
from lowtide.plan.search.policy import DESCENT


def descend(
    edited: EditedSchedule,
    limit: float,
    policy: DropPolicy,
    *,
    max_seconds: float = float("inf"),
    work: float = float("inf"),
) -> int:
    """Bring the peak of `edited` within `limit`, or to the least on the way there; return the peak.

    Each round drops one value at the worst run. The descent ends when nothing can be dropped there, when the peak has
    not fallen for many rounds, when the schedule has become very long or takes more than `max_seconds`, or when the
    `work` is spent.
    """
    length = edited.arrays.num_ops
    patience = DESCENT.patience + DESCENT.patience_share * length
    longest = DESCENT.max_length * length + DESCENT.max_length_extra
    most = edited.work + min(work, DESCENT.max_work + DESCENT.max_work_per_op * length)
    peaks = edited.peaks()
    best_peak, best_mark, stalled = int(peaks.max()), len(edited.journal), 0
    while best_peak > limit and stalled <= patience and length <= longest and edited.seconds <= max_seconds:
        if edited.work > most:
            break
        drop = best_drop(edited, peaks, limit, policy)
        if drop is None:
            break
        for op in drop.ops:
            edited.insert(op, drop.before)
        length += len(drop.ops)
        edited.prune()
        peaks = edited.peaks()
        stalled += 1
        peak = int(peaks.max())
        if peak < best_peak:
            best_peak, best_mark, stalled = peak, len(edited.journal), 0
    edited.undo(best_mark)
    return best_peak


def tidy(edited: EditedSchedule, limit: float, *, thorough: bool = True) -> None:
    """Take out the repeated runs of `edited` that can go while its peak stays within `limit`, most expensive first.

    Taking out one can make room for taking out another: if `thorough`, it looks again until there is none.
    """
    seconds = edited.arrays.seconds
    again = True
    while again:
        again = False
        peaks = edited.peaks()
        runs = edited.repeats()
        for run in sorted(runs, key=lambda run: (-seconds[edited.op[run]], edited.time[run])):
            if not edited.exists(run) or not _plausible(edited, peaks, run, limit):
                continue
            mark = len(edited.journal)
            edited.delete(run)
            edited.prune()
            after = edited.peaks()
            if after.max() <= limit:
                peaks, again = after, thorough
            else:
                edited.undo(mark)


def _plausible(edited: EditedSchedule, peaks: Ints, run: Run, limit: float) -> bool:
    """Whether taking out `run` may keep within the limit, judged from the gaps it closes.

    The repeated runs of its stage are likely to be there for its sake and to go with it, so they do not count.
    """
    arrays, time = edited.arrays, edited.time[run]
    edited.work += 5
    op = edited.op[run]
    ending = sum(arrays.bytes[value] for value in arrays.reads[op] if edited.ledger.near(value, time + 1)[1] < 0)
    for value in arrays.writes[op]:
        last, _ = edited.ledger.near(value, time)
        if edited.ledger.near(value, time + 1)[1] < 0:
            continue
        start, stop = (last >> SHIFT) + 1, time >> SHIFT
        if stop > start and peaks[start:stop].max() + arrays.bytes[value] - ending > limit:
            return False
    return True
