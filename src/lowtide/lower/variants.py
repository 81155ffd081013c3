"""Several schedules of one captured graph, one of which is chosen at each call, without capturing again.

AOTAutograd fixes how many tensors a forward graph hands to its backward graph when it compiles them. So every variant
hands over the same number: what it saves, then empty tensors up to the largest number that any variant needs, then a
tag without elements whose shape tells backward which variant ran and in which place of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import fx

from lowtide.capture.arrived_gradients import Arrived
from lowtide.capture.program import Program
from lowtide.graph.ir import ValueId
from lowtide.lower.emit_graphs import Handover, Lowered, repeated_ops
from lowtide.lower.execute import LoweredVariant
from lowtide.pytorch.compiler.joint_graph import Run
from lowtide.pytorch.fake_tensors import FakeTensor, fake_mode_of
from lowtide.schedule.steps import Schedule


@dataclass(frozen=True)
class Turn:
    """One run of a block: which variant, and its place in the step."""

    variant: int
    place: int


class Director(Protocol):
    """Chooses variants, and is told of every run."""

    def begin_forward(self, args: Sequence[Any]) -> Turn:
        """Return what to run for these arguments of a forward."""

    def end_forward(self, turn: Turn, outputs: Sequence[Any]) -> None:
        """Note that a forward has returned."""

    def begin_backward(self, turn: Turn, arrived: Arrived) -> None:
        """Note that the backward of a turn begins."""

    def end_backward(self, turn: Turn, gradients: Sequence[Any]) -> None:
        """Note that a backward has returned."""

    @property
    def keeps_values(self) -> bool:
        """False if backward will not run, so that nothing needs to be kept for it but inputs and outputs."""


def shared_handover(handovers: Sequence[Handover], borders: frozenset[int]) -> Handover:
    """Return what all variants hand over, given what each of them needs.

    Inputs and outputs of the graph live as long as anybody holds them. If one variant saves them, all do: what is alive
    outside of the graph then does not depend on the variant.
    """
    saved = dict.fromkeys(value for each in handovers for value in each.saved if value in borders)
    handles = dict.fromkeys(position for each in handovers for position in each.handles)
    return Handover(tuple(saved), tuple(handles))


@dataclass(frozen=True)
class LazyVariant:
    """A variant that is lowered when it first runs: most of a menu is never chosen.

    Attributes:
        num_slots: How many tensors its forward hands to its backward, without handles.
        make: Lowers it.
    """

    num_slots: int
    make: Callable[[], LoweredVariant]

    @staticmethod
    def of(
        program: Program, schedule: Schedule, own: Handover, shared: Handover, make: Callable[[], LoweredVariant]
    ) -> LazyVariant:
        """Return the variant that runs `schedule`, which needs `own` handed over, and all variants `shared`."""
        repeated, ops = repeated_ops(schedule), program.graph.ops
        drawn = [op for op in schedule.forward if ops[op].random and op in repeated and program.calls[op] is not None]
        return LazyVariant(len({*own.saved, *shared.saved}) + len(set(drawn)), make)

    @cached_property
    def made(self) -> LoweredVariant:
        """The variant, lowered."""
        made = self.make()
        assert _num_slots(made.lowered) == self.num_slots, "a variant hands over what its schedule says"
        return made

    @property
    def lowered(self) -> Lowered:
        """Its graphs."""
        return self.made.lowered

    @cached_property
    def forward_run(self) -> Run:
        """What runs its forward."""
        return self.made.forward_run(self.lowered.forward)

    @cached_property
    def backward_run(self) -> Run:
        """What runs its backward."""
        return self.made.backward_run(self.lowered.backward)


@dataclass(frozen=True)
class VariantSwitch:
    """A captured graph with several lowered variants, in the calling convention of one.

    Attributes:
        variants: The variants; all have the same outputs and the same handles.
        num_outputs: How many of a forward's results are the graph's outputs.
        borders: Values that are inputs or outputs of the graph.
        director: Chooses.
        room: How many tensors a variant may hand over that is added later.
    """

    variants: Sequence[LazyVariant]
    num_outputs: int
    borders: frozenset[ValueId]
    director: Director
    room: int = 0

    @property
    def forward_graph(self) -> fx.GraphModule:
        """A forward graph with as many results as every variant will have."""
        lowered = self.variants[0].lowered
        graph = _copy(lowered.forward)
        output = next(reversed(graph.graph.find_nodes(op="output")))
        results = list(output.args[0])
        like = _any_fake(lowered.forward)
        handles = lowered.frame.num_others
        with graph.graph.inserting_before(output):
            padding = [_slot(graph.graph, like) for _ in range(self._slots + 1 - _num_slots(lowered))]
        split = len(results) - handles
        output.args = ((*results[:split], *padding, *results[split:]),)
        output.meta["desc"] = [*output.meta["desc"], *[None] * len(padding)]
        graph.recompile()
        return graph

    @property
    def backward_graph(self) -> fx.GraphModule:
        """A backward graph that takes as many arguments."""
        lowered = self.variants[0].lowered
        graph = _copy(lowered.backward)
        placeholders = graph.graph.find_nodes(op="placeholder")
        like = _any_fake(lowered.forward)
        behind = placeholders[_num_slots(lowered)] if len(placeholders) > _num_slots(lowered) else _first_call(graph)
        with graph.graph.inserting_before(behind):
            for number in range(self._slots + 1 - _num_slots(lowered)):
                graph.graph.placeholder(f"slot_{number}").meta["val"] = like
        graph.recompile()
        return graph

    def forward_run(self, graph: fx.GraphModule) -> Run:
        """Return what runs a forward; the graph is only the shape of it."""
        del graph

        def run(args: list[Any]) -> Any:
            turn = self.director.begin_forward(args)
            results = self.variants[turn.variant].forward_run(args)
            self.director.end_forward(turn, results[: self.num_outputs])
            split = len(results) - self.variants[turn.variant].lowered.frame.num_others
            tag = torch.empty((0, turn.variant + 1, turn.place + 1))
            if not self.director.keeps_values:
                results = [
                    *results[: self.num_outputs],
                    *self._without_inner(turn.variant, results[self.num_outputs :], tag),
                ]
            padding = [tag] * (self._slots - (split - self.num_outputs))
            return [*results[:split], *padding, tag, *results[split:]]

        return run

    def backward_run(self, graph: fx.GraphModule) -> Run:
        """Return what runs the backward of the variant whose forward ran."""
        del graph

        def run(args: list[Any]) -> Any:
            tag = args[self._slots]
            turn = Turn(tag.shape[1] - 1, tag.shape[2] - 1)
            variant = self.variants[turn.variant]
            traced = variant.made.gradients
            self.director.begin_backward(turn, traced.read(args[len(args) - len(traced.strides) :]))
            del args[variant.num_slots : self._slots + 1]
            gradients = variant.backward_run(args)
            self.director.end_backward(turn, gradients)
            return gradients

        return run

    def _without_inner(self, variant: int, kept: Sequence[Any], tag: torch.Tensor) -> list[Any]:
        """Return what a forward hands over, without values that nobody outside of the graph can hold."""
        saved = self.variants[variant].lowered.frame.saved
        inner = [number for number, value in enumerate(saved) if value not in self.borders]
        return [tag if number in inner else each for number, each in enumerate(kept)]

    @cached_property
    def _slots(self) -> int:
        return max(self.room, *(variant.num_slots for variant in self.variants))


def _num_slots(lowered: Lowered) -> int:
    return len(lowered.frame.saved) + len(lowered.frame.states)


def _copy(module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    output = graph.output(graph.graph_copy(module.graph, {}))
    output.meta = dict(next(reversed(module.graph.find_nodes(op="output"))).meta)
    return fx.GraphModule(module, graph)


def _any_fake(module: fx.GraphModule) -> torch.Tensor:
    """Return an empty fake tensor of the mode in which the graph was traced."""
    values = (node.meta.get("val") for node in module.graph.nodes)
    mode = next(fake_mode_of(value) for value in values if isinstance(value, FakeTensor))
    with mode:
        return torch.empty(0)


def _slot(graph: fx.Graph, like: torch.Tensor) -> fx.Node:
    node = graph.call_function(torch.empty, (0,))
    node.meta["val"] = like
    return node


def _first_call(module: fx.GraphModule) -> fx.Node:
    nodes: list[fx.Node] = list(module.graph.nodes)
    return next(node for node in nodes if node.op != "placeholder")
