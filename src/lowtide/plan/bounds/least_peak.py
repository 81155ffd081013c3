"""A proved lower bound on the peak of every schedule, whatever its overhead."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from lowtide.plan.bounds.lifetimes import Timeline
from lowtide.plan.core.problem import Problem


def least_peak_bytes(problem: Problem) -> int:
    """Return a number of bytes that the peak of no schedule can be below.

    At its first run, every op needs what it reads and writes and its workspace, beside outputs of forward if it belongs
    to backward, and every value that is due later and that no repeated run can make. When forward ends its outputs and
    all that it hands over are there, and when the step ends all outputs are.
    """
    timeline = Timeline.of(problem)
    change = np.zeros(timeline.num_ops + 1)
    for value, due in enumerate(timeline.due):
        if due and not timeline.again[value]:
            for start, end in pairwise(due):
                change[start // 2 + 1] += timeline.bytes[value]
                change[(end + 1) // 2] -= timeline.bytes[value]
    ends = [
        sum(timeline.bytes[value] for value, due in enumerate(timeline.due) if timeline.is_fixed(value, instant))
        for instant in (timeline.forward_end, timeline.end)
    ]
    return int(np.max(timeline.own + np.cumsum(change)[:-1], initial=max(ends)))
