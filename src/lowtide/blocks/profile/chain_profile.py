"""The profile of a chain: its positions, each with its costs. Every distinct block is run by itself once.

Blocks count as the same if they are the same object, or modules of the same classes with equal settings and tensors of
equal shapes, and are given equal shapes. A block that writes over its input is joined with the one before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from lowtide.blocks.block.position import Arguments, Position, Unit
from lowtide.blocks.block.side_effects import Autocast, autocast_as, owners_of
from lowtide.blocks.block.tensor_spec import NEEDS_GRADIENT, Block, Spec, State, aliases_of, label_of, spec_of, specs_of
from lowtide.blocks.profile.isolated_run import state_after
from lowtide.blocks.profile.unit_costs import NEW, UnitCosts
from lowtide.blocks.profile.unit_probe import InPlaceError, profile_unit
from lowtide.blocks.python_state.snapshot import PythonState
from lowtide.errors import InvalidInputError
from lowtide.progress import Progress
from lowtide.pytorch.contents import Contents, contents_of
from lowtide.pytorch.modules import buffers, children, forward_hooks, forward_pre_hooks, parameters
from lowtide.pytorch.nested import tree_leaves
from lowtide.pytorch.profiler import is_profiled


@dataclass(frozen=True, eq=False)
class Blocks:
    """The blocks of a chain, with their names and what they are made of.

    Attributes:
        names: Name of every block.
        blocks: The blocks.
        contents: What each is made of.
        python_states: What each remembers in Python.
        emits: How many tensors at the end of every block's results leave the chain.
    """

    names: tuple[str, ...]
    blocks: tuple[Block, ...]
    contents: tuple[Contents, ...]
    python_states: tuple[PythonState, ...]
    emits: int = 0

    @staticmethod
    def of(names: Sequence[str], blocks: Sequence[Block], emits: int) -> Blocks:
        """Return `blocks` with what they are made of."""
        known: dict[int, Contents] = {}
        python_states: dict[int, PythonState] = {}
        for block in blocks:
            if id(block) not in known:
                known[id(block)], python_states[id(block)] = contents_of(block), PythonState([block])
        return Blocks(
            tuple(names),
            tuple(blocks),
            tuple(known[id(block)] for block in blocks),
            tuple(python_states[id(block)] for block in blocks),
            emits,
        )

    def unit(self, first: int, last: int) -> Unit:
        """Return the blocks from `first` to `last` as one."""
        parts = self.contents[first : last + 1]
        modules = {id(module): module for part in parts for module in part.modules}
        tensors = {id(tensor): tensor for part in parts for tensor in part.tensors}
        name = self.names[first] if first == last else f"{self.names[first]}-{self.names[last]}"
        return Unit(
            first=first,
            name=name,
            blocks=self.blocks[first : last + 1],
            labels=tuple(label_of(self.names[k], self.blocks[k]) for k in range(first, last + 1)),
            contents=parts[0] if first == last else Contents(tuple(modules.values()), tuple(tensors.values())),
            emits=self.emits,
            python_state=self.python_states[first] if first == last else PythonState(self.blocks[first : last + 1]),
        )


@dataclass(frozen=True, eq=False)
class ChainProfile:
    """What a chain is and costs: its positions and the costs of each, in order.

    Attributes:
        positions: The positions.
        costs: Their costs.
        state: What the tensors of the chain's input are.
    """

    positions: tuple[Position, ...]
    costs: tuple[UnitCosts, ...]
    state: tuple[Spec, ...]


def profile_chain(
    blocks: Blocks, state: State, arguments: Arguments, autocast: Autocast, progress: Progress
) -> ChainProfile:
    """Return what the chain is and costs when it is called with `state` and `arguments`.

    Nothing but the blocks' own temporary memory is used: parameters, gradients, buffers and random generators stay as
    they are. Where a profiler watches the caller's thread the blocks run in another one.
    """

    def run() -> ChainProfile:
        with autocast_as(autocast):
            return _Profiling(blocks, arguments, progress).run(state)

    if not is_profiled():
        return run()
    with ThreadPoolExecutor(1, "lowtide-profile") as pool:
        # Hooks of blocks may read context variables, which belong to a thread.
        return pool.submit(copy_context().run, run).result()


class _Profiling:
    """Goes through the blocks from first to last."""

    def __init__(self, blocks: Blocks, arguments: Arguments, progress: Progress) -> None:
        self._blocks, self._arguments, self._progress = blocks, arguments, progress
        self._uses = _uses(blocks, arguments)
        self._known: dict[Any, UnitCosts] = {}
        self._keys: dict[int, Any] = {}
        self._number = len(blocks.blocks)
        self._keywords = specs_of(tree_leaves(arguments.keywords)) if arguments.keywords else ()

    def run(self, state: State) -> ChainProfile:
        """Return the positions and costs of the chain."""
        given = tuple(spec_of(tensor) for tensor in state)
        current = tuple(tensor.detach() for tensor in state)
        grad_state = tuple(index for index, spec in enumerate(given) if spec[NEEDS_GRADIENT])
        found: list[tuple[Position, UnitCosts]] = []
        # The state before each position so far that may yet have to be joined with the next one.
        entry = (current, grad_state)
        for k in range(self._number):
            try:
                position, costs, after = self._profile(self._blocks.unit(k, k), current, grad_state)
                entry = (current, grad_state)
            except InPlaceError:
                if not found:
                    raise InvalidInputError(
                        f"{label_of(self._blocks.names[k], self._blocks.blocks[k])} changes the input of the chain in "
                        "place, which could not be run again from it. Use the form of the block that does not "
                        "(inplace=False), or put the block before it into the chain as well."
                    ) from None
                joined, _ = found.pop()
                position, costs, after = self._profile(self._blocks.unit(joined.unit.first, k), *entry)
            found.append((position, costs))
            current, grad_state = after, tuple(index for index in costs.grad_results if index < len(after))
        positions = self._with_shared_foreigners([position for position, _ in found])
        return ChainProfile(tuple(positions), tuple(costs for _, costs in found), given)

    def _profile(self, unit: Unit, state: State, grad_state: tuple[int, ...]) -> tuple[Position, UnitCosts, State]:
        """Return the position of `unit`, its costs, and the state after it."""
        draft = self._draft(unit, len(state), grad_state)
        key = self._key(draft, state)
        costs = self._known.get(key)
        if costs is None:
            self._progress(f"running block {unit.name} of {self._number} by itself")
            before = "the input of the chain" if not unit.first else f"the output of block {unit.first - 1}"
            costs, after = profile_unit(draft, state, self._arguments, before)
            if not costs.foreign or not any(isinstance(block, nn.Module) for block in unit.blocks):
                self._known[key] = costs
        else:
            after = self._sample(draft, costs, state)
        owners = owners_of(unit.contents.modules)
        position = replace(
            draft,
            grad_results=costs.grad_results,
            results=costs.results,
            reads_state=bool(costs.saved_state),
            parameters=draft.parameters + costs.foreign,
            random=costs.effects.random,
            draws=costs.effects.draws,
            stores=costs.effects.stores,
            changing=tuple(owners[index] for index in costs.changing),
            stops=costs.stop_seconds is not None,
        )
        return position, costs, after

    def _draft(self, unit: Unit, state_size: int, grad_state: tuple[int, ...]) -> Position:
        parameters = tuple(each for each in unit.contents.parameters() if each.requires_grad and each.is_leaf)
        extra_places, keyword_places = self._arguments.places(unit.first, unit.first + len(unit.blocks) - 1)
        places = [*(leaf for _, _, leaf in extra_places), *(leaf for _, leaf in keyword_places)]
        leaves = tuple(dict.fromkeys(places))
        return Position(
            unit=unit,
            state_size=state_size,
            final=unit.first + len(unit.blocks) == self._number,
            grad_state=grad_state,
            parameters=parameters,
            leaves=leaves,
            shared_parameters=tuple(k for k, each in enumerate(parameters) if self._is_shared(each, unit)),
            shared_leaves=tuple(
                k for k, leaf in enumerate(leaves) if self._is_shared(self._arguments.leaves[leaf], unit)
            ),
            extra_places=tuple(extra_places),
            keyword_places=tuple(keyword_places),
        )

    def _key(self, draft: Position, state: State) -> Any:
        unit = draft.unit
        rows = self._arguments.extras[unit.first : unit.first + len(unit.blocks)]
        return (
            tuple(map(self._block_key, unit.blocks)),
            specs_of(state),
            aliases_of(state),
            draft.grad_state,
            draft.final,
            tuple(map(specs_of, rows)),
            self._keywords,
            tuple((block, argument) for block, argument, _ in draft.extra_places),
            draft.shared_parameters,
            draft.shared_leaves,
        )

    def _block_key(self, block: Block) -> Any:
        if id(block) not in self._keys:
            self._keys[id(block)] = module_key(block) if isinstance(block, nn.Module) else id(block)
        return self._keys[id(block)]

    def _sample(self, draft: Position, costs: UnitCosts, state: State) -> State:
        """Return a state such as a unit with known costs returns."""
        if costs.after == specs_of(state) and NEW in costs.sources:
            return state
        known = replace(draft, grad_results=costs.grad_results, results=costs.results)
        return state_after(known, state, self._arguments)

    def _is_shared(self, tensor: Tensor, unit: Unit) -> bool:
        first, last = self._uses[id(tensor)]
        return first < unit.first or last >= unit.first + len(unit.blocks)

    def _with_shared_foreigners(self, positions: list[Position]) -> list[Position]:
        """Return `positions`, where parameters that only running them revealed are marked as shared if they are."""
        uses = Counter(id(parameter) for position in positions for parameter in position.parameters)
        return [
            replace(
                position,
                shared_parameters=tuple(k for k, each in enumerate(position.parameters) if uses[id(each)] > 1),
            )
            for position in positions
        ]


def _uses(blocks: Blocks, arguments: Arguments) -> dict[int, tuple[int, int]]:
    """Return the first and the last block that uses each parameter and each leaf."""
    uses: dict[int, tuple[int, int]] = {}
    everywhere = [value for value in tree_leaves(arguments.keywords) if isinstance(value, Tensor)]
    for k, (contents, row) in enumerate(zip(blocks.contents, arguments.extras, strict=True)):
        extras = [value for value in row if isinstance(value, Tensor)]
        for tensor in (*contents.parameters(), *extras, *everywhere):
            uses[id(tensor)] = (uses.get(id(tensor), (k, k))[0], k)
    return uses


_SIMPLE = (int, float, complex, str, bytes, bool, type(None))
# Attributes that number the layers of a model.
_NUMBERS = frozenset({"layer_idx", "layer_id", "layer_index", "layer_number"})


def module_key(module: nn.Module) -> tuple[Any, ...]:
    """Return what two modules must share to cost the same: classes, settings, and what their tensors are."""
    return tuple(_own_key(each, path) for path, each in _walk(module))


def _walk(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    stack = [("", module)]
    while stack:
        path, each = stack.pop()
        yield path, each
        stack += [(f"{path}.{name}", child) for name, child in children(each).items() if child is not None]


def _own_key(module: nn.Module, path: str) -> tuple[Any, ...]:
    owned = (("parameters", parameters(module)), ("buffers", buffers(module)))
    tensors = tuple((kind, name, spec_of(t)) for kind, own in owned for name, t in own.items() if t is not None)
    settings = tuple(
        (name, _comparable(value))
        for name, value in sorted(vars(module).items())
        if not name.startswith("_") and name not in _NUMBERS
    )
    hooks = tuple(map(id, (*forward_hooks(module).values(), *forward_pre_hooks(module).values())))
    return path, type(module), module.training, tensors, settings, hooks


def _comparable(value: Any) -> Any:
    """Return `value` if it can be compared, else its identity."""
    if isinstance(value, _SIMPLE):
        return type(value), value
    if isinstance(value, tuple):
        return tuple(map(_comparable, value))
    return id(value)
