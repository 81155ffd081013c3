"""The plans of a layer that runs in eager mode, and what its runs take, call by call: sizes may depend on data.

There are two plans: all that autograd saves is kept, or only what went in. A layer that is not looked into has no other
ones that keep less than everything: whatever its backward reads, the layer has to run again for it. So the seconds of
the second plan are a proved bound for all that keep less than the first.

The profile is of one call. The first runs are measured as they happen, and all runs of a layer that once took other
bytes than its profile says. Figures only grow, and predictions follow them. So a budget holds for calls that take what
earlier ones have taken; the first call that takes more than any before it may exceed the budget by the difference. On
the CPU, and while no profiler watches the thread, runs are measured; elsewhere the profile is all that is known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from lowtide import device as devices
from lowtide.blocks.block.block_graph import BlockGraph
from lowtide.blocks.block.position import Differentiated
from lowtide.blocks.block.tensor_spec import DTYPE, SHAPE, State
from lowtide.blocks.execute.chain_program import ChainProgram
from lowtide.blocks.policy import OPAQUE
from lowtide.blocks.profile.chain_graph import ChainGraph, chain_graph, joined
from lowtide.blocks.profile.chain_profile import ChainProfile
from lowtide.blocks.profile.unit_costs import NEW, UnitCosts
from lowtide.measure import can_record, run_phases
from lowtide.plan.core.problem import Problem
from lowtide.plan.menu import Entry
from lowtide.plan.solve import solve
from lowtide.pytorch.storages import storage_bytes, storage_key
from lowtide.schedule.expand import expand
from lowtide.schedule.steps import Schedule
from lowtide.units import MOST_BUDGET_BYTES

Result = TypeVar("Result")


class WatchedPlans:
    """The plans of a layer, at the largest costs seen.

    Args:
        profile: The profile, a chain of one position.
        device: Where it runs.
    """

    def __init__(self, profile: ChainProfile, device: torch.device) -> None:
        self.profile, self._device = profile, device
        self.arriving_bytes = _expected_gradients(profile.costs[0], device)
        self._arrived = False
        self._varies = False
        self._runs = 0
        self._changed = False

    def menu(self) -> tuple[Entry, ...]:
        """Return the plans, the one that keeps everything first."""
        made = chain_graph(self.profile, arriving_bytes=self.arriving_bytes)
        problem = Problem(made.graph, made.costs, MOST_BUDGET_BYTES)
        everything, again = (solve(problem, schedule) for schedule in _schedules(made))
        below = max(everything.trace.saved_bytes - 1, 0)
        return Entry(everything, None, 0.0), Entry(again, below, again.overhead)

    def forget_results(self) -> None:
        """Let go of results of a call that is over, which may be a part of what the layer remembers."""
        for position in self.profile.positions:
            position.unit.python_state.forget_results()

    def programs(self) -> tuple[ChainProgram, ...]:
        """Return what runs the plans, in their order."""
        made = chain_graph(self.profile, arriving_bytes=self.arriving_bytes)
        return tuple(ChainProgram.make(self.profile.positions, made.ops, schedule) for schedule in _schedules(made))

    def take_changes(self) -> bool:
        """Return whether costs have changed since the last time this was asked."""
        changed, self._changed = self._changed, False
        return changed

    def note_arrival(self, tangents: Sequence[Tensor]) -> None:
        """Note the gradients that a backward has been given."""
        sizes = {storage_key(each): storage_bytes(each) for each in tangents}
        arrived = sum(devices.round_bytes(size, self._device) for size in sizes.values())
        if not self._arrived or arrived > self.arriving_bytes:
            self._changed = self._changed or arrived != self.arriving_bytes
            self.arriving_bytes, self._arrived = arrived, True

    def run(self, run: Callable[[], tuple[State, BlockGraph]]) -> tuple[State, BlockGraph]:
        """Return `run()`, which makes what backward reads, measured if that is still of interest."""
        if not self._is_of_interest():
            return run()
        self._runs += 1
        (results, graph), peak, end = _measured(run, self._device)
        costs = self.profile.costs[0]
        sizes = _new_bytes(costs, results)
        self._note(
            inside_bytes=max(end - sum(sizes), 0),
            workspace_bytes=max(peak - max(end, sum(sizes)), 0),
            result_bytes=tuple(map(max, sizes, costs.result_bytes)),
        )
        return results, graph

    def run_deferred(self, run: Callable[[], tuple[State, BlockGraph]]) -> tuple[State, BlockGraph]:
        """Return `run()`, which leaves what backward reads to `fill`, measured if that is still of interest."""
        if not self._is_of_interest():
            return run()
        (results, graph), peak, end = _measured(run, self._device)
        costs = self.profile.costs[0]
        sizes = _new_bytes(costs, results)
        self._note(
            workspace_bytes=max(peak - max(end, sum(sizes)), 0),
            result_bytes=tuple(map(max, sizes, costs.result_bytes)),
        )
        return results, graph

    def fill(self, run: Callable[[], None]) -> None:
        """Call `run()`, which makes what backward reads, measured if that is still of interest."""
        if not self._is_of_interest():
            return run()
        self._runs += 1
        _, peak, end = _measured(run, self._device)
        return self._note(inside_bytes=max(end, 0), stop_workspace_bytes=max(peak - end, 0))

    def differentiate(self, run: Callable[[], Differentiated]) -> Differentiated:
        """Return `run()`, a backward, measured if that is still of interest."""
        if not self._is_of_interest():
            return run()
        found, peak, _ = _measured(run, self._device)
        self._note(backward_workspace_bytes=peak, adding_workspace_bytes=peak)
        return found

    def _is_of_interest(self) -> bool:
        return (self._varies or self._runs < OPAQUE.watched_runs) and can_record(self._device)

    def _note(self, *, result_bytes: tuple[int, ...] | None = None, **found: int) -> None:
        """Take over figures that are larger than those so far."""
        costs = self.profile.costs[0]
        larger = {name: max(size, getattr(costs, name)) for name, size in found.items()}
        new = replace(costs, **larger, result_bytes=result_bytes or costs.result_bytes)
        self._varies = self._varies or any(size != getattr(costs, name) for name, size in found.items())
        if new != costs:
            self.profile = replace(self.profile, costs=(new,))
            self._changed = True


def _schedules(made: ChainGraph) -> tuple[Schedule, Schedule]:
    return Schedule.keep_all(made.graph), joined(made.ops, expand(made.graph, ()))


def _measured(run: Callable[[], Result], device: torch.device) -> tuple[Result, int, int]:
    """Return the result of `run()`, its highest bytes, and those it leaves."""
    found: list[Result] = []
    ((peak, end),) = run_phases([lambda: found.append(run())], device)
    return found[0], peak, end


def _new_bytes(costs: UnitCosts, results: State) -> list[int]:
    """Return for every result with a new storage its bytes; 0 for the second of two that share one."""
    sizes: list[int] = []
    seen: set[int] = set()
    for source, tensor in zip(costs.sources, results, strict=True):
        fresh = source == NEW and storage_key(tensor) not in seen
        sizes.append(devices.round_bytes(storage_bytes(tensor), tensor.device) if fresh else 0)
        seen.add(storage_key(tensor))
    return sizes


def _expected_gradients(costs: UnitCosts, device: torch.device) -> int:
    """Return the bytes of a gradient for every result that has one."""
    specs = [costs.after[index] for index in costs.grad_results]
    sizes = [torch.Size(spec[SHAPE]).numel() * int(spec[DTYPE].itemsize) for spec in specs]
    return sum(devices.round_bytes(size, device) for size in sizes)
