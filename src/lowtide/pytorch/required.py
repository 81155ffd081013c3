"""The check that PyTorch has everything private that lowtide uses, made once, when it is first needed."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from inspect import get_annotations, signature
from types import FunctionType

import torch

from lowtide.errors import LowtideWarning, UnsupportedTorchError
from lowtide.pytorch.names import NAMES, PrivateName

OLDEST = (2, 13)
BEYOND = (2, 16)
TESTED = ("2.13.0", "2.15.0")
SUPPORTED = f"torch>={OLDEST[0]}.{OLDEST[1]},<{BEYOND[0]}.{BEYOND[1]}"

# Classes whose objects have more attributes than they have themselves, and such an object.
_SAMPLES: dict[str, Callable[[], object]] = {
    "torch.nn.Module": lambda: torch.nn.Module(),
    "torch._ops.OpOverload": lambda: torch.ops.aten.add.Tensor,
    "torch._functorch._aot_autograd.utils.make_boxed_func": lambda: _resolve(
        "torch._functorch._aot_autograd.utils.make_boxed_func"
    )(lambda: None),
}


@cache
def check_pytorch() -> None:
    """Raise `UnsupportedTorchError` if PyTorch lacks a private name that lowtide uses; the compiler's are left out.

    A version beyond those supported that has them all is used, with a warning.
    """
    if missing_names(each for each in NAMES if not each.of_compiler):
        _refuse(missing_names(NAMES))
    if not OLDEST <= _version() < BEYOND:
        warnings.warn(_unknown_version(), LowtideWarning, stacklevel=2)


@cache
def check_compiler() -> None:
    """Raise `UnsupportedTorchError` if PyTorch's compiler lacks a private name that lowtide uses; imports it."""
    check_pytorch()
    missing = missing_names(each for each in NAMES if each.of_compiler)
    if missing:
        _refuse(missing)


def missing_names(names: Iterable[PrivateName]) -> list[PrivateName]:
    """Return those of `names` that PyTorch does not have."""
    return [each for each in names if not _exists(each.path)]


def _exists(path: str) -> bool:
    try:
        _resolve(path)
    except (AttributeError, ImportError):
        return False
    return True


def _resolve(path: str) -> object:
    """Return what stands under a dotted name."""
    if path == "torch":
        return torch
    parent, _, name = path.rpartition(".")
    holder = _resolve(parent)
    if hasattr(holder, name):
        return getattr(holder, name)
    if parent in _SAMPLES:
        return getattr(_SAMPLES[parent](), name)
    if isinstance(holder, FunctionType) and name in signature(holder).parameters:
        return signature(holder).parameters[name]
    if isinstance(holder, type) and name in get_annotations(holder):
        return get_annotations(holder)[name]
    return import_module(path)


def _version() -> tuple[int, int]:
    major, minor = re.findall(r"\d+", torch.__version__)[:2]
    return int(major), int(minor)


def _refuse(missing: list[PrivateName]) -> None:
    inside = OLDEST <= _version() < BEYOND
    listed = "\n".join(f"  {each}" for each in missing)
    remedy = (
        "This version is among them, so its installation may be damaged: install it again with "
        f"`pip install --force-reinstall 'torch=={torch.__version__}'`, and if that does not help, please report this."
        if inside
        else f"Install one of them with `pip install '{SUPPORTED}'`."
    )
    raise UnsupportedTorchError(
        f"PyTorch {torch.__version__} does not have what lowtide needs of its insides:\n{listed}\n"
        f"lowtide works with {SUPPORTED} and is tested with {_tested()}. {remedy}"
    )


def _unknown_version() -> str:
    return (
        f"PyTorch {torch.__version__} is not among the versions that lowtide knows ({SUPPORTED}; tested with "
        f"{_tested()}). All that lowtide needs of its insides is there, so it goes on; verify=True compares the first "
        "step with plain training bit for bit."
    )


def _tested() -> str:
    return f"{', '.join(TESTED[:-1])} and {TESTED[-1]}"
