"""The graph of a profiled chain, with costs, for the planners and the simulator.

Every position is one forward op, which makes the state after it and what autograd saves inside, and two backward ops:
the first reads what is saved and the gradient that arrives, the second makes the gradients that leave. They are two
because what is saved is freed while the gradients are made; one op would have to hold both.

Where a run for backward only may stop early, the forward op is two as well: the first makes what is saved inside, the
second the state after it. A backward that follows needs the first one only. The second never runs alone; see `joined`.

A run that saves nothing has the costs of one that does: its peak is that of the backward that follows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from lowtide import device as devices
from lowtide.blocks.block.position import Position
from lowtide.blocks.block.side_effects import random_devices
from lowtide.blocks.block.tensor_spec import DEVICE, DTYPE, SHAPE, Spec
from lowtide.blocks.profile.chain_profile import ChainProfile
from lowtide.blocks.profile.unit_costs import OUTSIDE, UnitCosts
from lowtide.graph.build import GraphBuilder
from lowtide.graph.costs import Costs
from lowtide.graph.ir import Graph, OpId, ValueId
from lowtide.pytorch.modules import buffer
from lowtide.pytorch.storages import storage_bytes
from lowtide.schedule.steps import Schedule

_ONCE = "a backward adds to the gradients of its block"


class OpRole(Enum):
    """What an op does at its position."""

    INSIDE = "makes what autograd saves inside the position, for its backward"
    FORWARD = "makes the position's results, and what is saved inside unless an op for that came before"
    BACKWARD = "reads what is saved and the gradient that arrives"
    GRADIENTS = "makes the gradients that leave"
    ARRIVAL = "stands for the gradients that arrive from outside"


class ChainOp(NamedTuple):
    """What an op of the graph does, and at which position."""

    role: OpRole
    position: int


@dataclass(frozen=True)
class ChainGraph:
    """The graph of a chain.

    Attributes:
        graph: The graph.
        costs: Its costs.
        ops: What every op does, by number.
    """

    graph: Graph
    costs: Costs
    ops: tuple[ChainOp, ...]


@dataclass(eq=False)
class _Token:
    """A storage that a position hands on: its bytes, the last state it is part of, and whether the caller gets it."""

    size: int
    until: int = 0
    held: bool = False


def chain_graph(profile: ChainProfile, *, arriving_bytes: int = 0) -> ChainGraph:
    """Return the graph of a profiled chain; `arriving_bytes` of gradients from outside are counted as its own."""
    return _Writer(profile, arriving_bytes).write()


def joined(meanings: Sequence[ChainOp], schedule: Schedule) -> Schedule:
    """Return `schedule` as it will run: both ops of a forward, and both of a backward, come one after the other.

    The op that makes a position's results is preceded by that which makes what is inside; that one alone is left out
    unless the position's backward reads what it made.
    """
    phases: tuple[list[OpId], list[OpId]] = ([], [])
    for phase, given in zip(phases, (schedule.forward, schedule.backward), strict=True):
        for op in given:
            role, position = meanings[op]
            begins = op > 0 and meanings[op - 1] == (OpRole.INSIDE, position)
            if role is OpRole.FORWARD and begins and phase[-1:] != [op - 1]:
                phase.append(op - 1)
            if role is not OpRole.GRADIENTS:
                phase.append(op)
            if role is OpRole.BACKWARD:
                phase.append(op + 1)
    unread = _unread_runs(meanings, phases[0] + phases[1])
    places = range(len(phases[0])), range(len(phases[0]), len(phases[0]) + len(phases[1]))
    return Schedule(
        *(
            tuple(op for place, op in zip(within, phase, strict=True) if place not in unread)
            for within, phase in zip(places, phases, strict=True)
        )
    )


def _unread_runs(meanings: Sequence[ChainOp], ops: Sequence[OpId]) -> set[int]:
    """Return the places of runs that make only what is saved inside a position, which no backward then reads."""
    following: dict[int, OpRole] = {}
    found = set()
    for place in reversed(range(len(ops))):
        role, position = meanings[ops[place]]
        alone = role is OpRole.INSIDE and tuple(ops[place + 1 : place + 2]) != (ops[place] + 1,)
        if alone and following.get(position) is not OpRole.BACKWARD:
            found.add(place)
        elif role in (OpRole.INSIDE, OpRole.BACKWARD):
            following[position] = role
    return found


class _Writer:
    """Writes the ops of a chain one after the other."""

    def __init__(self, profile: ChainProfile, arriving_bytes: int) -> None:
        self._positions, self._costs = profile.positions, profile.costs
        self._arriving_bytes = arriving_bytes
        self._builder = GraphBuilder()
        self._device = profile.state[0][DEVICE]
        self._states, self._results = _follow(profile)
        self._values: dict[_Token, ValueId] = {}
        self._inside: dict[int, ValueId] = {}
        self._ops: list[ChainOp] = []
        self._outputs: list[ValueId] = []
        for number, token in enumerate(dict.fromkeys(self._states[0])):
            self._values[token] = self._builder.add_input(f"input {number}", token.size)

    def write(self) -> ChainGraph:
        """Return the whole graph."""
        for k in range(len(self._positions)):
            self._forward(k)
        self._builder.begin_backward()
        begun: set[int] = set()
        gradient = self._arrival()
        for k in reversed(range(len(self._positions))):
            if self._costs[k].grad_results:
                gradient = self._backward(k, gradient, begun)
        graph = self._builder.build(outputs=dict.fromkeys(self._outputs))
        costs = self._builder.costs(f"measured on {devices.describe(self._device)}, block by block")
        return ChainGraph(graph, costs, tuple(self._ops))

    def _arrival(self) -> ValueId:
        """Return the gradient that comes from outside; one that is counted arrives by an op."""
        name = "gradient of the output"
        if not self._arriving_bytes:
            return self._builder.add_input(name, kind="tangent")
        (gradient,) = self._builder.add_op(
            "tangents",
            [],
            [(name, self._arriving_bytes)],
            target="lowtide.tangents",
            kind="tangent",
            pinned="gradients arrive once",
            seconds=0.0,
        )
        self._ops.append(ChainOp(OpRole.ARRIVAL, len(self._positions) - 1))
        return gradient

    def _forward(self, k: int) -> None:
        position, costs = self._positions[k], self._costs[k]
        groups: dict[tuple[int, bool], list[_Token]] = {}
        for token in dict.fromkeys(self._results[k]):
            if token.size and token not in self._values:
                groups.setdefault((token.until, token.held), []).append(token)
        names = [f"{position.unit.name} output {number}" for number in range(len(groups))]
        outputs = [
            (name, sum(token.size for token in group)) for name, group in zip(names, groups.values(), strict=True)
        ]
        inputs, seconds, replay = self._ids(self._states[k]), costs.seconds, self._replay_bytes(position, costs)
        random = costs.effects.random
        if costs.stop_seconds is not None:
            inputs += self._begin(k, inputs, costs.stop_seconds, replay)
            seconds, replay, random = seconds - costs.stop_seconds, 0, False
        if costs.effects.stored_bytes:
            outputs.append((f"{position.unit.name} stored", costs.effects.stored_bytes))
        if costs.grad_results and costs.stop_seconds is None:
            outputs.append((f"{position.unit.name} inside", costs.inside_bytes))
        made = self._builder.add_op(
            f"{position.unit.name} forward",
            inputs,
            outputs,
            target=_target(position),
            module=position.unit.name,
            random=random,
            replay_bytes=replay if outputs else 0,
            seconds=seconds,
            workspace_bytes=costs.workspace_bytes,
        )
        for value, ((_, held), group) in zip(made, groups.items(), strict=False):
            self._values.update(dict.fromkeys(group, value))
            if held:
                self._outputs.append(value)
        if costs.effects.stored_bytes:
            self._outputs.append(made[len(groups)])
        if costs.grad_results and costs.stop_seconds is None:
            self._inside[k] = made[-1]
        self._ops.append(ChainOp(OpRole.FORWARD, k))

    def _begin(self, k: int, inputs: list[ValueId], seconds: float, replay_bytes: int) -> list[ValueId]:
        """Add the op that makes what is inside, and return what the op after it reads."""
        name, costs = self._positions[k].unit.name, self._costs[k]
        # The second value keeps planners from cutting the chain here; behind the first position the state does.
        outputs = [(f"{name} inside", costs.inside_bytes), (f"{name} begun", 0)][: 1 if k else 2]
        made = self._builder.add_op(
            f"{name} inside",
            inputs,
            outputs,
            target=_target(self._positions[k]),
            module=name,
            random=costs.effects.random,
            replay_bytes=replay_bytes,
            seconds=seconds,
            workspace_bytes=costs.stop_workspace_bytes,
        )
        self._inside[k] = made[0]
        self._ops.append(ChainOp(OpRole.INSIDE, k))
        return list(made)

    def _backward(self, k: int, gradient: ValueId, begun: set[int]) -> ValueId:
        """Add the ops of one backward and return the gradient that it hands on."""
        position, costs = self._positions[k], self._costs[k]
        name = position.unit.name
        held = [self._states[k][index] for index in costs.saved_state]
        held += [self._results[k][index] for index in costs.saved_results]
        outputs, first = self._gradients(k, begun)
        workspace = costs.backward_workspace_bytes if first else costs.adding_workspace_bytes
        (ready,) = self._builder.add_op(
            f"{name} backward",
            [self._inside[k], *self._ids(held), gradient],
            [(f"{name} backward done", 0)],
            target=f"{_target(position)} backward",
            module=name,
            kind="gradient",
            pinned=_ONCE,
            seconds=costs.backward_seconds,
            workspace_bytes=workspace,
        )
        self._ops.append(ChainOp(OpRole.BACKWARD, k))
        made = self._builder.add_op(
            f"{name} gradients",
            [ready],
            [(f"gradient of the input of {name}", costs.gradient_bytes), *outputs],
            target="gradients",
            module=name,
            kind="gradient",
            pinned=_ONCE,
            seconds=0.0,
        )
        self._ops.append(ChainOp(OpRole.GRADIENTS, k))
        self._outputs += made[1:]
        if not any(costs.grad_results for costs in self._costs[:k]):
            self._outputs.append(made[0])
        return made[0]

    def _gradients(self, k: int, begun: set[int]) -> tuple[list[tuple[str, int]], bool]:
        """Return the gradients that stay, and whether some are made here that other positions will add to."""
        position, costs = self._positions[k], self._costs[k]
        own, first = 0, False
        # Parameters are known by identity, leaves by their number, below zero so that both can be in one set.
        rows: tuple[tuple[Sequence[int], set[int], Sequence[int]], ...] = (
            ([id(each) for each in position.parameters], set(position.shared_parameters), costs.parameter_bytes),
            ([-1 - leaf for leaf in position.leaves], set(position.shared_leaves), costs.leaf_bytes),
        )
        for marks, shared, sizes in rows:
            for index, (mark, size) in enumerate(zip(marks, sizes, strict=True)):
                if index in shared and (mark in begun or not size):
                    continue
                if index in shared:
                    begun.add(mark)
                    first = True
                own += size
        return ([(f"gradients of {position.unit.name}", own)] if own else []), first

    def _ids(self, tokens: list[_Token]) -> list[ValueId]:
        return list(dict.fromkeys(self._values[token] for token in tokens if token in self._values))

    def _replay_bytes(self, position: Position, costs: UnitCosts) -> int:
        places = random_devices(position.unit.contents.parameters())
        random = sum(devices.rng_state_bytes(place) for place in places) if costs.effects.random else 0
        stash = sum(storage_bytes(buffer(module, name)) for module, name in position.changing)
        return random + stash


def _target(position: Position) -> str:
    return position.unit.labels[0].partition("(")[2].removesuffix(")")


def _follow(profile: ChainProfile) -> tuple[list[list[_Token]], list[list[_Token]]]:
    """Return the storages of the state before every position and after the last, and of every position's results."""
    states = [[_Token(_bytes(spec)) for spec in profile.state]]
    results: list[list[_Token]] = []
    for k, (position, costs) in enumerate(zip(profile.positions, profile.costs, strict=True)):
        row: list[_Token] = []
        for source, alias, size in zip(costs.sources, costs.aliases, costs.result_bytes, strict=True):
            if source >= 0:
                row.append(states[k][source])
            else:
                row.append(row[alias] if alias < len(row) else _Token(0 if source == OUTSIDE else size, k + 1))
        emitted = position.unit.num_emitted
        results.append(row)
        states.append(row[: len(row) - emitted])
        for token in states[-1]:
            token.until = k + 1
        stored = [row[index] for index in costs.effects.stored_results]
        stored += [states[k][index] for index in costs.effects.stored_state]
        for token in (*row[len(row) - emitted :], *stored):
            token.held = True
    for token in states[-1]:
        token.held = True
    return states, results


def _bytes(spec: Spec) -> int:
    return math.prod(spec[SHAPE]) * int(spec[DTYPE].itemsize)
