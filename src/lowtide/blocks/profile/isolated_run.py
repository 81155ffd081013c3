"""Running a unit by itself: everything it could change is restored, and what it would have changed is reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lowtide import device as devices
from lowtide.blocks import refusals as refused
from lowtide.blocks.block.position import Arguments, Position
from lowtide.blocks.block.side_effects import (
    Owner,
    RandomStates,
    buffers_replaced,
    cloned,
    owners_of,
    random_devices,
    read_random_states,
    restore_random_states,
)
from lowtide.blocks.block.tensor_spec import State, is_dense_tensor, kind_of
from lowtide.blocks.python_state.random_streams import StreamStates, read_streams, restore_streams
from lowtide.blocks.python_state.reachable import Path, named
from lowtide.blocks.python_state.restorable_types import Holder
from lowtide.blocks.python_state.snapshot import PythonState, Snapshot, why_not_repeatable
from lowtide.errors import InvalidModelError, LowtideError
from lowtide.pytorch.autograd_graph import tensor_hooks_off
from lowtide.pytorch.modules import buffer, parameters
from lowtide.pytorch.storages import same_bits, storage_bytes, storage_key


@dataclass(frozen=True)
class RunEffects:
    """What one run changes outside of its results.

    Attributes:
        random: Whether it drew PyTorch's random numbers.
        draws: Whether it drew Python's or numpy's.
        remembers: Whether it changed the Python state of the unit.
        stores: Whether it stored tensors that were not there before.
        stored_state: Tensors of the state that it stored.
        stored_results: Results that it stored.
        stored_bytes: Bytes of other tensors that it stored.
    """

    random: bool = False
    draws: bool = False
    remembers: bool = False
    stores: bool = False
    stored_state: tuple[int, ...] = ()
    stored_results: tuple[int, ...] = ()
    stored_bytes: int = 0


@dataclass(frozen=True, eq=False)
class GuardedTensor:
    """A tensor that must not change, with its name, a copy of it, whether it needs a gradient, and where it is."""

    name: str
    tensor: Tensor
    copy: Tensor
    needs_gradient: bool
    path: Path = ()

    def error(self, label: str) -> InvalidModelError:
        """Return the error about a block that has changed it."""
        return refused.parameter(label, self.name) if self.name else refused.overwritten(label, named(self.path))


@dataclass
class StateBefore:
    """All that a unit could change, as it was before it ran.

    Attributes:
        position: The unit at its place.
        owners: Its buffers.
        python_state: Its Python state.
        snapshot: That state, as it was.
        places: Devices whose generators it may draw from.
        random: The states of these generators.
        streams: The states of Python's and numpy's generators.
        large: What is too large to be compared in every run.
    """

    position: Position
    owners: list[Owner]
    python_state: PythonState
    snapshot: Snapshot
    places: tuple[torch.device, ...]
    random: RandomStates
    streams: StreamStates
    large: list[tuple[Path, Holder, Any]] = field(default_factory=list)

    def guarded(self) -> list[GuardedTensor]:
        """Return the tensors that it must not change, with copies; what is large is read as well."""
        contents = self.position.unit.contents
        known = {id(tensor): name for module in contents.modules for name, tensor in parameters(module).items()}
        tensors = {id(tensor): tensor for tensor in contents.parameters()}
        tensors |= {key: tensor for key, (_, tensor) in self.snapshot.tensors.items()}
        dense = [tensor for tensor in tensors.values() if tensor.layout is torch.strided]
        copies = cloned(dense)
        self.large = [(path, holder, holder.read()) for path, holder in self.snapshot.large]
        return [
            GuardedTensor(
                known.get(id(one), ""), one, other, one.requires_grad, self.snapshot.tensors.get(id(one), ((), None))[0]
            )
            for one, other in zip(dense, copies, strict=True)
        ]

    def undo(self, guarded: Sequence[GuardedTensor], state: State, results: State) -> RunEffects:
        """Return what a first run has changed, and undo it; raise if the run could not be repeated."""
        label = self.position.unit.labels[-1]
        after = self.python_state.snapshot()
        error = why_not_repeatable(label, self.snapshot, after, recorded=True, known=True)
        error = error or _restore_contents(label, guarded)
        for path, holder, content in self.large:
            if not holder.same(content):
                holder.write(content)
                error = error or refused.large(label, named(path))
        if error is not None:
            # An earlier error may have left contents as they are.
            _restore_contents(label, guarded)
            raise error
        new = [tensor for _, tensor in after.new_tensors(self.snapshot)] if after is not self.snapshot else []
        keys = {storage_key(each): each for each in new if each.layout is torch.strided}
        inside = keys.keys() - {storage_key(tensor) for tensor in (*state, *results)}
        found = RunEffects(
            random=any(
                not torch.equal(a, b) for a, b in zip(self.random, read_random_states(self.places), strict=True)
            ),
            draws=read_streams() != self.streams,
            remembers=after is not self.snapshot,
            stores=bool(new),
            stored_state=tuple(k for k, tensor in enumerate(state) if storage_key(tensor) in keys),
            stored_results=tuple(k for k, tensor in enumerate(results) if storage_key(tensor) in keys),
            stored_bytes=sum(devices.round_bytes(storage_bytes(keys[key]), keys[key].device) for key in inside),
        )
        self.python_state.restore(self.snapshot)
        return found


@contextmanager
def isolated(position: Position, state: State, arguments: Arguments) -> Iterator[StateBefore]:
    """Run `position` inside with copies of its buffers; at the end everything that it could change is restored."""
    unit = position.unit
    python_state = unit.python_state_for(arguments)
    snapshot = python_state.snapshot()
    if snapshot.opaque is not None:
        raise refused.opaque(unit.labels[-1], named(snapshot.opaque))
    places = random_devices((*state, *unit.contents.parameters()))
    before = StateBefore(
        position=position,
        owners=owners_of(unit.contents.modules),
        python_state=python_state,
        snapshot=snapshot,
        places=places,
        random=read_random_states(places),
        streams=read_streams(),
    )
    originals = [buffer(module, name) for module, name in before.owners]
    try:
        with buffers_replaced(before.owners, cloned(originals)), tensor_hooks_off(unit.contents.parameters()):
            yield before
    finally:
        python_state.restore(snapshot)
        restore_streams(before.streams)
        restore_random_states(places, before.random)


def state_after(position: Position, state: State, arguments: Arguments) -> State:
    """Return the state after running `position` by itself."""
    with isolated(position, state, arguments):
        results = position.run(state, arguments)
    return results[: len(results) - position.unit.num_emitted]


def _restore_contents(label: str, guarded: Sequence[GuardedTensor]) -> InvalidModelError | None:
    """Restore contents that were changed; return the error about the first."""
    error = None
    for each in guarded:
        if not same_bits(each.tensor, each.copy):
            each.tensor.data.copy_(each.copy)
            error = error or each.error(label)
        if each.tensor.is_leaf and each.tensor.requires_grad != each.needs_gradient:
            each.tensor.requires_grad_(each.needs_gradient)
            error = error or refused.parameter(label, each.name)
    return error


def explained(run: Callable[[], State], position: Position, state: State, before: str) -> State:
    """Return `run()`; what it raises gets a note that says which block it is and what it was given."""
    try:
        return run()
    except LowtideError:
        raise
    except Exception as error:
        if "saved tensor hooks" in str(error):
            raise InvalidModelError(
                f"{position.unit.labels[-1]} uses a transform of torch.func (grad, vjp, jacrev, hessian) while it "
                "runs, inside of which PyTorch does not say what is kept for backward. Use torch.autograd.grad there, "
                "or leave the block out of the chain."
            ) from error
        shapes = ", ".join(f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in state)
        error.add_note(f"{position.unit.labels[-1]} was given {before}, {shapes}.")
        raise


def check_results(position: Position, results: State) -> None:
    """Raise if results are not dense tensors of PyTorch's own class."""
    unusual = next((tensor for tensor in results if not is_dense_tensor(tensor)), None)
    if unusual is not None:
        raise refused.result_kind(position.unit.labels[-1], kind_of(unusual))
