"""The compiler backend: capture, costs, plan and lower, called by PyTorch for every graph of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.capture.joint import make_program
from lowtide.errors import CaptureError, InvalidInputError, LowtideError
from lowtide.lower.execute import boxed
from lowtide.lower.rewrite import lower
from lowtide.run.session import Session
from lowtide.run.settings import Settings

Backend = Callable[..., Callable[..., Any]]


class PlannedWithoutRunning(Exception):  # noqa: N818 - a signal, not an error
    """Raised inside the compiler to leave it once the plan is made."""


def lowtide_backend(
    module: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, **other: Any
) -> Callable[..., Any]:
    """Return the planned program for one graph; the target of `torch.compile(model, backend="lowtide")`.

    Args:
        module: Forward graph, as captured.
        example_inputs: Its inputs.
        options: `budget`, and optionally `planner`, `costs` and `plan`, as for `lowtide.wrap`.
        other: Anything else `torch.compile` passes on is refused.
    """
    if other:
        raise InvalidInputError(f"The lowtide backend does not know {sorted(other)}; pass options={{'budget': ...}}.")
    return make_backend(Session(Settings.from_options(options)))(module, example_inputs)


def make_backend(session: Session, *, run: bool = True) -> Backend:
    """Return a backend that plans with `session`; with `run=False` it plans and then runs the graph unplanned."""

    def partition(
        joint: fx.GraphModule,
        joint_inputs: Any,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
        **_: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        del joint_inputs
        with _own_errors():
            program = make_program(
                joint, num_forward_outputs=num_fwd_outputs, parameters=static_lifetime_input_indices or ()
            )
            # The compiler traces in fake mode; costs are measured on real tensors.
            with _disable_current_modes():
                plan = session.plan(program)
            lowered = lower(program, plan.schedule)
        if not run:
            raise PlannedWithoutRunning
        return lowered.forward, lowered.backward

    def backend(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        _check_inputs(example_inputs)
        compile_graph = aot_autograd(fw_compiler=boxed, bw_compiler=boxed, partition_fn=partition)
        try:
            return compile_graph(module, example_inputs)  # type: ignore[no-any-return]
        except PlannedWithoutRunning:
            return module.forward

    return backend


@contextmanager
def _own_errors() -> Iterator[None]:
    """Turn every failure into an error of ours: the compiler takes some others as leave to run without a plan."""
    try:
        yield
    except LowtideError:
        raise
    except Exception as error:
        raise CaptureError(f"Planning failed with {type(error).__name__}: {error}") from error


def _check_inputs(inputs: Sequence[Any]) -> None:
    """Refuse inputs on several devices and symbolic sizes, before any work is done."""
    if any(isinstance(item, torch.SymInt) for item in inputs):
        raise CaptureError(
            "The graph has symbolic shapes, and a byte budget needs sizes that are numbers. Use "
            'torch.compile(model, backend="lowtide", dynamic=False, ...): each input shape then gets its own plan.'
        )
    check_devices([item for item in inputs if isinstance(item, torch.Tensor)])


def check_devices(tensors: Sequence[torch.Tensor]) -> None:
    """Raise `InvalidInputError` unless all tensors that are not host scalars are on one device that is served."""
    found = sorted({str(tensor.device) for tensor in tensors if tensor.dim() or tensor.device.type != "cpu"})
    if len(found) > 1 or "meta" in found:
        raise InvalidInputError(
            f"The model and its inputs are on {' and '.join(found)}; lowtide plans one real device. Move the inputs "
            "to the model's device."
        )
