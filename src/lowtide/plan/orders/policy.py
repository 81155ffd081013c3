"""The tuned numbers of the search in other orders of first runs.

"Set on bench-plan" and "set on bench-scaling": see `lowtide.plan.search.policy`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OrderPolicy:
    """Which orders are searched, and for how long.

    Attributes:
        near: An order whose overhead is at most this multiple of the best one's takes turns with it; others get no more
            work. More finds orders that start badly, less gives the best one more work. Set on bench-plan.
        max_ops: Above this number of ops only the given order is searched. Set on bench-scaling.
        least_peak_max_ops: Up to this number of ops, where no order reaches the budget by a plain descent, each is
            tried for its least peak, which takes seconds. Set on bench-scaling.
        thorough_max_ops: Above this number of ops fewer orders are tried, and each by one descent only. Set on
            bench-scaling.
        settle_work: Work of a search after redundant runs were removed, which changes the order. Set on bench-plan.
        settle_rounds: How often that is done at most before the long searches. Set on bench-plan.
        trial_work: Work of a search in each near order before the best is chosen: the order that leads after descents
            need not get furthest. Set on bench-plan.
        max_trials: How many orders are tried so.
        trial_min_overhead: Overhead below which such a trial is not worth its time. Set on bench-plan.
    """

    near: float = 1.15
    max_ops: int = 4_000
    least_peak_max_ops: int = 500
    thorough_max_ops: int = 1_000
    settle_work: int = 300_000
    settle_rounds: int = 4
    trial_work: int = 600_000
    max_trials: int = 3
    trial_min_overhead: float = 0.1


ORDERS = OrderPolicy()
