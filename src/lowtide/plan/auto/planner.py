"""`auto`: the best of several planners, improved by a search and bounded by a proof, until both are close enough.

Source: ours. Memory model: the simulator's; every op may run any number of times. Optimal where the proof meets the
schedule, which the plan then says; never worse than a planner that it asks.

1. Ask planners. Every planner of the list that serves the problem proposes a schedule.
2. Explore orders. Where a descent does well with the first runs in another order, the search goes on in that order, or
   in both.
3. Rounds. A local search improves the best schedule by destroy and repair, while the proof looks at more moments of
   the step on another core. Some searches restart, for a search can be caught in a local optimum: at plain training
   and down to the budget in strides, or by running again what the solution behind the proof runs again. The proof is
   about the given order; once the schedule is faster than that allows, about the order of the search. Rounds end when
   the overhead is close enough to the proved bound, when a round has gained little, after as many as `effort` allows,
   or when the time is up.
4. Polish. Short searches improve the schedule while they gain much.

`Auto.choose` says what of this is done for a problem. All tuned numbers are in `policy`. Without a time limit the
answer is the same every time: all work is counted in steps. Cost: that of the planners, then some seconds per unit of
effort, little of it where the proof is met early.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lowtide.errors import InvalidOptionError
from lowtide.plan.auto.choice_description import Choice
from lowtide.plan.auto.policy import POLICY
from lowtide.plan.auto.stages import Stages, Task
from lowtide.plan.bounds.least_peak import least_peak_bytes
from lowtide.plan.bounds.prover import Prover
from lowtide.plan.core.options import check_numbers
from lowtide.plan.core.planner import AbstractPlanner, Proposal
from lowtide.plan.core.problem import Problem
from lowtide.progress import Progress, silent
from lowtide.schedule.steps import Schedule

# The planner that begins with plain descents, and looks for the least memory where these do not reach the budget.
_DESCENT = "greedy"


@dataclass(frozen=True, kw_only=True)
class Auto(AbstractPlanner):
    """Take the cheapest schedule that fits, else the one with the least peak; say how much better there could be.

    Attributes:
        planners: The planners to run first, by name; earlier ones win ties.
        slow: Those of them that are left out for large graphs.
        late: Those of them that are asked only if nothing else fits, except for small graphs; for graphs of more than
            1,000 ops they are left out.
        effort: How much work to do, 1 by default; 10 is thorough.
        gap: The search ends when the overhead, as a share of the step, is within this of the proved bound, or within a
            tenth of the overhead if that is less; beyond 500 ops, up to an effort of 1, the gap is taken to be larger
            in proportion to their number.
        time_limit: Seconds after which it ends as soon as it can, or None. The planners of the list are not cut short.
        seed: Of the random numbers.
        starts: Schedules known already: the answer is no worse than any of them that fits.
    """

    planners: Mapping[str, AbstractPlanner]
    slow: frozenset[str] = frozenset()
    late: frozenset[str] = frozenset()
    effort: float = 1.0
    gap: float = 0.002
    time_limit: float | None = None
    seed: int = 0
    starts: tuple[Schedule, ...] = ()

    def __post_init__(self) -> None:
        """Check the options."""
        check_numbers(self)
        if not all(isinstance(planner, AbstractPlanner) for planner in self.planners.values()):
            raise InvalidOptionError(f"The planners are {self.planners!r:.80}; they must be planners by name.")
        for name in ("effort", "gap", "seed"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise InvalidOptionError(f"The {name} is {value}; it must be a number of at least 0.")
        if self.time_limit is not None and not (isinstance(self.time_limit, int | float) and self.time_limit > 0):
            raise InvalidOptionError(f"The time limit is {self.time_limit!r}; it must be a number of seconds above 0.")
        if not isinstance(self.starts, tuple) or not all(isinstance(start, Schedule) for start in self.starts):
            raise InvalidOptionError(f"The starts are {self.starts!r:.80}; they must be a tuple of schedules.")

    def supports(self, problem: Problem) -> str | None:
        """Return the planners' reasons if none of them serves `problem`."""
        reasons = {name: planner.supports(problem) for name, planner in self.planners.items()}
        if any(reason is None for reason in reasons.values()):
            return None
        return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())

    def with_effort(self, effort: float) -> Auto:
        """Return the same planner with that effort."""
        return replace(self, effort=effort)

    def with_starts(self, schedules: Sequence[Schedule]) -> Auto:
        """Return the same planner with `schedules` known already."""
        return replace(self, starts=tuple(schedules))

    def choose(self, problem: Problem) -> Choice:
        """Return what this planner does for `problem`, and why; `propose` does just that.

        Example:
            ```python
            print(registry.get("auto").choose(problem))
            ```
        """
        num_ops = len(problem.graph.ops)
        fits = problem.fits(problem.baseline)
        descends_itself = self.effort > 0 and _DESCENT in self.planners and num_ops > POLICY.sizes.medium
        left_out = {} if fits else self._left_out(problem, descends_itself=descends_itself)
        wanted = [name for name in self.planners if not fits and name not in left_out]
        delayed = self.late if num_ops > POLICY.sizes.medium else frozenset[str]()
        growth = 1.0 if self.effort > 1 else max(1.0, num_ops / POLICY.gaps.usual_ops)
        return Choice(
            num_ops=num_ops,
            budget_bytes=problem.budget_bytes,
            baseline_bytes=problem.baseline.peak_bytes,
            least_peak_bytes=least_peak_bytes(problem),
            effort=self.effort,
            gap=self.gap * growth,
            time_limit=self.time_limit,
            asked=tuple(name for name in wanted if name not in delayed),
            asked_if_nothing_fits=tuple(name for name in wanted if name in delayed),
            left_out=tuple(left_out.items()),
            descends_itself=descends_itself,
        )

    def _left_out(self, problem: Problem, *, descends_itself: bool) -> dict[str, str]:
        """Return the planners that are not asked, with the reasons."""
        num_ops, sizes = len(problem.graph.ops), POLICY.sizes
        found: dict[str, str] = {}
        for name, planner in self.planners.items():
            if name == _DESCENT and descends_itself:
                found[name] = "its descents are tried in all orders instead"
            elif name in self.slow and num_ops > sizes.huge:
                found[name] = f"too slow above {sizes.huge:,} ops"
            elif name in self.late and num_ops > sizes.large:
                found[name] = f"too slow above {sizes.large:,} ops for what it finds"
            elif (reason := planner.supports(problem)) is not None:
                found[name] = reason
        return found

    def propose(self, problem: Problem, progress: Progress = silent) -> Proposal:
        """Return the best schedule found and the bound proved."""
        started = time.perf_counter()
        if problem.fits(problem.baseline):
            return Proposal(Schedule.keep_all(problem.graph), bound=0.0, optimal=True)
        choice = self.choose(problem)
        with Prover(own_process=choice.own_process) as prover:
            task = Task(problem, choice, self.planners, self.starts, self.seed, progress, started)
            return Stages(task, prover).run()
