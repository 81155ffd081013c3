"""One wrapped model's plans: which graphs were seen and how each was planned."""

from __future__ import annotations

import warnings

from lowtide import device as devices
from lowtide.capture.program import Program
from lowtide.costs import resolve_costs
from lowtide.errors import InfeasibleBudgetError, LowtideWarning, PlanFileError
from lowtide.graph.costs import Costs
from lowtide.plan.problem import Problem
from lowtide.plan.result import Plan
from lowtide.pytorch.compiler import counters
from lowtide.run.plans_on_disk import solve_once
from lowtide.run.progress import ProgressLine
from lowtide.run.settings import Settings
from lowtide.units import format_bytes


class Session:
    """Plans graphs as the compiler hands them over, and remembers the plans."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.plans: list[Plan] = []
        self.num_compiled = 0
        self.ran = False
        self._calls_plans: list[Plan] = []
        self._breaks = 0

    def begin_call(self) -> None:
        """Note that a call of the model begins: graphs handed over from now on run one after the other."""
        self._calls_plans = []
        self.ran = False
        self._breaks = num_graph_breaks()

    def end_call(self) -> None:
        """Tell the user if parts of this call are planned by themselves or not at all."""
        graphs, breaks = len(self._calls_plans), num_graph_breaks() - self._breaks
        self._calls_plans = []
        if graphs > 1 or breaks:
            warnings.warn(
                f"The model was captured as {graphs} graphs because Python code between them cannot be traced "
                "(TORCH_LOGS=graph_breaks shows where). Each graph is planned by itself, with what the earlier ones "
                "keep taken off its budget, and code outside of them runs unplanned: the peak of the whole step is not "
                "guaranteed.",
                LowtideWarning,
                stacklevel=4,
            )

    def plan(self, program: Program) -> Plan:
        """Return the plan for `program`: the user's, an earlier one for the same graph, or a new one."""
        self.num_compiled += 1
        plan = self._given(program) or self._known(program) or self._new(program)
        if plan not in self.plans:
            self.plans.append(plan)
        self._calls_plans.append(plan)
        return plan

    def retract(self, plan: Plan) -> None:
        """Forget a plan that turned out not to be used."""
        self.plans.remove(plan)
        self._calls_plans.remove(plan)

    def _given(self, program: Program) -> Plan | None:
        given = self.settings.plan
        if given is None or given.problem.graph.fingerprint == program.graph.fingerprint:
            return given
        if self.settings.budget is not None:
            return None
        graph = given.problem.graph
        raise PlanFileError(
            f"The plan was made for another graph: it has {len(graph.ops)} ops and fingerprint {graph.fingerprint}, "
            f"this call has {len(program.graph.ops)} ops and fingerprint {program.graph.fingerprint}. Model, input "
            "shapes, dtypes, train mode and PyTorch version must be those the plan was made with; plan anew, or pass "
            "budget= as well to plan other graphs."
        )

    def _known(self, program: Program) -> Plan | None:
        held = self._held_bytes()
        return next((p for p in self.plans if not held and p.problem.graph == program.graph), None)

    def _new(self, program: Program) -> Plan:
        with ProgressLine() as progress:
            costs = resolve_costs(program, self.settings.costs, progress)
            problem = Problem(program.graph, costs, self._budget_bytes(program, costs))
            return solve_once(problem, self.settings.planner, progress)

    def _budget_bytes(self, program: Program, costs: Costs) -> int:
        budget = self.settings.budget
        assert budget is not None
        if budget.is_auto:
            return devices.free_bytes(program.device)
        baseline = Problem(program.graph, costs, 1).baseline.peak_bytes
        if budget.fraction is not None:
            return max(budget.resolve(baseline), 1)
        left = budget.resolve(baseline) - self._held_bytes()
        if left <= 0:
            raise InfeasibleBudgetError(
                f"The budget of {budget} is used up by what earlier graphs of this call keep for backward "
                f"({format_bytes(self._held_bytes())}). Use a larger budget or remove the graph breaks.",
                budget_bytes=budget.resolve(baseline),
                least_bytes=self._held_bytes() + baseline,
            )
        return left

    def _held_bytes(self) -> int:
        return sum(plan.saved_bytes for plan in self._calls_plans)


def num_graph_breaks() -> int:
    """Return how often the compiler has given up tracing in this process so far."""
    return sum(counters["graph_break"].values())
