"""Places in the user's code, as against those in PyTorch's and lowtide's."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import fx

_OURS = str(Path(__file__).parents[1])
_LIBRARIES = (str(Path(torch.__file__).parent), _OURS)
_LINE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


def is_inside(file: str) -> bool:
    """Return True if `file` is one of PyTorch's or lowtide's, or generated."""
    return file.startswith(_LIBRARIES) or file.startswith("<")


def is_call_of_library(call: Callable[..., Any]) -> bool:
    """Return True if PyTorch or lowtide has defined a function; classes of traced modules have calls of PyTorch's."""
    code = getattr(inspect.unwrap(call), "__code__", None)
    return code is not None and is_inside(code.co_filename)


def source_line(node: fx.Node) -> str:
    """Return the "file:line" that made `node`, or ""; it may be in PyTorch, as that of a layer is."""
    frames = _LINE.findall(node.meta.get("stack_trace") or "")
    frames = [frame for frame in frames if not frame[0].startswith(_OURS)]
    return f"{frames[-1][0]}:{frames[-1][1]}" if frames else ""


def user_line(text: str, stack: traceback.StackSummary | None = None) -> str | None:
    """Return the innermost "file:line" of the user's in a traceback or in the text of one."""
    found = [(frame.filename, frame.lineno) for frame in stack or ()]
    found += [(match["file"], int(match["line"])) for match in _LINE.finditer(text)]
    own = [f"{file}:{line}" for file, line in found if not is_inside(file)]
    return own[-1] if own else None


def without_our_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return `trace` from the first frame of the user's on."""
    while trace is not None and trace.tb_next is not None and is_inside(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace
