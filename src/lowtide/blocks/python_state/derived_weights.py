"""Weights that PyTorch's own hooks compute before every run and store as attributes: pruned and normalised ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm


def derived_names(module: nn.Module) -> tuple[str, ...]:
    """Return the attributes of `module` that such hooks set."""
    if not module._forward_pre_hooks:
        return ()
    names = (_name_of(hook) for hook in module._forward_pre_hooks.values())
    return tuple(name for name in names if name is not None)


def _name_of(hook: Any) -> str | None:
    if isinstance(hook, BasePruningMethod):
        return hook._tensor_name
    return hook.name if isinstance(hook, WeightNorm | SpectralNorm) else None


def refresh(modules: Iterable[nn.Module]) -> None:
    """Compute these weights once more, with their gradients: a run without gradients has left them without."""
    for module in modules:
        for hook in tuple(module._forward_pre_hooks.values()):
            name = _name_of(hook)
            if name is not None:
                with torch.enable_grad():
                    setattr(module, name, _weight(hook, module))


def _weight(hook: Any, module: nn.Module) -> torch.Tensor:
    if isinstance(hook, BasePruningMethod):
        return hook.apply_mask(module)
    if isinstance(hook, SpectralNorm):
        return hook.compute_weight(module, do_power_iteration=False)
    return hook.compute_weight(module)
