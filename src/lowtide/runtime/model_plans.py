"""One wrapped model's plans: which graphs were seen and how each was planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from lowtide import device as devices
from lowtide.capture.program import Program
from lowtide.costs.resolve import resolve_costs
from lowtide.errors import InfeasibleBudgetError, LowtideError, warn
from lowtide.plan.core.planner import AbstractPlanner
from lowtide.plan.core.problem import Problem
from lowtide.plan.core.result import Plan
from lowtide.plan.diagnose.infeasible import AskedBudget, infeasible
from lowtide.plan.plan_cache import solve_once
from lowtide.plan.solve import solve
from lowtide.progress import Progress, ProgressLine
from lowtide.pytorch.compiler.tracing import num_graph_breaks
from lowtide.runtime.given_plan import is_made_for, made_for_another_graph
from lowtide.runtime.peak_watch import Corrections
from lowtide.settings import Settings
from lowtide.units import Budget

# Each retry is one more search, and gains less than the one before.
_MOST_RETRIES = 3


class Session:
    """Plans graphs as the compiler hands them over, and remembers the plans.

    Args:
        settings: What the user asked for.
        verifies: Compare what recomputation reads with what forward read.
        over_budget: Return the plan of least peak known where none fits the budget, instead of raising.
    """

    def __init__(self, settings: Settings, *, verifies: bool = False, over_budget: bool = False) -> None:
        self.settings = settings
        self.verifies = verifies
        self.plans: list[Plan] = []
        self.num_compiled = 0
        # A model has one entry for each way of calling it; each compares this number with its own.
        self.generation = 0
        self.ran = False
        self.failure: LowtideError | None = None
        self.corrections = Corrections()
        self._over_budget = over_budget
        self._calls_plans: list[Plan] = []
        self._whole_bytes = 0
        self._rejected = False
        self._breaks = 0

    def begin_call(self) -> None:
        """Note that a call of the model begins: graphs handed over from now on run one after the other."""
        self._calls_plans = []
        self.ran = False
        self.failure = None
        self._breaks = num_graph_breaks()

    def end_call(self) -> None:
        """Note what percentages are of from now on; warn if the call was captured in parts, or not all of it was."""
        self._whole_bytes = self._whole_bytes or unplanned_step_bytes(self._calls_plans)
        graphs, breaks = len(self._calls_plans), num_graph_breaks() - self._breaks
        self._calls_plans = []
        if graphs > 1 or breaks:
            parts = "one graph" if graphs == 1 else f"{graphs} graphs"
            place = "around it" if graphs == 1 else "between them"
            warn(
                f"The model was captured as {parts}, because Python code {place} cannot be traced "
                "(TORCH_LOGS=graph_breaks shows where). Each graph is planned by itself, with what the earlier ones "
                "keep taken off its budget, and code outside of them runs unplanned: the peak of the whole step is not "
                "guaranteed."
            )

    def drop_overdrawn(self) -> None:
        """Forget plans whose first step needed more than the budget; what was compiled with them is then stale."""
        overdrawn = self.corrections.overdrawn
        self.plans = [plan for plan in self.plans if plan not in overdrawn]
        self.corrections.overdrawn = []
        if self.settings.plan in overdrawn and not self._rejected:
            self._rejected = True
            warn(
                "The plan that was given needs more memory here than its budget of "
                f"{self.settings.plan.budget_bytes} bytes, so the model is planned again. Plans are exact for the "
                "machine and the number of threads that they were made with."
            )
        if overdrawn:
            # The unplanned step that percentages are of needs more, too.
            self._whole_bytes = 0
            self.generation += 1

    def find_plan(self, program: Program) -> Plan:
        """Return the plan for `program`: the user's, an earlier one for the same graph, or a new one."""
        return self._given(program) or self._known(program) or self._new(program)

    def record(self, plan: Plan) -> None:
        """Note that a graph of the present call runs as `plan` says."""
        self.num_compiled += 1
        if plan not in self.plans:
            self.plans.append(plan)
        self._calls_plans.append(plan)

    def is_given_for(self, program: Program) -> bool:
        """Return True if the user gave a plan for this very graph, and it was not rejected."""
        given = self.settings.plan
        return given is not None and not self._rejected and is_made_for(given, program)

    def _given(self, program: Program) -> Plan | None:
        """Return the user's plan if it is for this graph; raise if it is not and there is no budget for others."""
        given = self.settings.plan
        if given is None or self._rejected:
            return None
        if not is_made_for(given, program):
            if self.settings.budget is None:
                raise made_for_another_graph(given, program)
            return None
        return given

    def _known(self, program: Program) -> Plan | None:
        held = self._held_bytes()
        return next((p for p in self.plans if not held and p.problem.graph == program.graph), None)

    def _new(self, program: Program) -> Plan:
        with ProgressLine() as progress:
            costs = self.corrections.apply(program, resolve_costs(program, self.settings.costs, progress))
            asked = self._asked(Problem(program.graph, costs, 1).baseline.peak_bytes, program.device)
            # Where earlier graphs hold all of it, the planner still says what would be enough.
            problem = Problem(program.graph, costs, max(asked.left_bytes, 1))
            if self._over_budget:
                return plan_or_least(problem, self.settings.planner, progress)
            try:
                return solve_once(problem, self.settings.planner, progress)
            except InfeasibleBudgetError as error:
                if error.plan is None:
                    raise
                raise infeasible(error.plan, asked) from None

    def _asked(self, unplanned_bytes: int, device: torch.device) -> AskedBudget:
        """Return the user's budget in bytes for a graph with this unplanned peak."""
        budget, held = self.settings.budget, self._held_bytes()
        if budget is None:
            assert self.settings.plan is not None
            budget = Budget(bytes=self.settings.plan.budget_bytes)
        if budget.is_auto:
            return AskedBudget.of(budget, devices.free_bytes(device))
        if budget.fraction is None:
            return AskedBudget.of(budget, budget.resolve(0), held_bytes=held)
        if not self._whole_bytes:
            return AskedBudget.of(budget, max(budget.resolve(unplanned_bytes), 1))
        bytes_asked = max(budget.resolve(self._whole_bytes), 1)
        return AskedBudget.of(budget, bytes_asked, held_bytes=held, whole_bytes=self._whole_bytes)

    def _held_bytes(self) -> int:
        return sum(plan.saved_bytes for plan in self._calls_plans)


