"""What the user asked for, checked once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowtide.costs.resolve import check_source
from lowtide.environment import patience_text
from lowtide.errors import InvalidBudgetError, InvalidOptionError
from lowtide.graph.costs import Costs
from lowtide.plan import registry
from lowtide.plan.core.parallel import Parallel
from lowtide.plan.core.planner import AbstractPlanner
from lowtide.plan.core.result import Plan
from lowtide.step.load import load
from lowtide.step.plan import StepPlan
from lowtide.units import Budget, parse_budget

_OPTIONS = ("budget", "planner", "costs", "plan", "patience", "on_infeasible", "engine")
# Seconds that a first call waits for the best plan. Graphs of a few hundred ops are planned in that time, and nobody
# looks at a first step that takes so much longer; set on bench-start.
PATIENCE_SECONDS = 2.0
_ENDLESS = "full"
ENGINES = ("exact", "inductor")
# Modules that are blocks of the step: found by lowtide, none, or those with these names or of these classes.
Blocks = str | tuple[str | type, ...]


@dataclass(frozen=True)
class Settings:
    """Options of `wrap`, `plan` and the compiler backend.

    Attributes:
        budget: Peak bytes the step may allocate; None if `plan` brings its own.
        planner: A planner.
        costs: Where costs come from: "measured", "analytic", a device name, or ready figures.
        plan: A plan to use for the graph, or the blocks, it was made for.
        blocks: "auto", "whole", or names and classes of the modules that are blocks of the step.
        parallel: The processes that training is planned for without them; None for one process, and where they train.
        patience: Seconds that a first call waits for the best plan; None if it waits until it is there.
        takes_least: Train with the least peak known where no plan fits the budget.
        engine: What runs the plan: "exact" runs ops one by one with eager's bits, "inductor" runs generated code.
    """

    budget: Budget | None
    planner: AbstractPlanner
    costs: str | Costs
    plan: Plan | StepPlan | None = None
    blocks: Blocks = "auto"
    parallel: Parallel | None = None
    patience: float | None = None
    takes_least: bool = False
    engine: str = "exact"

    @staticmethod
    def make(
        *,
        budget: int | str | Budget | None = None,
        planner: str | AbstractPlanner = "auto",
        costs: str | Costs = "measured",
        plan: Plan | StepPlan | str | Path | None = None,
        blocks: str | Sequence[str | type] = "auto",
        parallel: Parallel | str | None = None,
        patience: float | str | None = _ENDLESS,
        on_infeasible: str = "raise",
        engine: str = "exact",
    ) -> Settings:
        """Return checked settings; everything that can be wrong with them is found here."""
        if _engine(engine) == "inductor":
            blocks = _blocks_of_generated_code(plan, blocks)
        if budget is None and plan is None:
            raise InvalidBudgetError('No budget was given. Pass budget="6GiB", budget="50%" or a saved plan.')
        if isinstance(costs, str):
            check_source(costs)
        elif not isinstance(costs, Costs):
            raise InvalidOptionError(f'costs={costs!r} is not "measured", "analytic", a device name or Costs.')
        return Settings(
            budget=None if budget is None else parse_budget(budget),
            planner=_planner(planner),
            costs=costs,
            plan=load(plan) if isinstance(plan, str | Path) else _checked_plan(plan),
            blocks=_blocks(blocks),
            parallel=Parallel.parse(parallel),
            patience=_patience(patience),
            takes_least=_takes_least(on_infeasible),
            engine=engine,
        )

    @staticmethod
    def from_options(options: Mapping[str, Any] | None) -> Settings:
        """Return the settings in `torch.compile(..., options=...)`."""
        unknown = sorted(set(options or {}) - set(_OPTIONS))
        if unknown:
            raise InvalidOptionError(
                f"Unknown options {unknown} for the lowtide backend; there are {', '.join(_OPTIONS)}."
            )
        return Settings.make(**{"patience": None, **(options or {})})


def _planner(planner: str | AbstractPlanner) -> AbstractPlanner:
    if isinstance(planner, AbstractPlanner):
        return planner
    if not isinstance(planner, str):
        raise InvalidOptionError(f"planner={planner!r} is neither the name of a planner nor a planner.")
    return registry.get(planner)


def _engine(engine: object) -> str:
    if not isinstance(engine, str) or engine not in ENGINES:
        raise InvalidOptionError(f"engine={engine!r} is not known; there are {' and '.join(map(repr, ENGINES))}.")
    return engine


def _blocks_of_generated_code(plan: object, blocks: object) -> str:
    """Return how steps are cut whose code Inductor generates: not at all."""
    if plan is not None:
        raise InvalidOptionError(
            'plan= was given beside engine="inductor". A plan is for the ops that the exact engine captures, and '
            "Inductor takes them apart into others. Give a budget alone, or leave the engine out."
        )
    if blocks not in ("auto", "whole"):
        raise InvalidOptionError(
            f'blocks={blocks!r} was given beside engine="inductor", which plans a step as one graph. Leave blocks out, '
            "or use the exact engine, which is the default."
        )
    return "whole"


def _blocks(blocks: object) -> Blocks:
    """Return which modules are blocks, checked as far as it can be without a model."""
    if isinstance(blocks, str) and blocks in ("auto", "whole"):
        return blocks
    named = tuple(blocks) if isinstance(blocks, list | tuple | set | frozenset) else ()
    if named and all(isinstance(each, str | type) for each in named):
        return named
    raise InvalidOptionError(
        f'blocks={blocks!r} is not "auto", "whole" or a list of modules. Give their names or classes, such as '
        'blocks=["encoder.layers.0", "encoder.layers.1"] or blocks=[DecoderLayer].'
    )


def _patience(patience: object) -> float | None:
    """Return the seconds that a first call waits; None if it waits for the whole plan."""
    if patience is None:
        said = patience_text()
        return PATIENCE_SECONDS if said is None else _patience(_number(said))
    if patience == _ENDLESS:
        return None
    if isinstance(patience, int | float) and not isinstance(patience, bool) and 0 <= patience < float("inf"):
        return float(patience)
    raise InvalidOptionError(
        f'patience={patience!r} is neither a number of seconds nor "full". Pass 0 to train at once with a first plan, '
        'a number of seconds to wait so long for the best one, or "full" to wait until it is there.'
    )


def _takes_least(on_infeasible: object) -> bool:
    if on_infeasible not in ("raise", "least"):
        raise InvalidOptionError(
            f'on_infeasible={on_infeasible!r} is neither "raise" nor "least": raise an error where no plan fits the '
            "budget, or train with the least peak known and a warning."
        )
    return on_infeasible == "least"


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _checked_plan(plan: Plan | StepPlan | None) -> Plan | StepPlan | None:
    if plan is not None and not isinstance(plan, Plan | StepPlan):
        raise InvalidOptionError(f"plan={plan!r} is not a Plan, a StepPlan or the path of a plan file.")
    return plan
