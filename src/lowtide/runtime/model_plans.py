"""One wrapped model's plans: which graphs were seen and how each was planned."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate

import torch

from lowtide import device as devices
from lowtide.blocks.step.find_layers import Cuts, Layers
from lowtide.blocks.step.session import StepSession
from lowtide.capture.program import Program
from lowtide.costs.resolve import is_measured, resolve_costs
from lowtide.distributed.collective_order import compare_collectives
from lowtide.distributed.replicas import Buckets
from lowtide.distributed.shared_plans import shared_costs, shared_menu, shared_plan
from lowtide.distributed.signs import ShownSign, Sign
from lowtide.errors import InfeasibleBudgetError, LowtideError, warn
from lowtide.graph.costs import Costs
from lowtide.graph.ir import Graph
from lowtide.plan import registry
from lowtide.plan.core.planner import AbstractPlanner
from lowtide.plan.core.problem import Problem
from lowtide.plan.core.result import Plan
from lowtide.plan.diagnose.infeasible import AskedBudget, infeasible
from lowtide.plan.menu import Entry, make_menu, menu_planner
from lowtide.plan.plan_cache import solve_or_nearest
from lowtide.plan.solve import solve
from lowtide.progress import Progress, ProgressLine, say, silent
from lowtide.pytorch.compiler.known_breaks import KnownBreaks
from lowtide.pytorch.compiler.tracing import num_graph_breaks
from lowtide.pytorch.process_groups import num_ranks
from lowtide.runtime.given_plan import given_menu, is_made_for, made_for_another_graph, made_for_other_blocks
from lowtide.runtime.improvements import Improvements
from lowtide.runtime.late_layouts import LateLayouts
from lowtide.runtime.model_state import ops_unchanged
from lowtide.runtime.peak_watch import Corrections
from lowtide.settings import Settings
from lowtide.step.plan import StepPlan
from lowtide.units import Budget, format_bytes, format_seconds

# Each retry is one more search, and gains less than the one before.
_MOST_RETRIES = 3


class LayersUndecidedError(LowtideError):
    """A call is to be made again, in which layers are blocks; users never see it."""


class LayersAreWholeError(LayersUndecidedError):
    """A call is to be made again, in which layers are no blocks; users never see it."""


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
        # Whether a call of the model is under way that runs as planned.
        self.is_running = False
        # Whether layers may still turn out to be blocks, if the model is captured in several graphs.
        self.is_undecided = False
        # Whether the call that is under way can be begun again.
        self.can_restart = False
        # Whether a call is under way that shows which layers are.
        self.is_deciding = False
        # Whether graphs of the model have collectives that other ranks take part in.
        self.communicates = False
        # What the neighbours of this rank can see of how it trains.
        self._sign: ShownSign | None = None
        # Whether a call has returned: its blocks must stay what they are.
        self.has_trained = False
        # The engine around the model, if a call of it is under way.
        self.replica: Buckets | None = None
        self.failure: LowtideError | None = None
        # Calls inside of which the compiler cuts graphs.
        self.known_breaks: KnownBreaks = {}
        self.corrections = Corrections()
        self.late = LateLayouts()
        # Plans for a size of memory, and those that ranks share, are asked for as they are.
        self.improvements = Improvements(None if over_budget else settings.patience, self._replace)
        self.may_exceed = over_budget
        self._calls_plans: list[Plan] = []
        self._whole_bytes = 0
        self._rejected = False
        self._began = time.monotonic()
        # They are counted for the whole process.
        self._breaks = num_graph_breaks()
        # Equal layers may be captured several times, each with guards of its own.
        self._menus: list[tuple[Entry, ...]] = []
        # How the model is cut into blocks; None for a function.
        self.cuts: Cuts | None = None
        self.step = StepSession(settings.budget or Budget(bytes=settings.plan.budget_bytes if settings.plan else 1))

    @property
    def by_layers(self) -> bool:
        """Whether layers of the model are blocks, so that there is more than one graph in every call."""
        return self.cuts is not None and bool(self.cuts.now.modules) and not isinstance(self.settings.plan, Plan)

    def step_plan(self) -> StepPlan | None:
        """Return the plan of the last step of several blocks, or None if there was none."""
        plan = self.step.plan()
        return None if plan is None else self.with_cut(plan)

    def with_cut(self, plan: StepPlan) -> StepPlan:
        """Return the plan of a step with why it is cut as it is."""
        cut = Layers({}, "") if self.cuts is None else self.cuts.now
        return replace(plan, cut=cut.of_step)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let modules that are blocks run as such inside."""
        before, self.is_running = self.is_running, True
        try:
            yield
        finally:
            self.is_running = before

    def is_in_parts(self) -> bool:
        """Return True if the graph that is handed over now is one of several of a call."""
        if isinstance(self.settings.plan, StepPlan):
            return True
        if self.settings.plan is not None and self.settings.budget is None:
            return False
        broken = num_graph_breaks() > self._breaks or bool(self._calls_plans) or bool(self.step.blocks)
        if broken and self.is_undecided and self.can_restart and not self.by_layers:
            raise LayersUndecidedError("The model is captured in several graphs: its layers may be blocks.")
        return broken or self.by_layers

    def find_menu(self, program: Program) -> tuple[Entry, ...]:
        """Return the menu of a graph that is a block of a step: the user's, or a new one."""
        self.num_compiled += 1
        given = self.settings.plan
        if isinstance(given, StepPlan):
            menu = given_menu(given, program)
            if menu is None and self.settings.budget is None:
                raise made_for_other_blocks(given, program)
            if menu is not None:
                return menu
        with ProgressLine() as progress:
            costs = self.costs_of(program, progress)
            menu = next((menu for menu in self._menus if _is_of(menu, program.graph, costs)), None)
            if menu is None:
                menu = self._make_menu(program.graph, costs, progress)
                self._menus.append(menu)
            return menu

    def _make_menu(self, graph: Graph, costs: Costs, progress: Progress) -> tuple[Entry, ...]:
        planner = menu_planner(self.settings.planner)
        return shared_menu(
            Problem(graph, costs, 1), planner, lambda: make_menu(graph, costs, planner, progress), progress
        )

    def costs_of(self, program: Program, progress: Progress = silent) -> Costs:
        """Return what the ops of `program` take, as far as it is known by now."""
        asked = self.settings.costs
        known = _measured(program, progress) if is_measured(asked) else resolve_costs(program, asked, progress)
        return self.corrected(program, known, progress)

    def corrected(self, program: Program, costs: Costs, progress: Progress = silent) -> Costs:
        """Return `costs` with what first steps have shown by now."""
        return self.corrections.apply(program, costs, lambda: _measured(program, progress))

    def begin_call(self, outside: Callable[[], Iterable[torch.Tensor]] = tuple, copied_bytes: int = 0) -> None:
        """Note that a call of the model begins: graphs handed over from now on run one after the other.

        Args:
            outside: Returns the tensors that are there before the call.
            copied_bytes: Copies that are there as long as forward runs, from which the call could begin again.
        """
        self.step.begin_call(outside, copied_bytes)
        self._calls_plans = []
        self.ran = False
        self.failure = None
        self._began = time.monotonic()
        self._breaks = num_graph_breaks()
        for difference in [] if self._sign is None else self._sign.differences():
            warn(difference)

    def compare_ranks(self, program: Program) -> None:
        """Raise if other ranks would run other collectives than `program`; show them what this one trains with."""
        self.communicates |= compare_collectives(program)
        if self._sign is None and num_ranks() > 1:
            given, graph = self.settings.budget or self.settings.plan, program.graph
            budget = f"{given.budget_bytes} bytes" if isinstance(given, Plan | StepPlan) else str(given)
            planner = registry.name_of(self.settings.planner)
            self._sign = ShownSign(Sign(budget, planner, len(graph.ops), graph.fingerprint))

    def end_call(self) -> None:
        """Note what percentages are of from now on; warn if the call was captured in parts, or not all of it was."""
        if self.step.blocks:
            return
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

    def largest_workspace(self, refused: InfeasibleBudgetError) -> int:
        """Return the most that an op takes inside, of the graphs that are known when a budget is refused."""
        plans = [plan for block in self.step.blocks for plan in block.plans[:1]]
        plans += [refused.plan] if isinstance(refused.plan, Plan) else []
        return max((max(plan.problem.costs.workspace_bytes, default=0) for plan in plans), default=0)

    def drop_overdrawn(self) -> None:
        """Forget plans whose first step needed more than the budget; what was compiled with them is then stale."""
        self._price_late()
        overdrawn = self.corrections.overdrawn
        self.improvements.stop([plan.problem.graph for plan in overdrawn])
        self.plans = [plan for plan in self.plans if plan not in overdrawn]
        self.corrections.overdrawn = []
        if isinstance(self.settings.plan, Plan) and self.settings.plan in overdrawn and not self._rejected:
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

    def _price_late(self) -> None:
        """Price the backward passes that have run for other layouts of gradients than planned."""
        for late in self.late.take():
            problem = Problem(late.program.graph, self.costs_of(late.program), late.plan.budget_bytes)
            found, plan = late.priced(problem), late.plan
            keeps_promise = found.peak_bytes <= plan.promised_bytes
            if late.is_only or not keeps_promise:
                self.late.expect(late)
            if not keeps_promise:
                self.corrections.overdrawn.append(plan)
            elif late.is_only or found.peak_bytes > plan.peak_bytes:
                self._replace(plan, found)
                self.improvements.follow(plan, found)
                late.watch.follow(found, late.program)

    def _replace(self, before: Plan, now: Plan) -> None:
        """Let one plan stand for another one, which ran."""
        self.plans = [now if each == before else each for each in self.plans]
        self._calls_plans = [now if each == before else each for each in self._calls_plans]

    def find_plan(self, program: Program) -> Plan:
        """Return the plan for `program`: the user's, an earlier one for the same graph, or a new one."""
        return self._given(program) or self._known(program) or self._new(program)

    @property
    def is_one_graph(self) -> bool:
        """Whether the graph that is handed over now is the only one of its call so far, and nothing cut it."""
        return num_graph_breaks() == self._breaks and not self._calls_plans and not self.step.blocks

    def note_unplanned_step(self, unplanned_bytes: int) -> None:
        """Let percentages be of so many bytes from now on, if nothing else was noted before."""
        self._whole_bytes = self._whole_bytes or unplanned_bytes

    def record(self, plan: Plan) -> None:
        """Note that a graph of the present call runs as `plan` says."""
        self.num_compiled += 1
        if plan not in self.plans:
            self.plans.append(plan)
        self._calls_plans.append(plan)
        self.improvements.begin(plan)
        if len(self._calls_plans) > 1:
            # What the plan of one graph keeps was taken off the budgets of others.
            self.improvements.stop()

    def is_given_for(self, program: Program) -> bool:
        """Return True if the user gave a plan for this very graph, and it was not rejected."""
        given = self.settings.plan
        return isinstance(given, Plan) and not self._rejected and is_made_for(given, program)

    def _given(self, program: Program) -> Plan | None:
        """Return the user's plan if it is for this graph; raise if it is not and there is no budget for others."""
        given = self.settings.plan
        if not isinstance(given, Plan) or self._rejected:
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
        """Return a new plan; what is done is said before and after."""
        started = time.monotonic()
        say(f"planning {len(program.graph.ops)} ops, captured in {format_seconds(started - self._began)}")
        with ProgressLine() as progress:
            costs = self.costs_of(program, progress)
            timed = time.monotonic()
            plan = self._plan_with(program, costs, progress)
        say(
            f"plan of {plan.planner} ({plan.stage.value}): {format_bytes(plan.peak_bytes)} of "
            f"{format_bytes(plan.budget_bytes)}, overhead {100 * plan.overhead:.2f} %; costs took "
            f"{format_seconds(timed - started)}, planning {format_seconds(time.monotonic() - timed)}"
            f"{', the plan is from an earlier run' if plan.is_cached else ''}"
        )
        return plan

    def _plan_with(self, program: Program, costs: Costs, progress: Progress) -> Plan:
        asked = self.asked(Problem(program.graph, costs, 1).baseline.peak_bytes, program.device)
        # Where earlier graphs hold all of it, the planner still says what would be enough.
        problem = Problem(program.graph, costs, max(asked.left_bytes, 1))
        planner = self.settings.planner
        cut = None if self.cuts is None else self.cuts.of_graph
        if self.may_exceed:
            return replace(plan_or_least(problem, planner, progress), cut=cut)
        plan = shared_plan(problem, planner, lambda: self._solve(problem, planner, progress), progress)
        plan = replace(plan, cut=cut)
        if plan.fits:
            return plan
        if not self.settings.takes_least or num_ranks() > 1:
            raise infeasible(plan, asked)
        least = replace(plan_or_least(problem, planner, progress), cut=cut)
        if not least.fits:
            warn(
                f"No plan within the budget of {least.budget_bytes} bytes was found for this call, so it trains "
                f"with the least peak known, {least.peak_bytes} bytes, which "
                f"{least.peak_bytes - least.budget_bytes} bytes are above it."
            )
        return least

    def _solve(self, problem: Problem, planner: AbstractPlanner, progress: Progress) -> Plan:
        """Return the plan of `planner`, or a first one in its place; ranks, which must run the same, wait for it."""
        alone = num_ranks() == 1 and self.replica is None and not self._calls_plans
        if not alone:
            return solve_or_nearest(problem, planner, progress)
        return self.improvements.solve(problem, planner, progress, self.plans)

    def asked(self, unplanned_bytes: int, device: torch.device) -> AskedBudget:
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


