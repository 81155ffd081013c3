"""A captured chain as a graph with costs, for the planners and the simulator.

Every position is one forward op, which makes the state after it and what autograd holds inside, and two backward ops:
the first reads what is held and the gradient that arrives, the second makes the gradients that leave. They are two
because what is held is freed while the gradients are made, and their sum would be too much.

Where a run for backward only is to stop early, the forward op is two as well: one makes what is held inside, the other
the state after it. A backward that follows needs the first one only. The second never runs alone; see `joined`.

A run that keeps nothing is priced as one that does: both then have the same peak as the backward that follows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lowtide import device as devices
from lowtide.blocks.block.position import Position
from lowtide.blocks.block.side_effects import generators
from lowtide.blocks.block.tensor_spec import DEVICE, DTYPE, SHAPE, Spec, storage_bytes
from lowtide.blocks.profile.captured_chain import Captured
from lowtide.blocks.profile.unit_costs import OUTSIDE, Figures
from lowtide.graph.build import GraphBuilder
from lowtide.graph.costs import Costs
from lowtide.graph.ir import Graph, OpId, ValueId
from lowtide.schedule.steps import Schedule

FORWARD, INSIDE, BACKWARD, GRADIENTS = "forward", "inside", "backward", "gradients"
_ONCE = "a backward adds to the gradients of its block"


@dataclass(frozen=True)
class ChainGraph:
    """The graph of a chain.

    Attributes:
        graph: The graph.
        costs: Its costs.
        steps: For every op what it does and at which position.
    """

    graph: Graph
    costs: Costs
    steps: tuple[tuple[str, int], ...]


@dataclass(eq=False)
class _Token:
    """A storage that a position hands on: its bytes, the last state it is part of, and whether the caller gets it."""

    size: int
    until: int = 0
    held: bool = False


def chain_graph(captured: Captured) -> ChainGraph:
    """Return the graph of a captured chain."""
    return _Writer(captured).write()


def joined(steps: Sequence[tuple[str, int]], schedule: Schedule) -> Schedule:
    """Return `schedule` as it will run: both ops of a forward, and both of a backward, come one after the other.

    The op that makes a position's results is preceded by that which makes what is inside; that one alone is left out
    unless the position's backward reads what it made.
    """
    phases: tuple[list[OpId], list[OpId]] = ([], [])
    for phase, given in zip(phases, (schedule.forward, schedule.backward), strict=True):
        for op in given:
            kind, position = steps[op]
            if kind == FORWARD and op and steps[op - 1] == (INSIDE, position) and phase[-1:] != [op - 1]:
                phase.append(op - 1)
            if kind != GRADIENTS:
                phase.append(op)
            if kind == BACKWARD:
                phase.append(op + 1)
    idle = _idle(steps, phases[0] + phases[1])
    places = range(len(phases[0])), range(len(phases[0]), len(phases[0]) + len(phases[1]))
    return Schedule(
        *(
            tuple(op for place, op in zip(within, phase, strict=True) if place not in idle)
            for within, phase in zip(places, phases, strict=True)
        )
    )


def _idle(steps: Sequence[tuple[str, int]], ops: Sequence[OpId]) -> set[int]:
    """Return the places of lone runs for what is inside a position that its backward does not read."""
    following: dict[int, str] = {}
    found = set()
    for place in reversed(range(len(ops))):
        kind, position = steps[ops[place]]
        alone = kind == INSIDE and tuple(ops[place + 1 : place + 2]) != (ops[place] + 1,)
        if alone and following.get(position) != BACKWARD:
            found.add(place)
        elif kind in (INSIDE, BACKWARD):
            following[position] = kind
    return found


class _Writer:
    """Writes the ops of a chain one after the other."""

    def __init__(self, captured: Captured) -> None:
        self._positions, self._figures = captured.positions, captured.figures
        self._builder = GraphBuilder()
        self._device = captured.state[0][DEVICE]
        self._states, self._results = _follow(captured)
        self._values: dict[_Token, ValueId] = {}
        self._inside: dict[int, ValueId] = {}
        self._steps: dict[OpId, tuple[str, int]] = {}
        self._outputs: list[ValueId] = []
        for number, token in enumerate(dict.fromkeys(self._states[0])):
            self._values[token] = self._builder.add_input(f"input {number}", token.size)

    def write(self) -> ChainGraph:
        """Return the whole graph."""
        for k in range(len(self._positions)):
            self._forward(k)
        self._builder.begin_backward()
        begun: set[int] = set()
        gradient = self._builder.add_input("gradient of the output", kind="tangent")
        for k in reversed(range(len(self._positions))):
            if self._figures[k].gives:
                gradient = self._backward(k, gradient, begun)
        graph = self._builder.build(outputs=dict.fromkeys(self._outputs))
        costs = self._builder.costs(f"measured on {devices.describe(self._device)}, block by block")
        return ChainGraph(graph, costs, tuple(self._steps[op] for op in range(len(graph.ops))))

    def _forward(self, k: int) -> None:
        position, figures = self._positions[k], self._figures[k]
        groups: dict[tuple[int, bool], list[_Token]] = {}
        for token in dict.fromkeys(self._results[k]):
            if token.size and token not in self._values:
                groups.setdefault((token.until, token.held), []).append(token)
        names = [f"{position.unit.name} output {number}" for number in range(len(groups))]
        outputs = [
            (name, sum(token.size for token in group)) for name, group in zip(names, groups.values(), strict=True)
        ]
        inputs, seconds, replay = self._ids(self._states[k]), figures.seconds, self._replay_bytes(position, figures)
        random = figures.left.random
        if figures.stop_seconds is not None:
            inputs += self._begin(k, inputs, figures.stop_seconds, replay)
            seconds, replay, random = seconds - figures.stop_seconds, 0, False
        if figures.left.stored_bytes:
            outputs.append((f"{position.unit.name} stored", figures.left.stored_bytes))
        if figures.gives and figures.stop_seconds is None:
            outputs.append((f"{position.unit.name} inside", figures.inside_bytes))
        made = self._builder.add_op(
            f"{position.unit.name} forward",
            inputs,
            outputs,
            target=_target(position),
            module=position.unit.name,
            random=random,
            replay_bytes=replay if outputs else 0,
            seconds=seconds,
            workspace_bytes=figures.workspace_bytes,
        )
        for value, ((_, held), group) in zip(made, groups.items(), strict=False):
            self._values.update(dict.fromkeys(group, value))
            if held:
                self._outputs.append(value)
        if figures.left.stored_bytes:
            self._outputs.append(made[len(groups)])
        if figures.gives and figures.stop_seconds is None:
            self._inside[k] = made[-1]
        self._steps[len(self._steps)] = (FORWARD, k)

    def _begin(self, k: int, inputs: list[ValueId], seconds: float, replay_bytes: int) -> list[ValueId]:
        """Add the op that makes what is inside, and return what the op after it reads."""
        name, figures = self._positions[k].unit.name, self._figures[k]
        # The second value keeps planners from cutting the chain here; behind the first position the state does.
        outputs = [(f"{name} inside", figures.inside_bytes), (f"{name} begun", 0)][: 1 if k else 2]
        made = self._builder.add_op(
            f"{name} inside",
            inputs,
            outputs,
            target=_target(self._positions[k]),
            module=name,
            random=figures.left.random,
            replay_bytes=replay_bytes,
            seconds=seconds,
            workspace_bytes=figures.stop_workspace_bytes,
        )
        self._inside[k] = made[0]
        self._steps[len(self._steps)] = (INSIDE, k)
        return list(made)

    def _backward(self, k: int, gradient: ValueId, begun: set[int]) -> ValueId:
        """Add the ops of one backward and return the gradient that it hands on."""
        position, figures = self._positions[k], self._figures[k]
        name = position.unit.name
        held = [self._states[k][index] for index in figures.saved_state]
        held += [self._results[k][index] for index in figures.saved_results]
        outputs, first = self._gradients(k, begun)
        workspace = figures.backward_workspace_bytes if first else figures.adding_workspace_bytes
        (ready,) = self._builder.add_op(
            f"{name} backward",
            [self._inside[k], *self._ids(held), gradient],
            [(f"{name} backward done", 0)],
            target=f"{_target(position)} backward",
            module=name,
            kind="gradient",
            pinned=_ONCE,
            seconds=figures.backward_seconds,
            workspace_bytes=workspace,
        )
        self._steps[len(self._steps)] = (BACKWARD, k)
        made = self._builder.add_op(
            f"{name} gradients",
            [ready],
            [(f"gradient of the input of {name}", figures.gradient_bytes), *outputs],
            target="gradients",
            module=name,
            kind="gradient",
            pinned=_ONCE,
            seconds=0.0,
        )
        self._steps[len(self._steps)] = (GRADIENTS, k)
        self._outputs += made[1:]
        if not any(figures.gives for figures in self._figures[:k]):
            self._outputs.append(made[0])
        return made[0]

    def _gradients(self, k: int, begun: set[int]) -> tuple[list[tuple[str, int]], bool]:
        """Return the gradients that stay, and whether some are made here that other positions will add to."""
        position, figures = self._positions[k], self._figures[k]
        own, first = 0, False
        rows = (
            (position.parameters, set(position.shared_parameters), figures.parameter_bytes),
            (position.leaves, set(position.shared_leaves), figures.leaf_bytes),
        )
        for row, (things, shared, sizes) in enumerate(rows):
            for index, (thing, size) in enumerate(zip(things, sizes, strict=True)):
                mark = -1 - thing if row else id(thing)
                if index in shared and (mark in begun or not size):
                    continue
                if index in shared:
                    begun.add(mark)
                    first = True
                own += size
        return ([(f"gradients of {position.unit.name}", own)] if own else []), first

    def _ids(self, tokens: list[_Token]) -> list[ValueId]:
        return list(dict.fromkeys(self._values[token] for token in tokens if token in self._values))

    def _replay_bytes(self, position: Position, figures: Figures) -> int:
        places = generators(position.unit.contents.parameters())
        random = sum(devices.rng_state_bytes(place) for place in places) if figures.left.random else 0
        stash = sum(storage_bytes(module._buffers[name]) for module, name in position.changing)
        return random + stash


def _target(position: Position) -> str:
    return position.unit.labels[0].partition("(")[2].removesuffix(")")


def _follow(captured: Captured) -> tuple[list[list[_Token]], list[list[_Token]]]:
    """Return the storages of the state before every position and after the last, and of every position's results."""
    states = [[_Token(_bytes(spec)) for spec in captured.state]]
    results: list[list[_Token]] = []
    for k, (position, figures) in enumerate(zip(captured.positions, captured.figures, strict=True)):
        row: list[_Token] = []
        for source, alias, size in zip(figures.sources, figures.aliases, figures.result_bytes, strict=True):
            if source >= 0:
                row.append(states[k][source])
            else:
                row.append(row[alias] if alias < len(row) else _Token(0 if source == OUTSIDE else size, k + 1))
        emitted = position.unit.emits * len(position.unit.blocks)
        results.append(row)
        states.append(row[: len(row) - emitted])
        for token in states[-1]:
            token.until = k + 1
        stored = [row[index] for index in figures.left.stored_results]
        stored += [states[k][index] for index in figures.left.stored_state]
        for token in (*row[len(row) - emitted :], *stored):
            token.held = True
    for token in states[-1]:
        token.held = True
    return states, results


def _bytes(spec: Spec) -> int:
    return math.prod(spec[SHAPE]) * spec[DTYPE].itemsize
