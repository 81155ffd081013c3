"""Profiling one unit of a chain: it is run by itself, and nothing outside of it changes.

A first run finds out what the unit is: which of its inputs and results autograd saves, what it changes, where its
results come from. Trial runs then measure what it costs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lowtide import device as devices
from lowtide.blocks.block.position import Arguments, Position
from lowtide.blocks.block.side_effects import Owner, cloned
from lowtide.blocks.block.tensor_spec import State, aliases_of, specs_of
from lowtide.blocks.profile.isolated_run import StateBefore, check_results, explained, isolated
from lowtide.blocks.profile.unit_costs import NEW, OUTSIDE, UnitCosts, with_early_stop, with_plain_run, with_training
from lowtide.errors import InvalidModelError
from lowtide.pytorch.autograd_graph import sequence_number, tensor_hooks_off
from lowtide.pytorch.modules import buffer, buffers
from lowtide.pytorch.storages import same_bits, storage_bytes, storage_key
from lowtide.pytorch.tensor_versions import versions_of


class InPlaceError(Exception):
    """The unit writes over the state it was given."""


def profile_unit(position: Position, state: State, arguments: Arguments, before: str) -> tuple[UnitCosts, State]:
    """Return the costs of `position`, whose results are not known yet, and its state after such a run.

    Raises `InPlaceError` if it writes over the state. `before` names what comes before it, for messages.
    """
    with isolated(position, state, arguments) as unchanged:
        costs, known = _probe(unchanged, state, arguments, before)
        with tensor_hooks_off(costs.foreign):
            if costs.grad_results:
                costs = with_training(known, costs, state, arguments)
                costs = with_early_stop(known, costs, state, arguments)
            costs, after = with_plain_run(known, costs, state, arguments)
    return replace(costs, after=specs_of(after)), after


@dataclass(frozen=True, eq=False)
class _FirstRun:
    """A recorded run of a unit.

    Attributes:
        results: What it returned.
        saved: The tensors that autograd saved, by storage.
        start: The sequence number of the autograd graph before it.
    """

    results: State
    saved: dict[int, Tensor]
    start: int


def _probe(unchanged: StateBefore, state: State, arguments: Arguments, before: str) -> tuple[UnitCosts, Position]:
    """Return all costs but bytes of memory and seconds, and the position with what is now known of it."""
    position, owners = unchanged.position, unchanged.owners
    guarded = unchanged.guarded()
    old = cloned([buffer(module, name) for module, name in owners])
    # Copies: the unit may write over its input, which belongs to the caller.
    trial = tuple(cloned(state))
    run = _first_run(position, trial, arguments, before)
    results = run.results
    grad_results = tuple(index for index, tensor in enumerate(results) if tensor.requires_grad)
    used, reused = _parameters_behind([results[index] for index in grad_results], run.start, position)
    changed = _changed_buffers(position, owners, old)
    sources, sizes = _origins(position, trial, arguments, results)
    effects = unchanged.undo(guarded, trial, results)
    known = {id(parameter) for parameter in position.parameters}
    costs = UnitCosts(
        grad_results=grad_results,
        results=len(results),
        sources=sources,
        aliases=aliases_of(results),
        result_bytes=sizes,
        saved_state=tuple(index for index, tensor in enumerate(trial) if storage_key(tensor) in run.saved),
        saved_results=tuple(
            index for index, tensor in enumerate(results) if storage_key(tensor) in run.saved and sources[index] == NEW
        ),
        effects=effects,
        changing=changed,
        foreign=tuple(parameter for parameter in used if id(parameter) not in known),
        reused=reused,
    )
    return costs, _completed(position, costs, owners)


def _first_run(position: Position, state: State, arguments: Arguments, before: str) -> _FirstRun:
    """Run `position` and record what autograd saves; raise if it writes over its input or its arguments."""
    versions = versions_of(state)
    others = [tensor for tensor in _tensors_in(position, arguments) if not tensor.is_inference()]
    other_versions = versions_of(others)
    saved: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        # Without its node: where an op saves its own result, the node would hold itself, and never be freed.
        alone = tensor.detach()
        saved.setdefault(storage_key(tensor), alone)
        return alone

    with torch.enable_grad(), saved_tensors_hooks(note, lambda tensor: tensor):
        start = sequence_number((torch.zeros(1, requires_grad=True) * 1).grad_fn)
        entered, _, aliases = position.enter(state, arguments)
        results = explained(lambda: position.call(entered, arguments, aliases), position, state, before)
    check_results(position, results)
    if versions_of(state) != versions:
        raise InPlaceError
    if versions_of(others) != other_versions:
        raise InvalidModelError(
            f"{position.unit.labels[-1]} changes one of its extra arguments in place; it could not be run again. "
            "Let it work on a copy."
        )
    return _FirstRun(results, saved, start)


def _completed(position: Position, costs: UnitCosts, owners: Sequence[Owner]) -> Position:
    """Return `position` with what trial runs need to know of it."""
    return replace(
        position,
        grad_results=costs.grad_results,
        results=costs.results,
        parameters=position.parameters + costs.foreign,
        changing=tuple(owners[index] for index in costs.changing),
        rewinds=costs.effects.remembers,
    )


def _tensors_in(position: Position, arguments: Arguments) -> list[Tensor]:
    first = position.unit.first
    rows = arguments.extras[first : first + len(position.unit.blocks)]
    return [value for row in rows for value in row if isinstance(value, Tensor)]


def _parameters_behind(results: Sequence[Tensor], start: int, position: Position) -> tuple[list[Tensor], bool]:
    """Return the leaf tensors that gradients of `results` reach, and whether they reach one more than once.

    Raises if they reach what was computed outside.
    """
    found: dict[int, Tensor] = {}
    edges: Counter[Any] = Counter()
    seen: set[Any] = set()
    stack = [tensor.grad_fn for tensor in results]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found[id(leaf)] = leaf
            continue
        edges.update(following for following, _ in node.next_functions)
        if sequence_number(node) <= start:
            raise InvalidModelError(
                f"{position.unit.labels[-1]} uses a tensor that was computed outside of it and needs a gradient "
                f"({node.name()}). Pass it as an extra argument of the block or as a keyword of the chain."
            )
        if not node.name().startswith("_BeginBackward"):
            stack += [following for following, _ in node.next_functions]
    return list(found.values()), any(edges[node] > 1 for node in seen if getattr(node, "variable", None) is not None)


def _changed_buffers(position: Position, owners: Sequence[Owner], old: Sequence[Tensor]) -> tuple[int, ...]:
    """Return which buffers were changed, without the statistics of normalisations."""
    norms = {id(module) for module in position.norms}
    return tuple(
        index
        for index, ((module, name), was) in enumerate(zip(owners, old, strict=True))
        if id(module) not in norms and _is_changed(buffers(module).get(name), was)
    )


def _is_changed(now: Tensor | None, was: Tensor) -> bool:
    return now is None or not same_bits(now, was)


def _origins(
    position: Position, state: State, arguments: Arguments, results: State
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return where the storage of every result comes from, and the bytes of those that are new."""
    outside = {storage_key(tensor) for tensor in (*_tensors_in(position, arguments), *arguments.leaves)}
    outside.update(map(storage_key, position.unit.contents.parameters()))
    given = {storage_key(tensor): index for index, tensor in reversed(list(enumerate(state)))}
    sources, sizes = [], []
    seen: set[int] = set()
    for tensor in results:
        key = storage_key(tensor)
        sources.append(given.get(key, OUTSIDE if key in outside else NEW))
        fresh = sources[-1] == NEW and key not in seen
        sizes.append(devices.round_bytes(storage_bytes(tensor), tensor.device) if fresh else 0)
        seen.add(key)
    return tuple(sources), tuple(sizes)