def _measured(program: Program, progress: Progress) -> Costs:
    """Return the measured costs of `program`, of which all ranks measure once."""
    with ops_unchanged(program.calls):
        return shared_costs(program, lambda: resolve_costs(program, "measured", progress), progress)


def _is_of(menu: Sequence[Entry], graph: Graph, costs: Costs) -> bool:
    problem = menu[0].plan.problem
    return problem.graph == graph and problem.costs == costs


def plan_or_least(problem: Problem, planner: AbstractPlanner, progress: Progress) -> Plan:
    """Return a plan within the budget, or else the one of least peak that `planner` finds.

    A search that misses a budget may still meet it when it aims at what it reached, so it is asked again while that
    lowers the peak.
    """
    best = solve_or_nearest(problem, planner, progress)
    for _ in range(_MOST_RETRIES):
        if best.peak_bytes <= problem.budget_bytes:
            break
        again = solve_or_nearest(replace(problem, budget_bytes=best.peak_bytes), planner, progress)
        if again.peak_bytes >= best.peak_bytes:
            break
        best = again
    if best.peak_bytes <= problem.budget_bytes < best.budget_bytes:
        # The same schedule, as an answer to the budget that was asked for.
        best = solve(problem, best.schedule)
    return best


def unplanned_step_bytes(plans: Sequence[Plan]) -> int:
    """Return the peak of a step without plans that runs these graphs one after the other, and back."""
    baselines = [plan.problem.baseline for plan in plans]
    held = accumulate((each.saved_bytes for each in baselines), initial=0)
    return max((before + each.peak_bytes for before, each in zip(held, baselines, strict=False)), default=0)
