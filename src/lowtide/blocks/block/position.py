"""A position of the chain: the blocks that run there as one, which tensors need gradients, and how it is run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from lowtide.blocks import refusals as refused
from lowtide.blocks.block.block_graph import (
    BlockGraph,
    Gradients,
    begin,
    differentiate,
    end,
    state_not_saved,
)
from lowtide.blocks.block.deferred_saves import DeferredSaves
from lowtide.blocks.block.side_effects import (
    Owner,
    buffers_replaced,
    cloned,
    random_devices,
    statistics_norms,
    track_statistics,
)
from lowtide.blocks.block.tensor_spec import Block, State, as_state
from lowtide.blocks.python_state.reachable import is_plain
from lowtide.blocks.python_state.snapshot import PythonState
from lowtide.errors import InvalidModelError
from lowtide.pytorch.contents import Contents
from lowtide.pytorch.modules import buffer, buffers
from lowtide.pytorch.nested import tree_flatten, tree_leaves, tree_unflatten
from lowtide.pytorch.tensor_versions import version_of

Extras = tuple[tuple[Any, ...], ...]
# Gradients of the state before a position, of its leaves and of its parameters.
Differentiated = tuple[Sequence[Tensor | None], Sequence[Tensor | None], Sequence[Tensor | None]]
_NOTHING: AbstractContextManager[Any] = nullcontext()


@dataclass(frozen=True, eq=False)
class Unit:
    """Consecutive blocks that run as one.

    Attributes:
        first: Number of its first block in the chain.
        name: Name for people.
        blocks: The blocks.
        labels: How messages call each.
        contents: What they are made of.
        emits: How many tensors at the end of every block's results leave the chain instead of going to the next block.
        python_state: What they remember in Python.
    """

    first: int
    name: str
    blocks: tuple[Block, ...]
    labels: tuple[str, ...]
    contents: Contents
    emits: int = 0
    python_state: PythonState = field(default_factory=lambda: PythonState(()))

    @property
    def num_emitted(self) -> int:
        """How many tensors at the end of its results leave the chain."""
        return self.emits * len(self.blocks)

    def python_state_for(self, arguments: Arguments) -> PythonState:
        """Return what they remember, their arguments in a call included."""
        if arguments.plain:
            return self.python_state
        return PythonState(
            (*self.blocks, *arguments.extras[self.first : self.first + len(self.blocks)], arguments.keywords)
        )

    def call(self, state: State, extras: Extras, keywords: Mapping[str, Any]) -> tuple[State, State]:
        """Return the state after the blocks, and what they emit."""
        emitted: State = ()
        for block, label, extra in zip(self.blocks, self.labels, extras, strict=True):
            state = as_state(block(*state, *extra, **keywords), label)
            if self.emits:
                if len(state) <= self.emits:
                    raise InvalidModelError(
                        f"{label} returned {len(state)} tensors, of which the last {self.emits} leave the chain: none "
                        "is left for the next block."
                    )
                emitted += state[-self.emits :]
                state = state[: -self.emits]
        return state, emitted


@dataclass
class Arguments:
    """What the blocks of one call of the chain take beside the state.

    Attributes:
        extras: For every block, its own arguments.
        keywords: Keyword arguments that all blocks take.
        leaves: The tensors in both that need a gradient, each once.
        plain: Whether a block can change nothing in both but the contents of tensors; worked out from the rest.
        others: The tensors in both that need no gradient; worked out from the rest.
    """

    extras: Extras
    keywords: Mapping[str, Any]
    leaves: list[Tensor]
    plain: bool = True
    others: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Work out whether blocks can change something in it."""
        self.plain = all(map(is_plain, self.extras)) and all(map(is_plain, self.keywords.values()))
        flat = tree_leaves((self.extras, self.keywords)) if any(self.extras) or self.keywords else ()
        self.others = [value for value in flat if isinstance(value, Tensor) and not value.requires_grad]

    def places(self, first: int, last: int) -> tuple[list[tuple[int, int, int]], list[tuple[int, int]]]:
        """Return where blocks `first` to `last` find leaves: (block, argument, leaf), and (keyword value, leaf)."""
        index = {id(leaf): number for number, leaf in enumerate(self.leaves)}
        own = [
            (block - first, argument, index[id(value)])
            for block in range(first, last + 1)
            for argument, value in enumerate(self.extras[block])
            if id(value) in index
        ]
        flat = tree_leaves(self.keywords) if self.keywords else []
        return own, [(place, index[id(value)]) for place, value in enumerate(flat) if id(value) in index]


