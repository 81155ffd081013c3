"""The tensors in what a model returns, in containers and objects of any kind."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from lowtide.pytorch.nested import tree_leaves

# Objects in objects beyond this are taken to be no results; it also ends rings.
_DEEPEST = 4


def output_tensors(result: Any, depth: int = 0) -> list[torch.Tensor]:
    """Return the tensors in nested containers, dataclasses and plain objects, in order."""
    found: list[torch.Tensor] = []
    for leaf in tree_leaves(result):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif depth < _DEEPEST:
            found += output_tensors(_attributes(leaf), depth + 1)
    return found


def _attributes(leaf: Any) -> list[Any]:
    if isinstance(leaf, type | str | bytes | int | float) or callable(leaf):
        return []
    if dataclasses.is_dataclass(leaf):
        return [getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)]
    return list(getattr(leaf, "__dict__", {}).values())
