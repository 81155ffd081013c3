"""What surrounds a call: dispatch modes, transforms of `torch.func`, forward-mode AD."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack


def without_modes() -> AbstractContextManager[Any]:
    """Compute on real tensors, also where the compiler traces on fakes."""
    return _disable_current_modes()


def mode_names() -> list[str]:
    """Return the classes of the dispatch modes that are active."""
    return [type(mode).__name__ for mode in _get_current_dispatch_mode_stack()]


def in_dispatch_mode() -> bool:
    """Return True if a dispatch mode is active; takes a fraction of the time of `mode_names`."""
    return bool(torch._C._len_torch_dispatch_stack())


def in_func_transform() -> bool:
    """Return True inside a transform of `torch.func` (grad, vmap, jvp, ...)."""
    return peek_interpreter_stack() is not None


def in_forward_ad() -> bool:
    """Return True inside a level of forward-mode AD."""
    return forward_ad._current_level >= 0


def without_torch_function() -> AbstractContextManager[Any]:
    """Compute without those who watch or change calls of PyTorch's functions seeing it."""
    return torch._C.DisableTorchFunction()
