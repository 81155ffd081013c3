"""The tuned numbers of the proof.

Shares are of the seconds of a plain step unless said otherwise. "Set on bench-plan" means: chosen by hand for the
least mean gap over the 25 models of `make bench-plan` at equal seconds; "set on bench-scaling" for the time of graphs
with thousands of ops.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CandidatePolicy:
    """Which first runs are tried as moments of the proof. All numbers were set on bench-plan.

    Attributes:
        per_measure: How many candidates each of the two measures of scarce memory gives.
        few_ops: Beyond this number of ops there are fewer candidates in proportion, since each relaxation takes longer.
        min_distance: Their least distance in ops: neighbours say the same.
        min_distance_share: The same as a share of all ops.
        new_distance_share: Least distance of a further moment from those of the proof and from other further ones.
        needy_share: First runs that need this share of the neediest one's bytes may be closer to each other.
        needy_distance: How close, in ops.
        scarce_share: The share of the budget from which on a schedule has next to nothing to spare.
        from_overflow: How many candidates are taken from where the last solution exceeds the budget.
        tried: How many candidates are tried at most for each further moment; more say more and take longer.
    """

    per_measure: int = 8
    few_ops: int = 500
    min_distance: int = 4
    min_distance_share: float = 1 / 100
    new_distance_share: float = 1 / 30
    needy_share: float = 0.8
    needy_distance: int = 2
    scarce_share: float = 0.97
    from_overflow: int = 2
    tried: int = 5


@dataclass(frozen=True)
class GrowthPolicy:
    """How many moments a program gets.

    Attributes:
        quick_moments: How many moments the first quick bound has.
        max_added: How many moments one stage adds at most.
        min_first_gain: A stage adds no moment with which the relaxation rises by less. Set on bench-plan.
        min_gain: By how much the relaxation must rise with each further moment of a stage if integers add something to
            relaxations; more keeps programs small. Set on bench-plan.
        min_gain_relaxed: The same if integers add nothing, when larger programs cost less.
        relaxing_share: How many times the work of the integer program all relaxations of a stage may take. Set on
            bench-plan.
        seconds_per_row: About the seconds that a relaxation takes, per row to the power of `row_exponent`; measured.
        row_exponent: See `seconds_per_row`.
        max_rows: A program with more rows says too little for its time. Set on bench-scaling.
        unseen_moments: How many moments are added although the relaxation gains nothing, where integers add much.
    """

    quick_moments: int = 4
    max_added: int = 3
    min_first_gain: float = 2e-4
    min_gain: float = 0.003
    min_gain_relaxed: float = 0.001
    relaxing_share: float = 1.5
    seconds_per_row: float = 2.5e-7
    row_exponent: float = 1.5
    max_rows: int = 60_000
    unseen_moments: int = 2


@dataclass(frozen=True)
class IntegerPolicy:
    """When a program is solved in integers, and with how much work. All numbers were set on bench-plan.

    Attributes:
        typical_gain: How much integers usually add to a relaxation: one this far below the bound is still solved, and
            where they have added less they are left out if the program is expensive.
        much_gain: Where integers have added this much, large programs get the full work, too, and moments are added
            that the relaxation does not ask for.
        many_rows: Programs with several moments and more rows than this get less work, which does little for them.
        many_ops: Above this number of ops, such programs are not solved in integers where that has added little.
        max_gap: Nor are programs whose relaxation is farther than this from the schedule.
        repeat_min_gap: If the schedule is farther than this from the bound, a program that no moment can be added to is
            solved again, once, or gets moments that the relaxation does not ask for.
        repeat_work: How many times the usual work a program gets that is solved again.
    """

    typical_gain: float = 0.005
    much_gain: float = 0.01
    many_rows: int = 5_000
    many_ops: int = 1_000
    max_gap: float = 0.04
    repeat_min_gap: float = 0.02
    repeat_work: float = 1.7


@dataclass(frozen=True)
class RowPolicy:
    """Row generation: which memory rows are added to a program. All numbers were set on bench-plan.

    Attributes:
        max_rounds: The most rounds of solving and adding rows.
        first_runs_per_round: Rows of first runs added in one round: more makes fewer, longer rounds.
        repeated_runs_per_round: Rows of repeated runs added in one round.
        min_distance: Least distance of such first runs in ops: neighbouring rows say nearly the same.
        tolerance: A row of a first run is violated above the budget and this share of it.
        repeated_tolerance: The same for repeated runs, whose rows are longer and say less.
        min_share: A repeated run that happens to a smaller share in the relaxed solution is not looked at.
    """

    max_rounds: int = 25
    first_runs_per_round: int = 12
    repeated_runs_per_round: int = 12
    min_distance: int = 4
    tolerance: float = 2e-6
    repeated_tolerance: float = 1e-3
    min_share: float = 0.05


@dataclass(frozen=True)
class ProgramPolicy:
    """What the program leaves out, and the work of a bound that is asked for by itself.

    Attributes:
        negligible_share: Values so small that all of them together are below this share of the budget count nothing,
            which only lowers a bound; it keeps programs small.
        bound_gap: Gap at which `overhead_bound` ends.
        bound_work: Work of one of its programs per unit of effort, about in seconds.
        bound_stages: Number of its stages per unit of effort.
    """

    negligible_share: float = 1e-4
    bound_gap: float = 2e-4
    bound_work: float = 5.0
    bound_stages: int = 2


CANDIDATES = CandidatePolicy()
GROWTH = GrowthPolicy()
INTEGERS = IntegerPolicy()
ROWS = RowPolicy()
PROGRAM = ProgramPolicy()
