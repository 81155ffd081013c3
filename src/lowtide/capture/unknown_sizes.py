"""Joint graphs that cannot be planned because the bytes of a result are not known, refused with the user's line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import fx

from lowtide.errors import CaptureError

_OURS = str(Path(__file__).parents[1])
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


def refuse_unplannable(module: fx.GraphModule) -> None:
    """Raise `CaptureError` if a result has a symbolic shape or a layout other than strided."""
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if _is_symbolic(value):
            raise CaptureError(
                f"The shape of {node.name!r}{_place(node)} is symbolic, and a byte budget needs sizes that are "
                "numbers. Compile with dynamic=False, and keep data-dependent shapes (nonzero, item, boolean masks) "
                "out of the planned model."
            )
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            raise CaptureError(
                f"{node.target}{_place(node)} makes a tensor of layout {value.layout}, whose bytes depend on data, and "
                "a byte budget needs sizes that are numbers. Use dense tensors (nn.Embedding(..., sparse=False), "
                "x.to_dense()), or leave that part of the model unwrapped."
            )


def source_line(node: fx.Node) -> str:
    """Return the "file:line" of the user's that made `node`, or ""."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    frames = [frame for frame in frames if not frame[0].startswith(_OURS)]
    return f"{frames[-1][0]}:{frames[-1][1]}" if frames else ""


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return True
    return isinstance(value, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape)


def _place(node: fx.Node) -> str:
    line = source_line(node)
    return f" (at {line})" if line else ""
