"""The tuned numbers of the local search.

Work is counted in steps that take about a microsecond each, so that the answer is the same every time. "Set on
bench-plan" means: chosen by hand for the best mean overhead over the 25 models of `make bench-plan` at equal seconds.
No number was fitted to a single model.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DescentPolicy:
    """When a descent to a limit gives up, and what it looks at.

    Attributes:
        max_work: A descent that takes more work goes round in circles; safety net, far above what descents take.
        max_work_per_op: The same, in addition for every op of the graph.
        patience: Rounds without a lower peak after which it ends: more reach lower limits, fewer save time where the
            limit cannot be reached. Set on bench-plan.
        patience_share: The same, in addition, as a share of the number of ops.
        max_length: The most runs in a schedule, as a multiple of the number of ops; ends runaway recomputation.
        max_length_extra: The same, in addition, for tiny graphs.
        small_input_share: Inputs of at most this share of a dropped value are kept for its recomputation instead of
            being made again: more saves seconds, less saves bytes. Set on bench-plan.
        overshoot_penalty: Weight of the bytes above the limit while ops run again, where only the worst run counts.
        large_graph_ops: Above this number of ops there is one descent instead of two, and it looks at few candidates.
            Set on bench-scaling, to plan 50,000 ops in minutes.
        large_graph_tries: How many candidates are looked at closely in each round of such a descent.
    """

    max_work: int = 1_000_000
    max_work_per_op: int = 500
    patience: int = 60
    patience_share: float = 0.1
    max_length: int = 4
    max_length_extra: int = 100
    small_input_share: float = 0.5
    overshoot_penalty: float = 0.25
    large_graph_ops: int = 4_000
    large_graph_tries: int = 60


@dataclass(frozen=True)
class RepairPolicy:
    """How destroy and repair with annealing explores. All numbers were set on bench-plan.

    Attributes:
        destroyed_shares: The share of the repeated runs that is taken out at once; one is drawn each time. Small ones
            refine, large ones leave a local optimum.
        max_destroyed: About the most runs taken out at once: repairing more takes long and rarely wins.
        temperature: By how much slower than before a repaired schedule may be at first, as a share of plain training;
            it falls to 0 with the work left. More explores, less converges.
        max_slowdown: A repaired schedule that takes more than this multiple of the best one's time is given up.
        high_overhead: Overhead above which the next two numbers hold instead: there is more to rearrange.
        high_temperature: See `temperature`.
        high_max_slowdown: See `max_slowdown`.
        spreads: Largest logarithm of the random factors on scores; one is drawn each time.
        overshoots: How high a recomputation may go, as a multiple of the worst stage; one is drawn each time.
        tries: How many candidates are looked at closely; one is drawn each time.
        patience: Rounds without a gain, per repeated run, after which the search ends.
        patience_extra: The same, in addition.
        peak_step: The next limit as a share of the peak so far where the search looks for less memory.
    """

    destroyed_shares: tuple[float, ...] = (0.03, 0.05, 0.1, 0.2)
    max_destroyed: int = 60
    temperature: float = 0.01
    max_slowdown: float = 1.02
    high_overhead: float = 0.15
    high_temperature: float = 0.02
    high_max_slowdown: float = 1.03
    spreads: tuple[float, ...] = (0.3, 0.7, 1.5)
    overshoots: tuple[float, ...] = (1.0, 1.1, 1.3)
    tries: tuple[int, ...] = (12, 40)
    patience: int = 10
    patience_extra: int = 60
    peak_step: float = 0.98


@dataclass(frozen=True)
class StartPolicy:
    """How a search reaches the schedule from which it goes on. All numbers were set on bench-plan.

    Attributes:
        stride: On the way from plain training to the budget, the next limit as a share of the one before: smaller
            strides find better schedules and take longer.
        preferred_cost: What an op that the proof's solution runs again seems to cost, as a share of its true cost.
        max_slowdown: A schedule being repaired that takes more than this multiple of the best one's time is given up.
        repair_work: Work of such a repair; where it takes more, it is not a matter of a few drops.
        least_peak_strides: On the way to the least peak, the next limits as shares of the peak so far.
        least_peak_stride_work: Work of all these strides.
        least_peak_repair_work: Work of the destroy and repair after them.
    """

    stride: float = 0.8
    preferred_cost: float = 0.07
    max_slowdown: float = 1.1
    repair_work: int = 200_000
    least_peak_strides: tuple[float, ...] = (0.9, 0.97, 0.99)
    least_peak_stride_work: int = 1_000_000
    least_peak_repair_work: int = 1_000_000


DESCENT = DescentPolicy()
REPAIR = RepairPolicy()
START = StartPolicy()
# Of the random numbers of searches that have no seed as an option.
SEED = 20160421
