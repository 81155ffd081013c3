"""The peak of a step before it runs: Inductor's own code is run on fake tensors, whose storages are counted.

The simulator cannot say it. Inductor fuses ops, so that results are never made; it changes layouts, reuses buffers, and
makes the parts of a concatenation where the whole will be. All that is decided when its code is there, and the code
says when memory is taken and when it is given back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lowtide.costs.measured import measure_workspace
from lowtide.costs.op_signature import signature
from lowtide.errors import MeasureError, warn
from lowtide.pytorch.dispatch_modes import without_modes
from lowtide.pytorch.fake_tensors import new_fake_mode
from lowtide.pytorch.inductor.generate import Generated
from lowtide.pytorch.inductor.wrapper_code import wrapper_of
from lowtide.pytorch.nested import tensors_in
from lowtide.pytorch.op_watch import OpWatch
from lowtide.pytorch.storages import gradient_strides, storage_bytes, storage_key


@dataclass(frozen=True)
class Half:
    """One half of a step: its code, and fake tensors for the inputs of its graph."""

    code: Generated
    examples: Sequence[Any]


@dataclass(frozen=True)
class StepShape:
    """What surrounds the two halves of a step.

    Attributes:
        num_outputs: How many results of forward are outputs; the others are saved for backward.
        handed_over: Positions of the outputs that are written into inputs when forward has ended, and die then.
        num_tangents: How many gradients arrive when backward begins; they are its last inputs.
        parameters: For every gradient that backward returns to a parameter, by position, that parameter.
    """

    num_outputs: int
    handed_over: Collection[int]
    num_tangents: int
    parameters: dict[int, torch.Tensor]


@dataclass(frozen=True)
class DryRun:
    """What a step takes on top of what is there when it begins.

    Attributes:
        forward_bytes: The peak of forward.
        backward_bytes: The peak of backward.
        saved_bytes: What is there between the two.
    """

    forward_bytes: int
    backward_bytes: int
    saved_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The peak of the step."""
        return max(self.forward_bytes, self.backward_bytes)


def dry_run(forward: Half, backward: Half, shape: StepShape) -> DryRun:
    """Return what a step takes whose halves run by this code; nothing is computed, and no memory is needed."""
    level = _Level()
    with without_modes(), new_fake_mode(), OpWatch(level.add):
        primals = [level.given(example) for example in forward.examples]
        level.begin()
        outputs, saved = _run_forward(level, forward, shape, primals)
        first, saved_bytes = level.peak_bytes, level.now_bytes
        level.begin()
        _run_backward(level, backward, shape, saved)
        del outputs, primals
    return DryRun(first, level.peak_bytes, saved_bytes)


def _run_forward(level: _Level, half: Half, shape: StepShape, primals: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return the outputs that stay until the step ends, and what is saved."""
    results = list(_run(level, half, list(primals)))
    outputs = [each for k, each in enumerate(results[: shape.num_outputs]) if k not in shape.handed_over]
    return outputs, results[shape.num_outputs :]


def _run_backward(level: _Level, half: Half, shape: StepShape, saved: list[Any]) -> None:
    arriving = half.examples[len(half.examples) - shape.num_tangents :]
    tangents = [level.arriving(example) for example in arriving]
    # The loss's own gradient is held by the call of `backward()` until it returns.
    held = [each for each in tangents if isinstance(each, torch.Tensor) and each.numel() == 1]
    args = [*saved, *tangents]
    saved.clear()
    tangents.clear()
    gradients = list(_run(level, half, args))
    _accumulate(gradients, shape.parameters)
    del held


def _run(level: _Level, half: Half, args: list[Any]) -> Sequence[Any]:
    if not half.code.source:
        raise MeasureError("A half of the step computes nothing, so there is nothing to plan.")
    return wrapper_of(half.code, level.call)(args)


def _accumulate(gradients: list[Any], parameters: dict[int, torch.Tensor]) -> None:
    """Take copies where autograd does: of gradients in another layout than it keeps, and of shared ones."""
    seen: set[int] = set()
    kept = []
    for position, gradient in enumerate(gradients):
        parameter = parameters.get(position)
        if not isinstance(gradient, torch.Tensor) or parameter is None:
            continue
        shared = storage_key(gradient) in seen
        seen.add(storage_key(gradient))
        if shared or tuple(gradient.stride()) != gradient_strides(parameter):
            kept.append(torch.empty_like(gradient))
            gradients[position] = None
            del gradient


@dataclass
class _Level:
    """Bytes of storages that are alive now, and their highest number."""

    now_bytes: int = 0
    peak_bytes: int = 0
    _alive: dict[int, int] = field(default_factory=dict)

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        """Count the storages of `tensors` that are new."""
        for tensor in tensors:
            self._note(tensor)

    def given(self, example: Any) -> Any:
        """Return a tensor like `example` that is there before the step, and does not count."""
        made = self.arriving(example)
        if isinstance(made, torch.Tensor):
            self.now_bytes -= self._alive[storage_key(made)]
            self._alive[storage_key(made)] = 0
        return made

    def arriving(self, example: Any) -> Any:
        """Return a tensor like `example` that is allocated now."""
        if not isinstance(example, torch.Tensor):
            return example
        count = storage_bytes(example) // example.element_size()
        whole = torch.empty(count, dtype=example.dtype, device=example.device)
        return whole.as_strided(example.shape, example.stride(), example.storage_offset())

    def call(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what an op returns, and count what it takes inside."""
        result = target(*args, **kwargs)
        inside = _workspace_bytes(target, args, kwargs)
        self.peak_bytes = max(self.peak_bytes, self.now_bytes + inside)
        return result

    def begin(self) -> None:
        """Look for the peak from now on."""
        self.peak_bytes = self.now_bytes

    def _note(self, tensor: torch.Tensor) -> None:
        key = storage_key(tensor)
        if key in self._alive:
            return
        self._alive[key] = storage_bytes(tensor)
        self.now_bytes += self._alive[key]
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)
        weakref.finalize(tensor.untyped_storage(), self._drop, key)

    def _drop(self, key: int) -> None:
        self.now_bytes -= self._alive.pop(key)


# What ops take inside, by the signature of their call: the code of all plans of a model calls the same ones.
_known: dict[str, int] = {}


def _workspace_bytes(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    call = target, args, kwargs
    key = signature(call)
    if key not in _known:
        devices = {tensor.device for tensor in tensors_in([*args, *kwargs.values()])}
        try:
            _known[key] = measure_workspace(call, next(iter(devices), torch.device("cpu")))
        except Exception as error:  # An op run out of its context may raise anything.
            warn(
                f"{target} could not be run by itself ({type(error).__name__}: {error}), so what it takes inside may "
                "be missed, and the measured peak may exceed the reported one."
            )
            _known[key] = 0
    return _known[key]
