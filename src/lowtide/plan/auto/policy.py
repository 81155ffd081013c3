"""All tuned numbers of `auto`: those of its stages here, and the policies of search, proof and orders that it uses.

Shares are of the seconds of a plain step unless said otherwise. Work of searches is about in microseconds, work of
proofs about in seconds; both are counted in steps, so that the answer is the same every time. "Set on bench-plan"
means: chosen by hand on the 25 models of `make bench-plan` at seven budgets, for the least overhead and gap in a given
time. "Set on bench-scaling" means: chosen for the seconds of graphs with thousands of ops. `make bench-published` then
checks the result on graphs that were not used to choose.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from lowtide.plan.bounds import policy as bounds
from lowtide.plan.orders.policy import ORDERS, OrderPolicy
from lowtide.plan.search import policy as search


@dataclass(frozen=True)
class SizePolicy:
    """Graph sizes, in ops, at which `auto` does less since every step takes longer.

    Attributes:
        medium: Above it, planners that win only where memory is very scarce are asked only if nothing fits, plain
            descents in all orders replace the planner `greedy`, and rounds may end early. Set on bench-plan.
        large: Above it, such planners are not asked at all and rounds are expensive: there are at most two, with fewer
            kinds of searches and less work for the proof. Set on bench-scaling.
        huge: Above it, planners whose work grows faster than linearly are left out and there is one round. Set on
            bench-scaling.
    """

    medium: int = 300
    large: int = 1_000
    huge: int = 4_000


@dataclass(frozen=True)
class GapPolicy:
    """Gaps between the best schedule and the proved bound.

    Attributes:
        usual_ops: Beyond this number of ops the gap that is close enough grows with it, for so does the time of a
            round. Set on bench-scaling.
        share_of_overhead: The gap that is close enough is never more than this share of the overhead: without it, an
            overhead below the gap would be accepted with nothing proved. Less costs rounds where overheads are small.
            Set on the published ResNet-50 graph and on bench-same.
        equal: Overheads this close count as equal: the proof rounds each op's cost down to a millionth of the step.
        little: A gap that is not worth a third round. Set on bench-plan.
        little_in_large: A gap that is not worth a second round in a large graph. Set on bench-scaling.
        far: A gap with which there is one more round, and one polishing search that gains little is forgiven. Set on
            bench-plan.
        wide: A gap with which there are two more, and with which the proof takes long, so that more searches run
            beside it. Set on bench-plan.
    """

    usual_ops: int = 500
    share_of_overhead: float = 0.1
    equal: float = 1e-5
    little: float = 0.01
    little_in_large: float = 0.03
    far: float = 0.03
    wide: float = 0.04


@dataclass(frozen=True)
class ProofPolicy:
    """Where and how long the proof runs.

    Attributes:
        max_ops: Above this number of ops nothing is proved: the programs take too long. Set on bench-scaling.
        process_min_ops: Up to this number of ops the proof runs in a thread: a process takes as long to start as such a
            graph takes to plan. Set on bench-plan.
        process_min_seconds: With a time limit of at most so many seconds the proof runs in a thread, too.
        large_share: The share of its work that the proof gets in large graphs, whose first relaxations take long. Set
            on bench-scaling.
        infeasible_proof_work: Work of the proof in a round while nothing fits: all that can be proved then is that
            nothing does, which shows early. Set on bench-plan.
        infeasible_search_share: The share of its work that each search gets then: the planners have looked for less
            memory already. Set on bench-plan.
        solver_gap_share: The share of the gap that is close enough at which the integer solver stops.
        enough_share: The share of that gap which the bound must reach; a little less than 1 against rounding.
        quick_search_work: Work of the search beside the first quick bound. Set on bench-plan.
        switch_share: After the quick bound, the proof switches to the order of the best schedule if the bound of the
            given order, which is far behind, is at least this share of the best overhead. Set on bench-plan.
        max_switches: How often the proof may switch to another order.
        rounds_after_switch: How many rounds at least a proof gets after a switch. Set on bench-plan.
    """

    max_ops: int = 6_000
    process_min_ops: int = 150
    process_min_seconds: float = 5.0
    large_share: float = 0.4
    infeasible_proof_work: float = 0.3
    infeasible_search_share: float = 0.3
    solver_gap_share: float = 0.1
    enough_share: float = 0.999
    quick_search_work: int = 500_000
    switch_share: float = 0.95
    max_switches: int = 2
    rounds_after_switch: int = 2


class SearchStart(Enum):
    """Where a search starts."""

    BEST = auto()
    """At the best schedule."""
    PLAIN = auto()
    """At plain training, down to the budget in strides."""
    PROOF = auto()
    """At plain training, down to the budget by running again what the solution behind the proof runs again."""


@dataclass(frozen=True, slots=True)
class Round:
    """Searches one after the other, with the work of each, and the work of the proof beside them.

    The searches must not depend on what the proof finds meanwhile: the answer is to be the same every time.
    """

    searches: tuple[tuple[SearchStart, int], ...]
    proof_work: float


@dataclass(frozen=True)
class RoundPolicy:
    """Rounds of search and proof. All numbers were set on bench-plan.

    Attributes:
        rounds: The rounds in order; they repeat if there are more. A search can be caught in a local optimum, so most
            of them start elsewhere than at the best schedule.
        max_effort: Effort above which there are no more rounds, only longer ones.
        effort_per_scale: Above this effort, each search and proof gets work in proportion.
        momentum: A search from the best schedule that lowers the overhead by this share of it is continued at once.
        max_in_large: How many rounds there are at most in large graphs, where the proof takes long.
        min_closed: The share of the gap that a round must have closed for another to be worth its time.
        min_closed_far: The same for the third and later rounds where the gap is still far.
    """

    rounds: tuple[Round, ...] = (
        Round(((SearchStart.BEST, 500_000),), 1.5),
        Round(((SearchStart.PROOF, 1_000_000), (SearchStart.PLAIN, 900_000), (SearchStart.PROOF, 900_000)), 1.5),
        Round(((SearchStart.PROOF, 900_000), (SearchStart.BEST, 1_200_000)), 1.5),
    )
    max_effort: float = 2.0
    effort_per_scale: float = 4.0
    momentum: float = 0.1
    max_in_large: int = 2
    min_closed: float = 0.05
    min_closed_far: float = 0.15


@dataclass(frozen=True)
class PolishPolicy:
    """Last searches from the best schedule. All numbers were set on bench-plan.

    Attributes:
        work: Work of one of them.
        max_searches: How many there are at most.
        early_in_large: In large graphs, so many of them run beside the proof of the first round instead, which takes
            longest, if the gap is wide.
        min_closed: The share of the gap that one must close for another.
    """

    work: int = 1_200_000
    max_searches: int = 8
    early_in_large: int = 3
    min_closed: float = 0.03


@dataclass(frozen=True)
class AutoPolicy:
    """Everything that is tuned."""

    sizes: SizePolicy = field(default_factory=SizePolicy)
    gaps: GapPolicy = field(default_factory=GapPolicy)
    proof: ProofPolicy = field(default_factory=ProofPolicy)
    rounds: RoundPolicy = field(default_factory=RoundPolicy)
    polish: PolishPolicy = field(default_factory=PolishPolicy)
    orders: OrderPolicy = ORDERS
    descent: search.DescentPolicy = search.DESCENT
    repair: search.RepairPolicy = search.REPAIR
    starts: search.StartPolicy = search.START
    candidates: bounds.CandidatePolicy = bounds.CANDIDATES
    growth: bounds.GrowthPolicy = bounds.GROWTH
    integers: bounds.IntegerPolicy = bounds.INTEGERS
    rows: bounds.RowPolicy = bounds.ROWS
    program: bounds.ProgramPolicy = bounds.PROGRAM


POLICY = AutoPolicy()
