"""What a call may change: buffers, random numbers, gradients, Python objects and the tensors that they hold.

A call that is begun again, or that is run to find out what it does, must begin as it did the first time. Python state
is followed as far as that of chains is. Tensors that are no buffers are copied if they are small; the others must not
be written to, and neither must parameters and inputs, whose copies would be as large as the model and the batch.

The same holds for ops of the user's, which are run a few times to find out what they take: one that was made by
`torch.library.custom_op` may count its calls, keep a running maximum, or draw from the generators of Python and NumPy.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from lowtide.blocks.python_state.random_streams import read_streams, restore_streams
from lowtide.blocks.python_state.reachable import Reachable, named
from lowtide.blocks.python_state.snapshot import Snapshot
from lowtide.capture.recompute_rules import is_foreign
from lowtide.errors import CaptureError
from lowtide.pytorch.custom_ops import functions_behind
from lowtide.pytorch.storages import same_bits, storage_bytes
from lowtide.pytorch.tensor_versions import version_of

# Counters and running means are below; it does not show beside a step.
_COPIED_BYTES = 64 * 1024


class ModelState:
    """Buffers, generator states, gradients and Python state of a model, to be put back.

    Args:
        model: The model.
        called: What is called; by default the model. Python state is followed from there.
        inputs: Tensors that it is called with.
    """

    def __init__(self, model: nn.Module, called: Any = None, inputs: Iterable[Tensor] = ()) -> None:
        self.model = model
        # A module without its tensors yet turns into one of another class.
        is_lazy_model = has_lazy_tensors(model)
        root = model if called is None else called
        self.loose = None if is_lazy_model else LooseState(root, model.parameters(), inputs)
        self.python = random.getstate()
        self.numpy = np.random.get_state()
        self.buffers = copies_of_buffers(model)
        # Not as a tensor, which would count as memory of the step.
        self.rng = bytes(torch.get_rng_state().numpy())
        self.cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

    @property
    def copied_bytes(self) -> int:
        """Bytes of the copies that it has made of tensors."""
        copies = [*self.buffers.values(), *(() if self.loose is None else self.loose.copies)]
        return sum(map(storage_bytes, copies))

    def restore(self) -> str | None:
        """Put everything back as it was; return what has changed that cannot be put back, or None."""
        lost = None if self.loose is None else self.loose.restore()
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                # One that is written to, be it with what it has, is no longer what an earlier call has saved.
                if name in self.buffers and not buffer.is_meta and not same_bits(buffer, self.buffers[name]):
                    buffer.copy_(self.buffers[name])
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(torch.frombuffer(bytearray(self.rng), dtype=torch.uint8))
        if self.cuda is not None:
            torch.cuda.set_rng_state_all(self.cuda)
        return lost


def has_lazy_tensors(model: nn.Module) -> bool:
    """Return True if the first call makes parameters or buffers, so that a second one begins with others."""
    return any(map(is_lazy, (*model.parameters(), *model.buffers())))


class _AllMadeError(BaseException):
    """Ends a run in which the last parameters were made; users never see it."""


def make_lazy_tensors(model: nn.Module, call: Callable[[], object]) -> None:
    """Let modules without their tensors make them, with the random numbers of a plain first call.

    The compiler would make them while it traces, and put the generator back. Here `call` runs until the last module
    has its tensors; the planned call then goes on with the generator where plain training has it by then.

    Args:
        model: The model.
        call: Makes the model's call without a plan.

    Raises:
        CaptureError: Random numbers are drawn between, which a planned call would draw behind instead.
    """
    waiting = {each: name for name, each in model.named_modules() if _is_waiting(each)}
    buffers = [(each, each.detach().clone()) for each in model.buffers() if not is_lazy(each)]
    streams, start = read_streams(), torch.get_rng_state()
    reached, between = start, ""

    def before(module: nn.Module, _: Any) -> None:
        nonlocal between
        if module in waiting and not torch.equal(torch.get_rng_state(), reached):
            between = waiting[module]
            raise _AllMadeError

    def after(module: nn.Module, _: Any) -> None:
        nonlocal reached
        if waiting.pop(module, None) is not None:
            reached = torch.get_rng_state()
            buffers.extend((each, each.detach().clone()) for each in module.buffers(recurse=False))
        if not waiting:
            raise _AllMadeError

    handles = [each.register_forward_pre_hook(before, prepend=True) for each in waiting]
    handles += [each.register_forward_pre_hook(after) for each in waiting]
    try:
        with torch.no_grad():
            call()
    except _AllMadeError:
        pass
    finally:
        for handle in handles:
            handle.remove()
        with torch.no_grad():
            for buffer, copy in buffers:
                buffer.copy_(copy)
        restore_streams(streams)
    torch.set_rng_state(start if between else reached)
    if between:
        raise CaptureError(
            f"Module {between!r} makes its parameters in the first call, behind ops that draw random numbers, such as "
            "dropout. A planned call cannot draw both in that order. Call the model once before it is trained: "
            "`with torch.no_grad(): model(batch)`."
        )


def _is_waiting(module: nn.Module) -> bool:
    return any(map(is_lazy, (*module.parameters(recurse=False), *module.buffers(recurse=False))))


def copies_of_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the buffers, by name."""
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers() if not is_lazy(buffer)}


