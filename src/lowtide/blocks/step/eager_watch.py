"""What the backward of eager code takes, measured node by node in one step.

The level is followed from the beginning of a gap: saved tensors die, gradients come and go with their storages, and
what a node takes while it runs, temporaries included, is recorded inside of it. The engine gives every node a profiler
of its own, so each is recorded by itself, and what happens between nodes is told by storages: sums of gradients that
several nodes have made, and copies that leaves take of them.

Hooks do it, and they are gone when the step is over. Later steps are predicted from it and pay nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lowtide.blocks.step.eager_code import is_block_node
from lowtide.blocks.step.ledger import Ledger
from lowtide.blocks.step.recorder import Recorder
from lowtide.pytorch.autograd_graph import (
    around_backward,
    gradient_bytes,
    is_leaf_node,
    leaf_gradient,
    next_edges,
    sequence_number,
)

Edge = tuple[int, int]


class EagerWatch:
    """Follows the level in the backward of eager nodes.

    Args:
        died: Returns the bytes of what forward has made that have died since the last time.
    """

    def __init__(self, died: Callable[[], int]) -> None:
        self._died = died
        self._recorder = Recorder()
        self._gradients = Ledger(())
        self._removals: list[Callable[[], None]] = []
        # Relative to the beginning of the gap; the dead are part of the level, too.
        self._level = self._peak = self._dead = self._before = 0
        self._is_measured = True
        # What nodes have left beside gradients, such as what a checkpoint has made again for other nodes.
        self._left = 0
        # The level when a node has run, by the node that its gradients go to: sums are made right after it.
        self._levels: dict[int, int] = {}
        self._given: set[Edge] = set()
        self._leaves: list[Any] = []

    def follow(self, node: Any) -> None:
        """Measure `node` when its backward runs."""
        number = sequence_number(node)
        edges: list[tuple[Edge, int] | None] = []
        leaves = []
        for target, position in next_edges(node):
            if target is not None and is_leaf_node(target):
                leaves.append(target)
            goes_on = target is not None and not is_leaf_node(target)
            size = gradient_bytes(target) if goes_on and is_block_node(target) else 0
            edges.append(((sequence_number(target), position), size) if goes_on else None)
        self._removals.append(
            around_backward(
                node,
                lambda arriving: self._enter(number, arriving),
                lambda made: self._leave(made, edges, leaves),
            )
        )

    def begin_gap(self, level: int = 0, returned: Iterable[Any] = ()) -> None:
        """Begin a gap at `level`, after a block that has returned these gradients, which are counted."""
        # What has died of forward inside of the block is part of the gap.
        self._gradients.remove_dead()
        self._gradients.add(returned)
        self._level, self._peak, self._dead, self._left = level, 0, 0, 0
        self._is_measured = True

    def end_gap(self) -> tuple[int | None, int]:
        """Return the peak of the gap that ends, or None if it was not measured, and what has died of forward in it."""
        self._take_leaf_gradients()
        self._update()
        return (self._peak if self._is_measured else None), self._dead

    def stop(self) -> None:
        """Take all hooks away."""
        self._recorder.discard()
        for remove in self._removals:
            remove()
        self._removals.clear()
        self._leaves.clear()

    def _enter(self, number: int, arriving: Sequence[Any]) -> None:
        self._take_leaf_gradients()
        self._update()
        # What no node has returned is a sum, made while its parts were there.
        sums = self._gradients.add(arriving)
        self._level += sums
        self._raise_to(max(self._levels.pop(number, 0) + sums, self._level))
        self._before = self._level
        self._recorder.start()
        self._is_measured &= self._recorder.is_running

    def _leave(self, made: Sequence[Any], edges: Sequence[tuple[Edge, int] | None], leaves: Sequence[Any]) -> None:
        if not self._recorder.is_running:
            return
        self._recorder.stop()
        inside = self._recorder.stretches[0]
        self._raise_to(self._before + inside.peak)
        self._update()
        self._level += self._gradients.add(made)
        unexplained = inside.end - (self._level - self._before)
        left = max(0, self._left + unexplained)
        self._level += left - self._left
        self._left = left
        self._raise_to(self._level)
        self._leaves += leaves
        for edge in edges:
            if edge is None:
                continue
            (number, position), of_block = edge
            if (number, position) in self._given:
                # A block does not show the sum that it is given.
                self._raise_to(self._level + of_block)
            self._given.add((number, position))
            self._levels[number] = max(self._level, self._levels.get(number, 0))

    def _take_leaf_gradients(self) -> None:
        """Count the gradients of leaves that are copies of what nodes have returned, made while that was there."""
        gradients = [gradient for leaf in self._leaves if (gradient := leaf_gradient(leaf)) is not None]
        self._leaves.clear()
        self._level += self._gradients.add(gradients)
        self._raise_to(self._level)

    def _update(self) -> None:
        """Let the level fall by what has died."""
        died = self._died()
        self._dead += died
        self._level -= died + self._gradients.remove_dead()

    def _raise_to(self, level: int) -> None:
        self._peak = max(self._peak, level)
