"""One call of an op: its signature, which calls of the same cost share, and what it costs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from lowtide.capture.fused_op import Call, Made
from lowtide.graph.ir import Graph, OpId
from lowtide.pytorch.nested import tree_leaves
from lowtide.pytorch.ops import is_op


class Calls(Protocol):
    """What this layer needs of a captured program.

    Calls hold fake tensors; None stands for an op that runs nothing.
    """

    @property
    def graph(self) -> Graph:
        """Its ops and values."""

    @property
    def device(self) -> torch.device:
        """Where it runs."""

    def call(self, op: OpId) -> Call | None:
        """Return what the first run of `op` calls."""

    def replay_call(self, op: OpId) -> Call | None:
        """Return what a recomputation of `op` calls."""


@dataclass(frozen=True, slots=True)
class OpCost:
    """Cost of one call: time, and bytes allocated and freed inside it beyond its results, at their highest."""

    seconds: float
    workspace_bytes: int


def target_name(target: Callable[..., Any]) -> str:
    """Return the name of what is called, such as "aten.mm.default"."""
    return str(target) if is_op(target) else getattr(target, "__name__", repr(target))


def signature(call: Call) -> str:
    """Return a readable text that is the same for calls that cost the same.

    Example:
        ```python
        signature((torch.ops.aten.add.Tensor, (torch.ones(2, 3), 1), {}))
        #> 'aten.add.Tensor(float32[2,3]{3,1}, 1)'
        ```
    """
    target, args, kwargs = call
    words = [_text(arg) for arg in args] + [f"{name}={_text(arg)}" for name, arg in sorted(kwargs.items())]
    return f"{target_name(target)}({', '.join(words)})"


def _text(arg: Any) -> str:
    if isinstance(arg, torch.Tensor):
        return _tensor_text(arg)
    if isinstance(arg, list | tuple):
        return f"[{', '.join(_text(item) for item in arg)}]"
    if isinstance(arg, dict):
        return f"{{{', '.join(f'{key}: {_text(value)}' for key, value in arg.items())}}}"
    if isinstance(arg, torch.SymInt | torch.SymFloat | torch.SymBool):
        return str(arg)
    if arg is None or isinstance(arg, bool | int | float | complex | str | torch.device):
        return repr(arg)
    if isinstance(arg, Made):
        return f"made {arg.index} as {_tensor_text(arg.fake)}"
    if is_op(arg):
        return target_name(arg)
    if isinstance(arg, torch.dtype | torch.layout | torch.memory_format):
        return str(arg).removeprefix("torch.")
    if isinstance(arg, torch.fx.GraphModule):
        return f"<graph {graph_digest(arg)}>"
    return f"<{type(arg).__qualname__}>"


def graph_digest(module: torch.fx.GraphModule) -> str:
    """Return a hash of what a graph inside an op computes, graphs inside it included."""
    parts = [part.code for part in module.modules() if isinstance(part, torch.fx.GraphModule)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def takes_graphs(call: Call) -> bool:
    """Return True if the call runs graphs of ops that are its arguments, as `cond`, `while_loop` and `scan` do."""
    return any(isinstance(leaf, torch.fx.GraphModule) for leaf in tree_leaves(call[1:]))


def _tensor_text(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.layout != torch.strided:
        return f"{dtype}{list(tensor.shape)}<{tensor.layout}>"
    sizes, strides = (",".join(map(str, numbers)) for numbers in (tensor.shape, tensor.stride()))
    conjugate = "*" if tensor.is_conj() else ""
    place = "" if tensor.device.type == "cpu" else f"@{tensor.device.type}"
    return f"{dtype}[{sizes}]{{{strides}}}{conjugate}{place}"
