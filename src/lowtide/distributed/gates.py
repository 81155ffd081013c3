"""Gradients that leave a planned graph one group after the other, while its backward still runs.

Autograd gets the gradients of a planned graph when its one node returns. So every group of parameters passes through a
gate on its way into the graph: a node of its own that changes nothing. In backward the graph's node returns nothing
and only gets ready; then the gates run. Each runs the graph's backward as far as its gradients need, and hands them
on. Autograd runs what is behind a gate (accumulation, the hooks of buckets) before the next gate, because a token links
the gates in their order.

    parameters ── gate 2 ──> gate 1 ──> gate 0 ──> graph          forward
    gradients <── gate 2 <── gate 1 <── gate 0 <── graph          backward: 0 first

What autograd promises stays: a graph that is retained runs again, hooks see their gradients, and a pass that asks for
some gradients alone runs no further than these need.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from lowtide.lower.chunks import ChunkedBackward, Gradients
from lowtide.lower.execute import LoweredVariant
from lowtide.pytorch.autograd_graph import after_backward
from lowtide.pytorch.compiler.joint_graph import Run, RunnableStep
from lowtide.pytorch.running_autograd import node_of_running_graph


class Outlet:
    """The gradients of one call of a planned graph, from its backward to the gates.

    Args:
        positions: The inputs of the graph that have gates.
    """

    def __init__(self, positions: frozenset[int]) -> None:
        self._positions = positions
        self._source: Iterator[Gradients] = iter(())
        self._held: Gradients = {}

    def begin(self, backward: ChunkedBackward, args: list[Any]) -> list[None]:
        """Get ready to run `backward` as its gradients are asked for; return what its node returns."""
        self._source, self._held = backward.start(args), {}
        # A pass that does not ask for all of them leaves the rest behind.
        after_backward(self.discard)
        return [None] * backward.num_gradients

    def hold(self, gradients: Sequence[Any]) -> list[Any]:
        """Keep gradients that are there for their gates; return what the graph's node returns."""
        self._held = {position: gradients[position] for position in self._positions}
        after_backward(self.discard)
        return [None if position in self._positions else each for position, each in enumerate(gradients)]

    def take(self, positions: Sequence[int]) -> list[Any]:
        """Return the gradients at these positions, and run backward as far as they need."""
        while any(position not in self._held for position in positions):
            made = next(self._source, None)
            if made is None:
                # Nothing of the graph depends on what is left.
                return [self._held.pop(position, None) for position in positions]
            self._held.update(made)
            del made
        return [self._held.pop(position) for position in positions]

    def discard(self) -> None:
        """Let go of what nobody has asked for."""
        self._source, self._held = iter(()), {}


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outlet: Outlet, positions: list[int], token: Tensor, *tensors: Tensor) -> Any:
        ctx.outlet, ctx.positions = outlet, positions
        ctx.set_materialize_grads(False)
        return (torch.empty(0), *(each.detach() for each in tensors))

    @staticmethod
    def backward(ctx: Any, token: Any, *gradients: Any) -> Any:
        return (None, None, None, *ctx.outlet.take(ctx.positions))


@dataclass(frozen=True)
class Gates:
    """The gates of one graph.

    Attributes:
        order: Positions of inputs, in the order in which plain training has their gradients.
        groups: The same, in groups that share a gate; none if the gradients need not come one after the other.
        one_by_one: Returns True while their exact order matters, so that each needs a gate of its own.
    """

    order: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    one_by_one: Callable[[], bool]

    def call(self, graph: Callable[..., Any]) -> Callable[..., Any]:
        """Return `graph`, with gates before it."""
        every = frozenset(self.order)
        single = tuple((position,) for position in self.order)

        def run(*args: Any) -> Any:
            groups = single if self.one_by_one() else self.groups
            if not groups or not torch.is_grad_enabled():
                return graph(*args)
            outlet = Outlet(every)
            with _entering(outlet):
                return graph(*_behind_gates(args, groups, outlet))

        return run


def _behind_gates(args: Sequence[Any], groups: Sequence[Sequence[int]], outlet: Outlet) -> list[Any]:
    passed = list(args)
    token = torch.empty(0)
    for group in reversed(groups):
        token, *aliases = _Gate.apply(outlet, list(group), token, *(args[position] for position in group))  # type: ignore[no-untyped-call]
        for position, alias in zip(group, aliases, strict=True):
            passed[position] = alias
    return passed


class _Here(threading.local):
    """The outlet of the graph that this thread is about to run."""

    outlet: Outlet | None = None


_here = _Here()


@contextmanager
def _entering(outlet: Outlet) -> Iterator[None]:
    before, _here.outlet = _here.outlet, outlet
    try:
        yield
    finally:
        _here.outlet = before


@dataclass(frozen=True)
class GatedStep:
    """A step whose gradients leave through gates, in calls that have some.

    Attributes:
        step: The step.
    """

    step: RunnableStep

    @property
    def forward_graph(self) -> fx.GraphModule:
        """The graph of the forward pass."""
        return self.step.forward_graph

    @property
    def backward_graph(self) -> fx.GraphModule:
        """The graph of the backward pass."""
        return self.step.backward_graph

    def forward_run(self, graph: fx.GraphModule) -> Run:
        """Return what runs the forward graph, and lets its node know its outlet."""
        inner = self.step.forward_run(graph)

        def run(args: list[Any]) -> Any:
            outlet, _here.outlet = _here.outlet, None
            node = node_of_running_graph()
            if node is not None:
                node.lowtide_outlet = outlet
            return inner(args)

        return run

    def backward_run(self, graph: fx.GraphModule) -> Run:
        """Return what runs the backward graph, or lets the gates run it."""
        if isinstance(self.step, LoweredVariant) and self.step.program.deliveries:
            choose = self.step.choice(graph)
            return lambda args: _delivering(choose(args), args)
        inner = self.step.backward_run(graph)

        def run(args: list[Any]) -> Any:
            outlet = _outlet()
            return inner(args) if outlet is None else outlet.hold(inner(args))

        return run


def _delivering(backward: ChunkedBackward, args: list[Any]) -> Any:
    outlet = _outlet()
    return backward.whole(args) if outlet is None else outlet.begin(backward, args)


def _outlet() -> Outlet | None:
    """Return the outlet of the graph whose backward is running, if the call had gates."""
    outlet: Outlet | None = getattr(node_of_running_graph(), "lowtide_outlet", None)
    return outlet
