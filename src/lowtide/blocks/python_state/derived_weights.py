"""Derived weights: PyTorch's hooks for pruning and normalisation compute them before every run, as attributes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from lowtide.pytorch.modules import forward_pre_hooks, pruned_name


def derived_names(module: nn.Module) -> tuple[str, ...]:
    """Return the attributes of `module` that hold derived weights."""
    hooks = forward_pre_hooks(module)
    if not hooks:
        return ()
    names = (_name_of(hook) for hook in hooks.values())
    return tuple(name for name in names if name is not None)


def _name_of(hook: Any) -> str | None:
    if isinstance(hook, BasePruningMethod):
        return pruned_name(hook)
    return hook.name if isinstance(hook, WeightNorm | SpectralNorm) else None


def refresh(modules: Iterable[nn.Module]) -> None:
    """Compute the derived weights once more, with gradients: a run without gradients has left them without."""
    for module in modules:
        for hook in tuple(forward_pre_hooks(module).values()):
            name = _name_of(hook)
            if name is not None:
                with torch.enable_grad():
                    setattr(module, name, _weight(hook, module))


def _weight(hook: Any, module: nn.Module) -> torch.Tensor:
    weight: torch.Tensor
    if isinstance(hook, BasePruningMethod):
        weight = hook.apply_mask(module)  # type: ignore[no-untyped-call]  # PyTorch does not annotate it
    elif isinstance(hook, SpectralNorm):
        weight = hook.compute_weight(module, do_power_iteration=False)
    else:
        weight = hook.compute_weight(module)
    return weight
