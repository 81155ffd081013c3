"""Nested arguments and results: PyTorch's own rules for what is a container, which users may extend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

__all__ = ["TreeSpec", "map_tensors", "tensor_leaves", "tensors_in", "tree_flatten", "tree_leaves", "tree_unflatten"]

Structure = TypeVar("Structure")


def tensors_in(structure: Any) -> list[torch.Tensor]:
    """Return the tensors in the arguments or the result of an op, which nests tuples, lists and dictionaries alone."""
    if isinstance(structure, torch.Tensor):
        return [structure]
    if isinstance(structure, dict):
        structure = list(structure.values())
    if isinstance(structure, list | tuple):
        return [tensor for item in structure for tensor in tensors_in(item)]
    return []


def tensor_leaves(structure: Any) -> list[torch.Tensor]:
    """Return the tensors in what a user passes to a model: in containers of any type that PyTorch knows."""
    return [leaf for leaf in tree_leaves(structure) if isinstance(leaf, torch.Tensor)]


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], structure: Structure) -> Structure:
    """Return `structure` with `function` applied to each of its tensors."""
    mapped: Structure = tree_map_only(torch.Tensor, function, structure)
    return mapped
