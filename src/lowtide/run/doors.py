"""Other ways into a wrapped model than calling it, none of which may train it without its plan unnoticed.

`model.forward(x)` and a compiler that others run reach `forward` directly. So a wrapped model gets a `forward` of its
own, as an attribute of the object, that leads to the plan. The part that a container such as DistributedDataParallel
keeps as `module` gets one that warns.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lowtide.errors import warn

between_graphs = torch.compiler.disable(
    reason="The model is wrapped by lowtide: its training step has a plan of its own and cannot be part of another "
    "compiled graph. Without fullgraph=True the code around it is compiled and the plan runs in between.",
)


class _Depth(threading.local):
    """How many planned calls this thread is inside of."""

    here = 0


class _Inside:
    """Whether a planned call is going on: then `forward` is what it ever was."""

    def __init__(self) -> None:
        # Read while tracing, where it becomes a constant with a guard; so it must not count, nor be of one thread.
        self.planned_call = False
        self.depth = _Depth()
        self._anywhere = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self.depth.here += 1
        with self._lock:
            self._anywhere += 1
            self.planned_call = True

    def __exit__(self, *_: object) -> None:
        self.depth.here -= 1
        with self._lock:
            self._anywhere -= 1
            self.planned_call = self._anywhere > 0


inside = _Inside()


class Door:
    """A `forward` that leads elsewhere when it is called to train, unless a planned call is going on.

    A copy of the model has its plain `forward`: copying and pickling give a method of the copy.
    """

    def __init__(self, module: nn.Module, leads_to: Callable[..., Any], trains: Callable[[], bool]) -> None:
        self.module = module
        self.plain = module.forward
        self.leads_to = leads_to
        self.trains = trains
        self.is_open = True
        functools.update_wrapper(self, self.plain)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the way through this door returns."""
        planned = inside.planned_call if torch.compiler.is_compiling() else inside.depth.here > 0
        if planned or not self.is_open or not self.trains():
            return self.plain(*args, **kwargs)
        return self.leads_to(*args, **kwargs)

    def __reduce__(self) -> Any:
        """Return a method of the copied module, or a copy of what somebody else had put in its place."""
        return (getattr, (self.module, "forward")) if self.hides_method else (functools.partial, (self.plain,))

    @property
    def hides_method(self) -> bool:
        """Whether the plain `forward` is the method of the module's class."""
        return isinstance(self.plain, types.MethodType) and self.plain.__func__ is type(self.module).forward

    def close(self) -> None:
        """Give the module its `forward` back; where somebody else's leads here, it leads on to the plain one."""
        self.is_open = False
        if self.module.__dict__.get("forward") is not self:
            return
        del self.module.__dict__["forward"]
        if not self.hides_method:
            self.module.forward = self.plain


def open_doors(model: nn.Module, planned: Callable[..., Any], trains: Callable[[], bool]) -> list[Door]:
    """Let calls of `model.forward` run `planned`, and warn where the part that holds all of it trains by itself."""
    doors = [Door(model, planned, trains)]
    part = getattr(model, "module", None)
    if isinstance(part, nn.Module) and {*map(id, part.parameters())} >= {*map(id, model.parameters())}:
        doors.append(Door(part, _warning(part), trains))
    for door in doors:
        door.module.forward = door  # type: ignore[method-assign]
    return doors


def _warning(part: nn.Module) -> Callable[..., Any]:
    plain, told = part.forward, False

    @between_graphs
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal told
        if not told:
            told = True
            warn(
                f"{type(part).__name__} was called by itself, as the `module` of a wrapped model, and trains without "
                "the plan and its budget. Call the wrapped model instead, or wrap this module and not what contains it."
            )
        return plain(*args, **kwargs)

    return call
