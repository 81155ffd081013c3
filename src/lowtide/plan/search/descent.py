"""Going below a limit by one drop after the other, and taking out again what was not needed for it."""

from __future__ import annotations

from lowtide.plan.search.drop_choice import Taste, best_drop
from lowtide.plan.search.edited_schedule import Timeline
from lowtide.plan.search.ledger import SHIFT, Ints, Run

# A descent that takes more work than this, and this for every op beside, goes round in circles.
_MOST_WORK, _MOST_PER_OP = 1_000_000, 500


def descend(
    timeline: Timeline,
    limit: float,
    taste: Taste,
    *,
    hopeless: float = float("inf"),
    work: float = float("inf"),
) -> int:
    """Bring the peak of `timeline` within `limit`, or to the least on the way there; return the peak.

    Each round drops one value at the worst run. It ends when nothing can be dropped there, when the peak has not fallen
    for many rounds, when the schedule has become very long, when it takes more than `hopeless` seconds, or after so
    much `work`, very much at most.
    """
    patience = 60 + timeline.facts.num_ops // 10
    longest = 4 * timeline.facts.num_ops + 100
    length = timeline.facts.num_ops
    most = timeline.work + min(work, _MOST_WORK + _MOST_PER_OP * length)
    peaks = timeline.peaks()
    best_peak, best_mark, stalled = int(peaks.max()), len(timeline.journal), 0
    while best_peak > limit and stalled <= patience and length <= longest and timeline.seconds <= hopeless:
        if timeline.work > most:
            break
        drop = best_drop(timeline, peaks, limit, taste)
        if drop is None:
            break
        for op in drop.ops:
            timeline.insert(op, drop.before)
        length += len(drop.ops)
        timeline.prune()
        peaks = timeline.peaks()
        stalled += 1
        peak = int(peaks.max())
        if peak < best_peak:
            best_peak, best_mark, stalled = peak, len(timeline.journal), 0
    timeline.undo(best_mark)
    return best_peak


def tidy(timeline: Timeline, limit: float, *, thorough: bool = True) -> None:
    """Take out the repeated runs of `timeline` that can go while its peak stays within `limit`, dearest first.

    What is taken out can make room for taking out more: if `thorough`, it looks again until there is none.
    """
    seconds = timeline.facts.seconds
    again = True
    while again:
        again = False
        peaks = timeline.peaks()
        runs = timeline.repeats()
        for run in sorted(runs, key=lambda run: (-seconds[timeline.op[run]], timeline.time[run])):
            if not timeline.exists(run) or not _plausible(timeline, peaks, run, limit):
                continue
            mark = len(timeline.journal)
            timeline.delete(run)
            timeline.prune()
            after = timeline.peaks()
            if after.max() <= limit:
                peaks, again = after, thorough
            else:
                timeline.undo(mark)


def _plausible(timeline: Timeline, peaks: Ints, run: Run, limit: float) -> bool:
    """Whether taking out `run` may keep within the limit, judged from the gaps it closes.

    The repeated runs of its stage are likely to be there for its sake and to go with it, so they do not count.
    """
    facts, time = timeline.facts, timeline.time[run]
    timeline.work += 5
    op = timeline.op[run]
    ending = sum(facts.bytes[value] for value in facts.reads[op] if timeline.ledger.near(value, time + 1)[1] < 0)
    for value in facts.writes[op]:
        last, _ = timeline.ledger.near(value, time)
        if timeline.ledger.near(value, time + 1)[1] < 0:
            continue
        start, stop = (last >> SHIFT) + 1, time >> SHIFT
        if stop > start and peaks[start:stop].max() + facts.bytes[value] - ending > limit:
            return False
    return True
