"""Other ways into a wrapped model than calling it, none of which may train it without its plan unnoticed.

`model.forward(x)` and a compiler that others run reach `forward` directly. So a wrapped model gets a `forward` of its
own, as an attribute of the object, that runs planned. The part that a container such as DistributedDataParallel keeps
as `module` gets one that warns.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from lowtide.errors import warn

Function = TypeVar("Function", bound=Callable[..., Any])


def between_graphs(function: Function) -> Function:
    """Return `function`, which other compilers run between their graphs and do not trace."""
    disable: Callable[[Function], Function] = torch.compiler.disable(  # type: ignore[no-untyped-call]
        reason="The model is wrapped by lowtide: its training step has a plan of its own and cannot be part of another "
        "compiled graph. Without fullgraph=True the code around it is compiled and the plan runs in between.",
    )
    return disable(function)


class _Depth(threading.local):
    """How many planned calls this thread is inside of."""

    here = 0


class _PlannedCall:
    """Tells whether a planned call is going on: then wrapped models in it, and `forward`, are plain."""

    def __init__(self) -> None:
        self.depth = _Depth()

    def __enter__(self) -> None:
        self.depth.here += 1

    def __exit__(self, *_: object) -> None:
        self.depth.here -= 1


planned_call = _PlannedCall()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def in_planned_call() -> bool:
    """Return True if a planned call is going on in this thread.

    Traced, it is a constant without a guard: what is traced in a planned call runs in planned calls alone, because the
    compiler keeps it for one backend.
    """
    return planned_call.depth.here > 0


class ForwardOverride:
    """A `forward` that runs something else when it is called to train, unless a planned call is going on.

    A copy of the model has its plain `forward`: copying and pickling give a method of the copy.
    """

    def __init__(self, module: nn.Module, training: Callable[..., Any], trains: Callable[[], bool]) -> None:
        self.module = module
        self.plain = module.forward
        self.training = training
        self.trains = trains
        self.is_active = True
        functools.update_wrapper(self, self.plain)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the planned or the plain `forward` returns."""
        if in_planned_call() or not self.is_active or not self.trains():
            return self.plain(*args, **kwargs)
        return self.training(*args, **kwargs)

    def __reduce__(self) -> Any:
        """Return a method of the copied module, or a copy of what somebody else had put in its place."""
        return (getattr, (self.module, "forward")) if self.hides_method else (functools.partial, (self.plain,))

    @property
    def __code__(self) -> types.CodeType:
        """The code of the plain `forward`, where the compiler notes what it knows of a `torch.fx.GraphModule`."""
        code: types.CodeType = self.plain.__code__
        return code

    @property
    def hides_method(self) -> bool:
        """Return True if the plain `forward` is the method of the module's class."""
        return isinstance(self.plain, types.MethodType) and self.plain.__func__ is type(self.module).forward

    def remove(self) -> None:
        """Give the module its `forward` back; if somebody else's calls this one, it calls the plain one from now on."""
        self.is_active = False
        if self.module.__dict__.get("forward") is not self:
            return
        del self.module.__dict__["forward"]
        if not self.hides_method:
            self.module.forward = self.plain


def override_forward(
    model: nn.Module, planned: Callable[..., Any], trains: Callable[[], bool]
) -> list[ForwardOverride]:
    """Let calls of `model.forward` run `planned`, and warn if the part that holds all of it is trained by itself."""
    overrides = [ForwardOverride(model, planned, trains)]
    part = getattr(model, "module", None)
    if isinstance(part, nn.Module) and {*map(id, part.parameters())} >= {*map(id, model.parameters())}:
        overrides.append(ForwardOverride(part, _warning(part), trains))
    for override in overrides:
        override.module.forward = override
    return overrides


def _warning(part: nn.Module) -> Callable[..., Any]:
    plain, warned = part.forward, False

    @between_graphs
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal warned
        if not warned:
            warned = True
            warn(
                f"{type(part).__name__} was called by itself, as the `module` of a wrapped model, and trains without "
                "the plan and its budget. Call the wrapped model instead, or wrap this module and not what contains it."
            )
        return plain(*args, **kwargs)

    return call
