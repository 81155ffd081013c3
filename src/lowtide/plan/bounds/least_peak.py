"""A proved lower bound on the peak of every schedule, whatever its overhead."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from lowtide.plan.bounds.lifetimes import Lifetimes
from lowtide.plan.core.problem import Problem


def least_peak_bytes(problem: Problem) -> int:
    """Return a number of bytes that the peak of no schedule can be below.

    At its first run, every op needs what it reads and writes and its workspace, beside outputs of forward if it belongs
    to backward, and every value that is due later and that no repeated run can make. When forward ends its outputs and
    all that it hands over are there, and when the step ends all outputs are.
    """
    lifetimes = Lifetimes.of(problem)
    change = np.zeros(lifetimes.num_ops + 1)
    for value, due in enumerate(lifetimes.due):
        if due and not lifetimes.again[value]:
            for start, end in pairwise(due):
                change[start // 2 + 1] += lifetimes.bytes[value]
                change[(end + 1) // 2] -= lifetimes.bytes[value]
    ends = [
        sum(lifetimes.bytes[value] for value, due in enumerate(lifetimes.due) if lifetimes.is_fixed(value, instant))
        for instant in (lifetimes.forward_end, lifetimes.end)
    ]
    return int(np.max(lifetimes.own + np.cumsum(change)[:-1], initial=max(ends)))
