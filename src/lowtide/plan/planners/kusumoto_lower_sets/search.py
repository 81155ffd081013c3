"""The search around the program: which budget of the paper's model gives the best schedule in truth.

The paper's model counts a gradient of the same size for every value and frees nothing inside a block; the true peak
follows from the schedule's lifetimes. So the program is solved for many model budgets, its strategies become schedules,
and the simulator prices them. The last block is never recomputed: forward ends with it and backward begins with it.
"""

from __future__ import annotations

from lowtide.errors import InvalidOptionError
from lowtide.graph.ir import ValueId
from lowtide.plan.core.best_schedule import best_priced
from lowtide.plan.core.problem import Problem
from lowtide.plan.planners.kusumoto_lower_sets.budget import minimum_budget
from lowtide.plan.planners.kusumoto_lower_sets.family import Family
from lowtide.plan.planners.kusumoto_lower_sets.program import solve
from lowtide.plan.planners.kusumoto_lower_sets.reduce import Reduced
from lowtide.plan.planners.kusumoto_lower_sets.strategy import Strategy
from lowtide.plan.planners.kusumoto_lower_sets.transitions import transitions_of
from lowtide.progress import Progress
from lowtide.schedule.expand import expand
from lowtide.schedule.simulate import Trace
from lowtide.schedule.steps import Schedule

STRATEGIES = ("time", "memory", "both")

# What all tables of one search may read together, in entries, and the fewest tables it is cut down to.
_WORK = 2_000_000_000
_FEWEST = 6

# Strategies of each table, besides the two kinds the paper names, that save more time than one and less than the other.
_BETWEEN = 6


def check_options(strategy: str, **counts: int) -> None:
    """Raise `InvalidOptionError` unless `strategy` exists and all `counts` are whole numbers above zero."""
    if strategy not in STRATEGIES:
        raise InvalidOptionError(f"The strategy is {strategy!r}; it must be one of {', '.join(STRATEGIES)}.")
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise InvalidOptionError(f"The option {name} is {count!r}; it must be a whole number of at least 1.")


class Search:
    """Schedules for budgets of the paper's model, priced; each distinct one once."""

    def __init__(self, problem: Problem, reduced: Reduced, family: Family, strategy: str) -> None:
        self._problem, self._reduced, self._strategy = problem, reduced, strategy
        self._transitions = transitions_of(family)
        self._priced: dict[frozenset[ValueId], tuple[Schedule, Trace]] = {}
        self._tried: dict[int, dict[str | int, Trace]] = {}

    def best(self, budgets: int, progress: Progress) -> Schedule:
        """Return the fastest schedule that fits, or the one with the least peak, of about `budgets` model budgets.

        Two thirds of them are spread evenly, the others halve the gap beside the best one so far. Nothing depends on
        the problem's budget until something fits; so the least peak that is found does fit as a budget.
        """
        dag, work = self._reduced.dag, len(self._transitions) * sum(self._reduced.dag.ticks)
        count = min(budgets, max(_FEWEST, _WORK // max(1, work)))
        progress(f"kusumoto: {count} budgets, {len(self._transitions):,} steps between lower sets")
        self._add(Strategy(dag, (dag.everything,) if len(dag) else ()))
        spread = max(2, 2 * count // 3)
        for budget in _between(minimum_budget(self._transitions), 2 * sum(dag.bytes), spread):
            self._try(budget)
        for _ in range(count - spread):
            self._refine()
        return best_priced(self._problem, self._priced.values())

    def _try(self, budget_bytes: int) -> None:
        """Price the strategies for one budget of the model."""
        if budget_bytes not in self._tried:
            table = solve(self._transitions, budget_bytes)
            found: dict[str | int, Strategy | None] = {
                objective: table.best(objective, keep_last=objective == "time") for objective in self._objectives
            }
            if self._strategy == "both":
                found |= dict(enumerate(table.between(_BETWEEN, keep_last=True)))
            self._tried[budget_bytes] = {name: self._add(strategy) for name, strategy in found.items() if strategy}

    @property
    def _objectives(self) -> tuple[str, ...]:
        return {"time": ("time",), "memory": ("memory", "cache"), "both": ("time", "memory", "cache")}[self._strategy]

    def _add(self, strategy: Strategy) -> Trace:
        """Return the trace of the schedule that keeps the strategy's cache and last block."""
        kept = self._reduced.kept(strategy.cache | strategy.last_block)
        if kept not in self._priced:
            schedule = expand(self._problem.graph, kept)
            self._priced[kept] = schedule, self._problem.price(schedule)
        return self._priced[kept][1]

    def _refine(self) -> None:
        """Try the middle of the gap above the fastest budget that fits, or of the larger gap beside the least peak.

        Where both are wanted, only time-centric strategies decide what fits: theirs get faster from budget to budget.
        """
        tried = sorted(self._tried)
        fitting = [
            (trace.seconds, -place)
            for place, budget in enumerate(tried)
            for trace in [self._tried[budget][self._objectives[0]]]
            if self._problem.fits(trace)
        ]
        if fitting:
            place = -min(fitting)[1]
            gaps = [(place, place + 1)]
        else:
            place = min(range(len(tried)), key=lambda k: min(map(_peak, self._tried[tried[k]].values())))
            gaps = [(place, place + 1), (place - 1, place)]
        inside = [(tried[low], tried[high]) for low, high in gaps if low >= 0 and high < len(tried)]
        if inside:
            low, high = max(inside, key=lambda gap: gap[1] / max(1, gap[0]))
            self._try((low + high) // 2)


def _peak(trace: Trace) -> int:
    return trace.peak_bytes


def _between(low: int, high: int, count: int) -> list[int]:
    """Return `count` budgets from `low` to `high` in equal ratios."""
    if low >= high or not low:
        return [high]
    ratio = (high / low) ** (1 / max(1, count - 1))
    return [low, *(int(low * ratio**k) for k in range(1, count - 1)), high]
