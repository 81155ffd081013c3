"""Running a unit by itself so that nothing is left of it, and what it would have left."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lowtide import device as devices
from lowtide.blocks.block.autograd_piece import hooks_off
from lowtide.blocks.block.position import Arguments, Position
from lowtide.blocks.block.side_effects import (
    Owner,
    RandomStates,
    buffers_replaced,
    cloned,
    generators,
    owners_of,
    put_random,
    take_random,
)
from lowtide.blocks.block.tensor_spec import State, is_usual, kind_of, storage_bytes, storage_key
from lowtide.blocks.python_state import refusals as refused
from lowtide.blocks.python_state.holders import Holder
from lowtide.blocks.python_state.random_streams import States, put_streams, take_streams
from lowtide.blocks.python_state.snapshot import Memory, Path, Snapshot
from lowtide.errors import InvalidModelError, LowtideError


@dataclass(frozen=True)
class Left:
    """What one run leaves behind in Python.

    Attributes:
        random: Whether it drew PyTorch's random numbers.
        draws: Whether it drew Python's or numpy's.
        remembers: Whether it changed what the unit remembers.
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
class Kept:
    """A tensor that must not change, with its name, a copy of it, whether it needs a gradient, and where it is."""

    name: str
    tensor: Tensor
    copy: Tensor
    needs_gradient: bool
    path: Path = ()

    def error(self, label: str) -> InvalidModelError:
        """Return the error about a block that has changed it."""
        return refused.parameter(label, self.name) if self.name else refused.overwritten(label, self.path)


@dataclass
class Traces:
    """All that a unit could change, as it was before it ran.

    Attributes:
        position: The unit at its place.
        owners: Its buffers.
        memory: What it remembers.
        before: What it remembered then.
        places: Devices whose generators it may draw from.
        random: The states of these.
        streams: The states of Python's and numpy's.
        large: What is compared once only, for it is large.
    """

    position: Position
    owners: list[Owner]
    memory: Memory
    before: Snapshot
    places: tuple[torch.device, ...]
    random: RandomStates
    streams: States
    large: list[tuple[Path, Holder, Any]] = field(default_factory=list)

    def kept(self) -> list[Kept]:
        """Return copies of the tensors that it must not change, with their names."""
        contents = self.position.unit.contents
        known = {id(tensor): name for module in contents.modules for name, tensor in module._parameters.items()}
        tensors = {id(tensor): tensor for tensor in contents.parameters()}
        tensors |= {key: tensor for key, (_, tensor) in self.before.tensors.items()}
        dense = [tensor for tensor in tensors.values() if tensor.layout is torch.strided]
        copies = cloned(dense)
        self.large = [(path, holder, holder.read()) for path, holder in self.before.large]
        return [
            Kept(known.get(id(one), ""), one, other, one.requires_grad, self.before.tensors.get(id(one), ((), None))[0])
            for one, other in zip(dense, copies, strict=True)
        ]

    def left(self, kept: Sequence[Kept], state: State, results: State) -> Left:
        """Return what a first run has left, and take it away; raise if it could not be repeated."""
        label = self.position.unit.labels[-1]
        after = self.memory.present()
        error = refused.of_run(label, self.before, after, recorded=True, known=True) or _put_back(label, kept)
        for path, holder, content in self.large:
            if not holder.same(content):
                holder.write(content)
                error = error or refused.large(label, path)
        if error is not None:
            # Where contents were changed by way of a version as well.
            _put_back(label, kept)
            raise error
        new = [tensor for _, tensor in after.new_tensors(self.before)] if after is not self.before else []
        keys = {storage_key(each): each for each in new if each.layout is torch.strided}
        inside = keys.keys() - {storage_key(tensor) for tensor in (*state, *results)}
        found = Left(
            random=any(not torch.equal(a, b) for a, b in zip(self.random, take_random(self.places), strict=True)),
            draws=take_streams() != self.streams,
            remembers=after is not self.before,
            stores=bool(new),
            stored_state=tuple(k for k, tensor in enumerate(state) if storage_key(tensor) in keys),
            stored_results=tuple(k for k, tensor in enumerate(results) if storage_key(tensor) in keys),
            stored_bytes=sum(devices.round_bytes(storage_bytes(keys[key]), keys[key].device) for key in inside),
        )
        self.memory.put(self.before)
        return found

    @property
    def remembered(self) -> bool:
        """Whether runs since then have changed what the unit remembers."""
        return self.memory.present() is not self.before


@contextmanager
def without_traces(position: Position, state: State, arguments: Arguments) -> Iterator[Traces]:
    """Let `position` run for a while with buffers of its own, and put everything back."""
    unit = position.unit
    memory = unit.memory_for(arguments)
    before = memory.present()
    if before.opaque is not None:
        raise refused.opaque(unit.labels[-1], before.opaque)
    places = generators((*state, *unit.contents.parameters()))
    traces = Traces(
        position, owners_of(unit.contents.modules), memory, before, places, take_random(places), take_streams()
    )
    originals = [module._buffers[name] for module, name in traces.owners]
    try:
        with buffers_replaced(traces.owners, cloned(originals)), hooks_off(unit.contents.parameters()):
            yield traces
    finally:
        memory.put(before)
        put_streams(traces.streams)
        put_random(places, traces.random)


def _put_back(label: str, kept: Sequence[Kept]) -> Any:
    """Put contents back that were changed; return the error about the first."""
    error = None
    for each in kept:
        if not _same_bits(each.tensor.detach(), each.copy):
            each.tensor.data.copy_(each.copy)
            error = error or each.error(label)
        if each.tensor.is_leaf and each.tensor.requires_grad != each.needs_gradient:
            each.tensor.requires_grad_(each.needs_gradient)
            error = error or refused.parameter(label, each.name)
    return error


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return torch.equal(one, other) or torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


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
    unusual = next((tensor for tensor in results if not is_usual(tensor)), None)
    if unusual is not None:
        raise InvalidModelError(
            f"{position.unit.labels[-1]} returned {kind_of(unusual)}; a block of a chain returns dense tensors of the "
            "class torch.Tensor. Convert it: tensor.as_subclass(torch.Tensor), or tensor.to_dense()."
        )