def plan_or_least(problem: Problem, planner: AbstractPlanner, progress: Progress) -> Plan:
    """Return a plan within the budget, or else the one of least peak that `planner` finds.

    A search that misses a budget may still meet it when it aims at what it reached, so it is asked again while that
    lowers the peak.
    """
    best = _plan_or_nearest(problem, planner, progress)
    for _ in range(_MOST_RETRIES):
        if best.peak_bytes <= problem.budget_bytes:
            break
        again = _plan_or_nearest(replace(problem, budget_bytes=best.peak_bytes), planner, progress)
        if again.peak_bytes >= best.peak_bytes:
            break
        best = again
    if best.peak_bytes <= problem.budget_bytes < best.budget_bytes:
        # The same schedule, as an answer to the budget that was asked for.
        best = solve(problem, best.schedule)
    return best


def _plan_or_nearest(problem: Problem, planner: AbstractPlanner, progress: Progress) -> Plan:
    """Return the plan that `planner` makes, within the budget or not."""
    try:
        return solve_once(problem, planner, progress)
    except InfeasibleBudgetError as error:
        if not isinstance(error.plan, Plan):
            raise
        return error.plan


def unplanned_step_bytes(plans: Sequence[Plan]) -> int:
    """Return the peak of a step without plans that runs these graphs one after the other, and back."""
    baselines = [plan.problem.baseline for plan in plans]
    held = accumulate((each.saved_bytes for each in baselines), initial=0)
    return max((before + each.peak_bytes for before, each in zip(held, baselines, strict=False)), default=0)
