"""A chain of blocks as a module. Every training call is planned block by block, not op by op; it runs in eager mode."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lowtide import device as devices
from lowtide.blocks.block.call_checks import WatchedModules, check_call, check_modules
from lowtide.blocks.block.position import Arguments
from lowtide.blocks.block.side_effects import Autocast, autocast_now
from lowtide.blocks.block.tensor_spec import (
    Block,
    State,
    aliases_of,
    as_state,
    label_of,
    specs_of,
)
from lowtide.blocks.execute.chain_program import ChainProgram
from lowtide.blocks.policy import PLANNING
from lowtide.blocks.profile.chain_graph import ChainGraph, chain_graph, joined
from lowtide.blocks.profile.chain_profile import Blocks, ChainProfile, profile_chain
from lowtide.errors import (
    InvalidInputError,
    InvalidModelError,
    InvalidOptionError,
    LowtideError,
)
from lowtide.plan import registry
from lowtide.plan.core.planner import AbstractPlanner
from lowtide.plan.core.problem import Problem
from lowtide.plan.core.result import Plan
from lowtide.plan.diagnose.infeasible import infeasible
from lowtide.plan.solve import solve
from lowtide.progress import Progress, ProgressLine
from lowtide.pytorch.contents import contents_of
from lowtide.pytorch.nested import tree_leaves
from lowtide.settings import Settings


class Chain(nn.Module):
    """Blocks that run one after the other, under a schedule that fits a budget.

    Made by `lowtide.chain`; the names of the blocks in `state_dict` are those of the container they came from.
    """

    def __init__(
        self,
        names: Sequence[str],
        blocks: Sequence[Block],
        settings: Settings,
        *,
        emits: int = 0,
        verify: bool = False,
    ) -> None:
        super().__init__()
        self._names, self._blocks = tuple(names), tuple(blocks)
        for name, block in zip(names, blocks, strict=True):
            if isinstance(block, nn.Module):
                self.add_module(name, block)
        self._planned = PlannedBlocks(names, blocks, settings, emits=emits, verify=verify)

    @property
    def plans(self) -> list[Plan]:
        """The plans made so far, one for each kind of call."""
        return self._planned.plans

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self._blocks)

    def __getitem__(self, index: int) -> Block:
        """Return a block."""
        return self._blocks[index]

    def forward(self, *state: Tensor, extras: Iterable[Any] | None = None, **keywords: Any) -> Any:
        """Return what the last block returns, and what all blocks emit, if they do.

        Args:
            *state: What the first block takes.
            extras: For every block, what it takes beside the state: a tensor, a tuple, or None for nothing.
            **keywords: What every block takes as keyword arguments.
        """
        return self._planned(state, extras, keywords, training=self.training)


class PlannedBlocks:
    """Runs blocks in a row: planned if the call is to be differentiated, plainly otherwise."""

    def __init__(
        self,
        names: Sequence[str],
        blocks: Sequence[Block],
        settings: Settings,
        *,
        emits: int = 0,
        verify: bool = False,
    ) -> None:
        _check_blocks(names, blocks, emits)
        self.settings, self.emits, self.verify = settings, emits, verify
        self._names, self._blocks = tuple(names), tuple(blocks)
        distinct = list({id(block): block for block in blocks}.values())
        referred = [contents_of(block) for block in distinct if not isinstance(block, nn.Module)]
        roots = [block for block in distinct if isinstance(block, nn.Module)]
        roots += [module for contents in referred for module in contents.modules]
        self._watched = WatchedModules(roots, [tensor for contents in referred for tensor in contents.tensors])
        self._programs: dict[Any, ChainProgram | None] = {}
        self.plans: list[Plan] = []

    def __call__(
        self, state: tuple[Any, ...], extras: Iterable[Any] | None, keywords: dict[str, Any], *, training: bool
    ) -> Any:
        """Return what the blocks return; see `Chain.forward`."""
        if not training or not torch.is_grad_enabled():
            return self._plain(state, self._arguments(state, extras, keywords))
        if torch.compiler.is_compiling():
            # The compiler calls a function that is disabled for it as it is.
            return _not_compiled(self._train)(state, extras, keywords)
        return self._train(state, extras, keywords)

    def _train(self, state: tuple[Any, ...], extras: Iterable[Any] | None, keywords: dict[str, Any]) -> Any:
        """Return what the blocks return in a call that may be differentiated."""
        arguments = self._arguments(state, extras, keywords)
        marks, watched = self._watched.look()
        if not (arguments.leaves or any(tensor.requires_grad for tensor in (*state, *watched))):
            return self._plain(state, arguments)
        check_call(state, arguments.leaves, self._watched.modules)
        autocast = autocast_now(tensor.device for tensor in (*state, *watched[:1]))
        program = self._program(state, arguments, autocast, marks)
        if program is None:
            return self._plain(state, arguments)
        outputs = program.run(state, arguments, autocast, verify=self.verify)
        return self._shaped(outputs, sum(own for _, own in program.emitted))

    def __deepcopy__(self, memo: dict[int, Any]) -> PlannedBlocks:
        """Return the same for copies of the blocks, without plans."""
        blocks = copy.deepcopy(list(self._blocks), memo)
        return PlannedBlocks(self._names, blocks, self.settings, emits=self.emits, verify=self.verify)

    def _arguments(self, state: tuple[Any, ...], extras: Iterable[Any] | None, keywords: dict[str, Any]) -> Arguments:
        for number, tensor in enumerate(state):
            if not isinstance(tensor, Tensor):
                raise InvalidInputError(
                    f"Input {number} of the chain is a {type(tensor).__name__}; all must be tensors. Pass anything "
                    "else as a keyword, or in extras."
                )
        if not state:
            raise InvalidInputError("The chain was called without an input; its first block needs at least one tensor.")
        rows = ((),) * len(self._blocks) if extras is None else tuple(map(_row, extras))
        if len(rows) != len(self._blocks):
            raise InvalidInputError(
                f"extras has {len(rows)} entries and the chain has {len(self._blocks)} blocks; give one entry for each "
                "block, None for those that take nothing."
            )
        values = [value for row in rows for value in row]
        if keywords:
            values += tree_leaves(keywords)
        leaves = {id(value): value for value in values if isinstance(value, Tensor) and value.requires_grad}
        return Arguments(rows, keywords, list(leaves.values()))

    def _plain(self, state: tuple[Any, ...], arguments: Arguments) -> Any:
        """Return what the blocks return when they run as in plain PyTorch."""
        emitted: list[Tensor] = []
        result: Any = state
        for name, block, extra in zip(self._names, self._blocks, arguments.extras, strict=True):
            result = block(*state, *extra, **arguments.keywords)
            state = as_state(result, label_of(name, block))
            if self.emits:
                emitted += state[-self.emits :]
                state = state[: -self.emits]
        return self._shaped((*state, *emitted), len(emitted))

    def _shaped(self, outputs: Sequence[Tensor], emitted: int) -> Any:
        """Return the state as a tensor or a tuple; with blocks that emit, also what each of them emitted."""
        state = tuple(outputs[: len(outputs) - emitted])
        result: Any = state[0] if len(state) == 1 else state
        if not self.emits:
            return result
        rows = outputs[len(outputs) - emitted :]
        return result, [tuple(rows[k : k + self.emits]) for k in range(0, len(rows), self.emits)]

    def _program(
        self, state: State, arguments: Arguments, autocast: Autocast, marks: tuple[Any, ...]
    ) -> ChainProgram | None:
        """Return the program for such a call, or None if nothing needs to be recomputed."""
        flat = tree_leaves(arguments.keywords) if arguments.keywords else ()
        index = {id(leaf): number for number, leaf in enumerate(arguments.leaves)}
        key = (
            specs_of(state),
            aliases_of(state),
            tuple(map(specs_of, arguments.extras)),
            specs_of(flat),
            tuple(index[id(value)] for row in (*arguments.extras, flat) for value in row if id(value) in index),
            autocast,
            marks,
        )
        if key not in self._programs:
            self._programs[key] = self._plan(state, arguments, autocast)
        return self._programs[key]

    def _plan(self, state: State, arguments: Arguments, autocast: Autocast) -> ChainProgram | None:
        check_modules(self._watched.modules, self._watched.loose)
        with ProgressLine() as progress:
            profile = self._profile(state, arguments, autocast, progress)
            if not any(costs.grad_results for costs in profile.costs):
                return None
            made = chain_graph(profile)
            plan = self._solve(made, state[0].device, progress)
        self.plans.append(plan)
        if not plan.num_recomputed:
            return None
        return ChainProgram.make(profile.positions, made.ops, plan.schedule)

    def _profile(self, state: State, arguments: Arguments, autocast: Autocast, progress: Progress) -> ChainProfile:
        """Return what the chain costs; an exception of a block arrives as in a plain loop."""
        blocks = Blocks.of(self._names, self._blocks, self.emits)
        try:
            return profile_chain(blocks, state, arguments, autocast, progress)
        except (LowtideError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            failed = error
        # Profiling has left nothing behind. In plain training the blocks before the one that failed have run once.
        try:
            with torch.no_grad():
                self._plain(state, arguments)
        except Exception as error:
            if error is not failed:
                for note in getattr(failed, "__notes__", ()):
                    error.add_note(note)
            raise
        raise failed

    def _solve(self, made: ChainGraph, device: torch.device, progress: Progress) -> Plan:
        """Return the plan for a graph; raise if none fits."""
        problem = Problem(made.graph, made.costs, 1)
        problem = replace(problem, budget_bytes=self._budget_bytes(problem, device))
        budget = problem.budget_bytes
        for _ in range(PLANNING.attempts):
            found = solve(
                replace(problem, budget_bytes=budget), _with_less_effort(self.settings.planner), progress, throw=False
            )
            plan = replace(_as_run(made, problem, found), planner=registry.name_of(self.settings.planner))
            if problem.fits(plan.trace) or not found.problem.fits(found.trace):
                break
            # A budget is at least one byte; for that the planner returns what needs least.
            budget = max(budget - (plan.peak_bytes - problem.budget_bytes), 1)
        if not problem.fits(plan.trace):
            raise infeasible(plan, unit="block")
        return plan

    def _budget_bytes(self, problem: Problem, device: torch.device) -> int:
        budget = self.settings.budget
        assert budget is not None, "lowtide.chain asks for one"
        return devices.free_bytes(device) if budget.is_auto else max(budget.resolve(problem.baseline.peak_bytes), 1)


def _with_less_effort(planner: AbstractPlanner) -> AbstractPlanner:
    """Return `planner`, or `auto` with less effort if the user did not set its effort."""
    return planner.with_effort(PLANNING.auto_effort) if planner is registry.get("auto") else planner


def _as_run(made: ChainGraph, problem: Problem, plan: Plan) -> Plan:
    """Return `plan` as it will run: the two ops of a position's forward or backward are one call."""
    schedule = joined(made.ops, plan.schedule)
    if schedule == plan.schedule and problem == plan.problem:
        return plan
    return replace(plan, problem=problem, schedule=schedule, trace=problem.price(schedule))


def _row(extra: Any) -> tuple[Any, ...]:
    if extra is None:
        return ()
    return tuple(extra) if isinstance(extra, tuple | list) else (extra,)


def _check_blocks(names: Sequence[str], blocks: Sequence[Block], emits: int) -> None:
    """Raise unless these are blocks that can be chained."""
    if not blocks:
        raise InvalidModelError("The chain is empty: give at least one block, a module or a function.")
    for name, block in zip(names, blocks, strict=True):
        if not callable(block) or isinstance(block, type):
            raise InvalidModelError(
                f"Block {name} of the chain is {block!r:.80}, which cannot be called; a block is an nn.Module or a "
                "function."
            )
    if isinstance(emits, bool) or not isinstance(emits, int) or emits < 0:
        raise InvalidOptionError(f"emits={emits!r} is not a number of tensors of at least 0.")


# PyTorch does not annotate it.
_not_compiled: Callable[[Callable[..., Any]], Callable[..., Any]] = torch.compiler.disable