@dataclass(eq=False)
class Position:
    """A unit at its place, with all that is known before a call.

    Attributes:
        unit: The blocks.
        state_size: How many tensors the state before it has.
        final: Whether it is the last one.
        grad_state: Which tensors of the state before it need a gradient.
        grad_results: Which of its results, state and emitted ones, need a gradient.
        results: How many results it has.
        reads_state: Whether its backward reads the state before it.
        parameters: Parameters that its gradients belong to.
        leaves: Which of the call's leaves it reads.
        shared_parameters: Which of `parameters` other positions use too.
        shared_leaves: Which of `leaves` other positions use too.
        extra_places: Where leaves are among its blocks' arguments.
        keyword_places: Where leaves are among the keyword arguments.
        random: Whether it draws random numbers.
        draws: Whether it draws those of Python or numpy.
        stores: Whether it stores tensors in Python that need no gradient.
        rewinds: Whether its Python state is to be restored after every run.
        changing: Buffers that it changes, without those of normalisations.
        stops: Whether a run for its backward only stops where the last tensor that backward reads is made.
        norms: Normalisations whose statistics it updates; worked out from the rest.
        constant: Its other buffers; worked out from the rest.
        places: Devices whose generators it may draw from; worked out from the rest.
    """

    unit: Unit
    state_size: int = 1
    final: bool = False
    grad_state: tuple[int, ...] = ()
    grad_results: tuple[int, ...] = ()
    results: int = 1
    reads_state: bool = False
    parameters: tuple[Tensor, ...] = ()
    leaves: tuple[int, ...] = ()
    shared_parameters: tuple[int, ...] = ()
    shared_leaves: tuple[int, ...] = ()
    extra_places: tuple[tuple[int, int, int], ...] = ()
    keyword_places: tuple[tuple[int, int], ...] = ()
    random: bool = False
    draws: bool = False
    stores: bool = False
    rewinds: bool = False
    changing: tuple[Owner, ...] = ()
    stops: bool = False
    norms: list[nn.Module] = field(default_factory=list)
    constant: list[Owner] = field(default_factory=list)
    places: tuple[torch.device, ...] = ()

    def __post_init__(self) -> None:
        """Find the buffers that recomputation must leave alone."""
        modules = self.unit.contents.modules
        self.places = random_devices((*self.parameters, *self.unit.contents.parameters()))
        self.norms = statistics_norms(modules)
        # In eval mode they are read.
        taken = {id(module) for module in self.norms if module.training} | {id(module) for module, _ in self.changing}
        self.constant = [
            (module, name)
            for module in modules
            if id(module) not in taken
            for name, tensor in buffers(module).items()
            if tensor is not None
        ]

    @property
    def shared(self) -> int:
        """How many sums of gradients it adds to."""
        return len(self.shared_parameters) + len(self.shared_leaves)

    def run(self, state: State, arguments: Arguments) -> State:
        """Return all results; nothing is kept for backward.

        It runs as if something were: PyTorch takes other kernels without gradients (for LSTMs, and for attention with
        a learned bias), which give other bits.
        """
        with torch.enable_grad():
            entered, _, aliases = self.enter(state, arguments)
            results = self._checked(self.call(entered, arguments, aliases))
        return tuple(tensor.detach() for tensor in results)

    def run_recorded(
        self, state: State, arguments: Arguments, *, supply_state: bool = False
    ) -> tuple[State, BlockGraph]:
        """Return all results, and the graph from them back to the state before, the leaves and the parameters.

        With `supply_state` the graph does not hold the state, which must be supplied again in backward.
        """
        supply: list[Tensor] = []
        return self._record(state, arguments, state_not_saved(state, supply) if supply_state else _NOTHING, supply)

    def run_deferred(self, state: State, arguments: Arguments) -> tuple[State, BlockGraph]:
        """Return all results, and the graph behind them, to which `fill` must add what backward reads."""
        statistics = (tensor for norm in self.norms for tensor in buffers(norm).values() if tensor is not None)
        deferred = DeferredSaves(tuple(statistics))
        results, graph = self._record(state, arguments, deferred.deferring(), [])
        graph.deferred = deferred
        return results, graph

    def _record(
        self, state: State, arguments: Arguments, saving: AbstractContextManager[Any], supply: list[Tensor]
    ) -> tuple[State, BlockGraph]:
        with torch.enable_grad(), saving:
            entered, edges, aliases = self.enter(state, arguments)
            results = self._checked(self.call(entered, arguments, aliases))
            del entered
            shared = [self.parameters[index] for index in self.shared_parameters]
            shared += [aliases[self.leaves[index]] for index in self.shared_leaves]
            graph = end([results[index] for index in self.grad_results], shared, edges, supply)
        return tuple(tensor.detach() for tensor in results), graph

    def _checked(self, results: State) -> State:
        """Return `results`; raise if their number has changed."""
        if len(results) == self.results:
            return results
        raise InvalidModelError(
            f"{self.unit.labels[-1]} returned {len(results)} tensors; when it was profiled, it returned "
            f"{self.results}. The number must not change from call to call."
        )

    def fill(self, graph: BlockGraph, state: State, arguments: Arguments, **how: Callable[[], None]) -> None:
        """Compute again what the backward of `graph` reads, and nothing else; see `DeferredSaves.fill`."""
        assert graph.deferred is not None, "only runs that defer what they save are followed by this"
        with torch.enable_grad():
            entered, _, aliases = self.enter(state, arguments)
            graph.deferred.fill(lambda: self.call(entered, arguments, aliases), self.unit.labels[-1], **how)

    def enter(self, state: State, arguments: Arguments) -> tuple[State, list[GradientEdge], dict[int, Tensor]]:
        """Return the state and the leaves as the beginning of a graph, and where their gradients will arrive."""
        leaves = [arguments.leaves[leaf] for leaf in self.leaves]
        started, edges = begin([state[index] for index in self.grad_state] + leaves)
        aliases = dict(zip(self.leaves, started[len(self.grad_state) :], strict=True))
        if self.grad_state:
            entered = list(state)
            for index, tensor in zip(self.grad_state, started, strict=False):
                entered[index] = tensor
            state = tuple(entered)
        return state, edges, aliases

    def call(self, state: State, arguments: Arguments, aliases: Mapping[int, Tensor]) -> State:
        """Return all results of the blocks, run on `aliases` instead of the leaves."""
        extras, keywords = self._with_aliases(arguments, aliases)
        results = self._call(state, extras, keywords, arguments)
        if self.keyword_places and not _is_alike(keywords, arguments.keywords, self.keyword_places):
            raise refused.argument(self.unit.labels[-1])
        return results

    def _call(self, state: State, extras: Extras, keywords: Mapping[str, Any], arguments: Arguments) -> State:
        if not self.rewinds:
            after, emitted = self.unit.call(state, extras, keywords)
            return after + emitted
        python_state = self.unit.python_state_for(arguments)
        before = python_state.snapshot()
        try:
            after, emitted = self.unit.call(state, extras, keywords)
        finally:
            python_state.restore(before)
        return after + emitted

    def _with_aliases(self, arguments: Arguments, aliases: Mapping[int, Tensor]) -> tuple[Extras, Mapping[str, Any]]:
        first, number = self.unit.first, len(self.unit.blocks)
        extras, keywords = arguments.extras[first : first + number], arguments.keywords
        if self.extra_places:
            rows = [list(extra) for extra in extras]
            for block, argument, leaf in self.extra_places:
                rows[block][argument] = aliases[leaf]
            extras = tuple(tuple(row) for row in rows)
        if self.keyword_places:
            flat, structure = tree_flatten(keywords)
            for place, leaf in self.keyword_places:
                flat[place] = aliases[leaf]
            keywords = tree_unflatten(flat, structure)
        return extras, keywords

    def differentiate(
        self, graph: BlockGraph, gradients: Gradients, sums: Gradients, *, retain: bool = False
    ) -> Differentiated:
        """Return the gradients of the state before, of the leaves and of the parameters.

        `gradients` are those of all results; `sums` are the gradients so far of the shared parameters, then of the
        shared leaves. Both lists are emptied.
        """
        entering = [gradients[index] for index in self.grad_results]
        gradients.clear()
        if all(gradient is None for gradient in entering):
            found: list[Tensor | None] = [None] * (len(graph.edges) + len(self.parameters))
            for index, gradient in zip(self._shared_places(), sums, strict=True):
                found[index] = gradient
            sums.clear()
            return self._split(found)
        entering += sums
        sums.clear()
        return self._split(differentiate(graph, entering, self.parameters, retain=retain))

    def _split(self, found: Sequence[Tensor | None]) -> Differentiated:
        needs, leaves = len(self.grad_state), len(self.leaves)
        return found[:needs], found[needs : needs + leaves], found[needs + leaves :]

    def _shared_places(self) -> list[int]:
        needs, leaves = len(self.grad_state), len(self.leaves)
        return [needs + leaves + index for index in self.shared_parameters] + [
            needs + index for index in self.shared_leaves
        ]

    def again(self, stash: Sequence[Tensor]) -> AbstractContextManager[Any]:
        """Return a context for a repeated run: statistics are not updated, and copies of `stash` replace buffers."""
        if not self.norms and not self.changing:
            return _NOTHING
        stack = ExitStack()
        norms = [module for module in self.norms if module.training and module.track_running_stats]
        if norms:
            stack.callback(track_statistics, norms, True)
            track_statistics(norms, False)
        if self.changing:
            stack.enter_context(buffers_replaced(self.changing, cloned(stash)))
        return stack

    def stash(self) -> list[Tensor]:
        """Return copies of the buffers that it is about to change."""
        return cloned([buffer(module, name) for module, name in self.changing])

    def versions(self) -> list[tuple[int, int]]:
        """Return which tensors its other buffers are and how often they were changed."""
        found = (buffer(module, name) for module, name in self.constant)
        return [(id(tensor), version_of(tensor)) for tensor in found]


def _is_alike(keywords: Any, given: Any, places: Sequence[tuple[int, int]]) -> bool:
    """Return True if `keywords` are `given` but for the tensors at some places."""
    (flat, structure), (wanted, as_given) = tree_flatten(keywords), tree_flatten(given)
    replaced = {place for place, _ in places}
    return structure == as_given and all(
        one is other for place, (one, other) in enumerate(zip(flat, wanted, strict=True)) if place not in replaced
    )