def buffer_copy_bytes(model: nn.Module) -> int:
    """Return the bytes that copies of the buffers take, from which a call could begin again."""
    return sum(buffer.numel() * buffer.itemsize for buffer in model.buffers() if not is_lazy(buffer))


class LooseState:
    """Python state that can be reached from `root`, and what must not change in place, at one moment.

    Args:
        root: What is called.
        parameters: The parameters of the model.
        inputs: Tensors that the call is given.
    """

    def __init__(self, root: Any, parameters: Iterable[Tensor], inputs: Iterable[Tensor] = ()) -> None:
        self._python = Snapshot(Reachable((root,)))
        self._gradients = [(each, each.grad) for each in parameters if each.is_leaf]
        watched = {id(tensor): (f"{named(path)!r}", tensor) for path, tensor in self._python.tensors.values()}
        self._copies = [(tensor, tensor.detach().clone()) for _, tensor in watched.values() if _is_small(tensor)]
        copied = {id(tensor) for tensor, _ in self._copies}
        watched |= {id(each): ("a parameter", each) for each, _ in self._gradients}
        watched |= {id(grad): ("the gradient of a parameter", grad) for _, grad in self._gradients if grad is not None}
        watched |= {id(each): ("an input", each) for each in inputs}
        self._versions = [
            (what, tensor, version_of(tensor)) for key, (what, tensor) in watched.items() if key not in copied
        ]

    @property
    def iterator(self) -> str | None:
        """Where an iterator is, which cannot be set back; None if there is none."""
        return None if self._python.opaque is None else named(self._python.opaque)

    @property
    def held_bytes(self) -> int:
        """Bytes of tensors, parameters and inputs aside, that it keeps alive or copies."""
        return sum(storage_bytes(tensor) for _, tensor in self._python.tensors.values() if _is_plain(tensor))

    @property
    def copies(self) -> list[Tensor]:
        """The copies that it has made."""
        return [copy for _, copy in self._copies]

    def restore(self) -> str | None:
        """Put everything back as it was; return what has changed that cannot be put back, or None."""
        self._python.restore()
        for parameter, gradient in self._gradients:
            if parameter.grad is not gradient:
                parameter.grad = gradient
        with torch.no_grad():
            for tensor, copy in self._copies:
                if not same_bits(tensor, copy):
                    tensor.copy_(copy)
        return next((what for what, tensor, version in self._versions if version_of(tensor) != version), None)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_meta and type(tensor) is Tensor


def _is_small(tensor: Tensor) -> bool:
    return _is_plain(tensor) and not tensor.is_inference() and storage_bytes(tensor) <= _COPIED_BYTES


@contextmanager
def ops_unchanged(calls: Iterable[fx.Node | None]) -> Iterator[None]:
    """Leave what the user's ops among `calls` remember as it was, while their costs are measured.

    Raises:
        CaptureError: An op has changed a tensor that is too large to be copied.
    """
    foreign = {node.target: node for node in calls if node is not None and is_foreign(node)}
    if not foreign:
        yield
        return
    streams = read_streams()
    state = LooseState([functions_behind(target) for target in foreign], ())
    try:
        yield
    finally:
        restore_streams(streams)
        changed = state.restore()
    if changed is not None:
        names = ", ".join(map(str, foreign))
        raise CaptureError(
            f"What custom ops take was measured on made-up data ({names}), and one of them has changed {changed} in "
            'place, which is too large to be copied. Use costs="analytic", which runs no op; or let the op take the '
            "tensor as an argument and name it in mutates_args."
        )
