"""The plan of a whole training step: which plan every run of a block has, and what the step then takes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256

from lowtide.plan.core.account import MemoryAccount
from lowtide.plan.core.figures import PlanFigures
from lowtide.plan.core.result import Outcome, Plan
from lowtide.step.choose import StepChoice, least_peak
from lowtide.step.plan_variant import Menus, plain_step
from lowtide.step.problem import Block, Choice, StepProblem, Variant
from lowtide.step.simulate import StepTrace, simulate_step
from lowtide.step.step_file import OVER, StepRecord, check_menu, read_step, write_step
from lowtide.step.verify import check_choice, verify_step
from lowtide.step.words import RunGroup, moment_in_words, run_groups
from lowtide.text_table import text_table
from lowtide.units import counted, format_bytes, format_seconds

# Plans this near to their bound are called optimal, as plans of one graph are.
_NEARLY = 1e-5
SENTENCES = {
    Outcome.NOTHING_TO_DO: "The step fits the budget as it is: nothing is recomputed.",
    Outcome.OPTIMAL: (
        "The step fits the budget and is proved to be as fast as any in which ops stay in their block and first run in "
        "the given order, to a hundred-thousandth of a step."
    ),
    Outcome.FITS: "The step fits the budget; a faster one may exist.",
    Outcome.IMPOSSIBLE: (
        "No choice among the plans of the blocks fits the budget; this one has the least peak there is. Raise the "
        "budget to its peak or make the batch smaller."
    ),
    Outcome.OVER_BUDGET: (
        "No choice among the plans of the blocks within the budget was found; this one has the least peak known. Raise "
        "the budget to its peak or make the batch smaller."
    ),
}


@dataclass(frozen=True, slots=True)
class BlockRow:
    """What a plan does to runs one after the other of the same block.

    Attributes:
        name: The block: "decoder.layers x 12".
        runs: Their number.
        variant: Which of the plans of its menu they run, from 0.
        num_variants: How many plans the menu has.
        kept_bytes: What they leave for backward, all together.
        recomputed: Ops that they run again, all together.
        recompute_seconds: Time of these.
        backward_bytes: What one backward needs on top of what was kept.
    """

    name: str
    runs: int
    variant: int
    num_variants: int
    kept_bytes: int
    recomputed: int
    recompute_seconds: float
    backward_bytes: int


@dataclass(frozen=True)
class StepPlan(PlanFigures):
    """The plan of a step of several blocks.

    Attributes:
        problem: The step: its blocks, the order in which they run, and the code between them.
        choice: For every block run, which variant of its block it is.
        menus: For every block, the plans of its variants; empty for a block that has no graph.
        planner: Name of the planner that made the menus.
        outcome: How planning ended.
        bound: Proved lower bound on the overhead if ops stay in their block and first run in its order; None if
            nothing is proved.
        min_peak_bytes: Least peak known for any choice.
        baseline_seconds: Seconds of the blocks in plain training.
        seconds: Time spent planning.
        account: All the memory that training takes, if the plan was made for a device or a size of memory.
        cut: Why the model is cut into blocks as it is, or into none; None if there was nothing to decide on.
    """

    problem: StepProblem
    choice: Choice
    menus: tuple[tuple[Plan, ...], ...]
    planner: str
    outcome: Outcome
    bound: float | None
    min_peak_bytes: int
    baseline_seconds: float
    seconds: float
    account: MemoryAccount | None = None
    cut: str | None = None

    @staticmethod
    def of(problem: StepProblem, menus: Menus, chosen: StepChoice, *, planner: str, seconds: float) -> StepPlan:
        """Return the plan that `chosen` is, also if it does not fit; blocks that do not run are left out.

        Args:
            problem: The step.
            menus: For every block, the plans of its variants.
            chosen: The choice, and what is proved of it.
            planner: Who made the menus.
            seconds: Time spent planning.
        """
        least = chosen.peak_bytes
        if least <= problem.budget_bytes:
            least = min(least, least_peak(problem, seconds=1.0).peak_bytes)
        problem, menus = _used(problem, menus)
        runs = [menus[block] for block in problem.instances]
        plain = sum(menu[0].problem.baseline.seconds for menu in runs if menu)
        fits = chosen.peak_bytes <= problem.budget_bytes
        return StepPlan(
            problem=problem,
            choice=chosen.choice,
            menus=tuple(map(tuple, menus)),
            planner=planner,
            outcome=_outcome(problem, chosen, plain),
            bound=(chosen.bound_seconds / plain if plain else 0.0) if fits else None,
            min_peak_bytes=least,
            baseline_seconds=plain,
            seconds=seconds,
        )

    @cached_property
    def trace(self) -> StepTrace:
        """The level of memory along the step."""
        return simulate_step(self.problem, self.choice)

    @cached_property
    def plain(self) -> StepTrace:
        """The level along the step if no block has a plan."""
        return simulate_step(plain_step(self.problem, self.menus), (0,) * len(self.choice))

    @property
    def blocks(self) -> tuple[str, ...]:
        """Names of the blocks in the order in which they run."""
        return tuple(self.problem.blocks[block].name for block in self.problem.instances)

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The variant of every block run."""
        return tuple(self.problem.menu(run)[variant] for run, variant in enumerate(self.choice))

    @property
    def plans(self) -> tuple[Plan | None, ...]:
        """The plan of every block run; None for a block that has no graph."""
        pairs = zip(self.problem.instances, self.choice, strict=True)
        return tuple(self.menus[block][variant] if self.menus[block] else None for block, variant in pairs)

    @property
    def block_plans(self) -> tuple[Plan, ...]:
        """The plans that block runs have, each once, in the order of their first runs."""
        pairs = dict.fromkeys(zip(self.problem.instances, self.choice, strict=True))
        return tuple(self.menus[block][variant] for block, variant in pairs if self.menus[block])

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of the whole step."""
        return self.trace.peak_bytes

    @property
    def peak_place(self) -> str:
        """Where the peak is, in words: in the forward or backward of a block run, or in the code between two."""
        return moment_in_words(self.blocks, self.trace.peak_moment)

    @property
    def baseline_peak_bytes(self) -> int:
        """Predicted peak of plain training."""
        return self.plain.peak_bytes

    @property
    def budget_bytes(self) -> int:
        """The budget."""
        return self.problem.budget_bytes

    @property
    def extra_seconds(self) -> float:
        """Seconds of recomputation."""
        return self.trace.seconds

    @property
    def overhead(self) -> float:
        """Extra seconds as a share of the seconds of plain training."""
        return self.extra_seconds / self.baseline_seconds if self.baseline_seconds else 0.0

    @property
    def saved_bytes(self) -> int:
        """Bytes alive between forward and backward."""
        # Forward is a gap before and after every run.
        return self.trace.levels[2 * len(self.choice)]

    @property
    def num_recomputed(self) -> int:
        """Number of runs of ops beyond the first of each, in all block runs."""
        return sum(plan.num_recomputed for plan in self.plans if plan is not None)

    @property
    def num_ops(self) -> int:
        """Number of ops of all block runs."""
        return sum(len(plan.problem.graph.ops) for plan in self.plans if plan is not None)

    @property
    def costs_source(self) -> str:
        """Where the costs of the ops come from."""
        return next((menu[0].problem.costs.source for menu in self.menus if menu), "none")

    @property
    def fingerprint(self) -> str:
        """A name for the step that depends on its blocks and their order alone, not on budget or choice."""
        graphs = [menu[0].problem.graph.fingerprint if menu else "" for menu in self.menus]
        names = [block.name for block in self.problem.blocks]
        return sha256(repr((names, graphs, self.problem.instances)).encode()).hexdigest()[:16]

    @property
    def groups(self) -> tuple[RunGroup, ...]:
        """The block runs, neighbours of the same block with the same plan as one."""
        return run_groups(self.problem, self.choice)

    def verify(self) -> None:
        """Raise an error unless every variant takes what its plan takes and the step peaks as it says.

        The peak is worked out in another way than the one that priced it, and must be within the budget unless the
        plan itself says that it is not.
        """
        for block, menu in zip(self.problem.blocks, self.menus, strict=True):
            if menu:
                check_menu(block, menu)
        check_choice(self.problem, self.choice)
        budget = self.budget_bytes if self.outcome not in OVER else max(self.budget_bytes, self.peak_bytes)
        verify_step(replace(self.problem, budget_bytes=budget), self.choice, self.peak_bytes)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to `path` as JSON, replacing what is there."""
        names = StepRecord.__dataclass_fields__
        write_step(StepRecord(**{name: getattr(self, name) for name in names}), path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> StepPlan:
        """Return the plan saved at `path`; raise `PlanFileError` if the file is not the valid plan of a step."""
        return StepPlan.from_record(read_step(path))

    @staticmethod
    def from_record(record: StepRecord) -> StepPlan:
        """Return the plan that a file holds."""
        return StepPlan(**{name: getattr(record, name) for name in StepRecord.__dataclass_fields__})

    def __str__(self) -> str:
        """Return summary lines, then a table by block."""
        return "\n".join([*self._summary(), *self.account_lines(), "", *self._table()])

    def _summary(self) -> list[str]:
        runs, distinct = counted(len(self.choice), "block run"), len(self.problem.blocks)
        return [
            f"Plan for a step of {runs}, {distinct} of them distinct, from menus by {self.planner}: "
            f"{SENTENCES[self.outcome]}",
            self.peak_line(),
            f"  where     in {self.peak_place}",
            self.overhead_line(),
            *self.cut_lines(),
            f"  graphs    {counted(self.num_ops, 'op')}, {self.num_recomputed} recomputed, "
            f"{format_bytes(self.saved_bytes)} saved for backward",
            self.planning_line(),
        ]

    def _proof(self) -> str:
        proof = super()._proof()
        return f"{proof} as long as ops stay in their block" if proof else ""

    @property
    def rows(self) -> tuple[BlockRow, ...]:
        """What the plan does to each group of block runs."""
        return tuple(self._row(group) for group in self.groups)

    def _row(self, group: RunGroup) -> BlockRow:
        variant, plan = self.variants[group.first], self.plans[group.first]
        return BlockRow(
            name=group.name or "(top)",
            runs=group.count,
            variant=group.variant,
            num_variants=len(self.problem.blocks[group.block].variants),
            kept_bytes=group.count * variant.forward_after,
            recomputed=0 if plan is None else group.count * plan.num_recomputed,
            recompute_seconds=group.count * variant.seconds,
            backward_bytes=variant.backward_peak,
        )

    def _table(self) -> list[str]:
        header = ("block", "variant", "kept", "recomputed", "recompute time", "backward needs")
        cells = [
            (
                row.name,
                f"{row.variant + 1} of {row.num_variants}",
                format_bytes(row.kept_bytes),
                counted(row.recomputed, "op") if row.recomputed else "-",
                format_seconds(row.recompute_seconds) if row.recompute_seconds else "-",
                format_bytes(row.backward_bytes),
            )
            for row in self.rows
        ]
        return text_table(header, cells)


def _used(problem: StepProblem, menus: Menus) -> tuple[StepProblem, Menus]:
    """Return the problem and the menus without the blocks that do not run, in the order of their first runs."""
    used = list(dict.fromkeys(problem.instances))
    blocks: Sequence[Block] = [problem.blocks[block] for block in used]
    instances = tuple(used.index(block) for block in problem.instances)
    return replace(problem, blocks=tuple(blocks), instances=instances, fixed=()), [menus[block] for block in used]


def _outcome(problem: StepProblem, chosen: StepChoice, plain_seconds: float) -> Outcome:
    if chosen.peak_bytes > problem.budget_bytes:
        return Outcome.IMPOSSIBLE if chosen.proved else Outcome.OVER_BUDGET
    if not chosen.seconds:
        return Outcome.NOTHING_TO_DO
    nearly = chosen.seconds - chosen.bound_seconds <= _NEARLY * plain_seconds
    return Outcome.OPTIMAL if nearly else Outcome.FITS
