"""Modules: their parts (submodules, parameters, buffers, hooks), hooks of all modules, and how modules are called.

The parts are the dictionaries that hold them. PyTorch's public ways (`named_children`, `named_buffers`,
`register_buffer`) leave out parts that occur twice, check every name, and walk the whole module. Blocks are compared
and their buffers swapped in every call, so the dictionaries themselves are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules import module as all_modules
from torch.nn.utils import parametrize
from torch.nn.utils.prune import BasePruningMethod

Call = Callable[..., Any]

# What every module has in its `__dict__`, and those of it that hold its own parts.
STANDARD = frozenset(vars(nn.Module()))
PARTS = frozenset({"_parameters", "_buffers", "_modules"})


def children(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the submodules by name, to read or to replace; one that is None takes a name and does nothing."""
    return module._modules


def parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the module's own parameters by name."""
    return module._parameters


def buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the module's own buffers by name, to read or to replace."""
    return module._buffers


def buffer(module: nn.Module, name: str) -> Tensor:
    """Return a buffer that is there."""
    found = module._buffers[name]
    assert found is not None, "buffers that are None are left out before"
    return found


def child_ids(modules: Iterable[nn.Module]) -> list[int]:
    """Return the identities of all submodules of `modules`; asked in every call, to see whether one was replaced."""
    return [id(child) for module in modules for child in module._modules.values()]


def parameters_in(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return the parameters that `modules` have themselves; asked in every call."""
    return [each for module in modules for each in module._parameters.values() if each is not None]


def forward_hooks(module: nn.Module) -> dict[int, Any]:
    """Return the hooks that run after the module."""
    return module._forward_hooks


def forward_pre_hooks(module: nn.Module) -> dict[int, Any]:
    """Return the hooks that run before the module."""
    return module._forward_pre_hooks


class Hooks(NamedTuple):
    """Hooks by number, as the dictionaries that hold them."""

    forward: dict[int, Any]
    forward_pre: dict[int, Any]
    backward: dict[int, Any]
    backward_pre: dict[int, Any]


def hooks_of(module: nn.Module) -> Hooks:
    """Return all the hooks of a module."""
    return Hooks(module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)


def hooks_of_all_modules() -> Hooks:
    """Return the hooks that run for every module; there is no public way to read them."""
    return Hooks(
        all_modules._global_forward_hooks,
        all_modules._global_forward_pre_hooks,
        all_modules._global_backward_hooks,
        all_modules._global_backward_pre_hooks,
    )


def pruned_name(hook: BasePruningMethod) -> str:
    """Return which parameter a pruning hook computes, which it does not tell otherwise."""
    return hook._tensor_name


def parametrizations_are_cached() -> bool:
    """Return True inside `torch.nn.utils.parametrize.cached()`, which can only be asked of its counter."""
    return parametrize._cache_enabled > 0


def plain_call(module: nn.Module) -> Call:
    """Return the call of `module` with its hooks, which does not look into the slot."""
    return module._call_impl


def call_in_slot(module: nn.Module) -> Call | None:
    """Return what runs in the place of the plain call, or None."""
    return module._compiled_call_impl


def put_in_slot(module: nn.Module, call: Call | None) -> None:
    """Let calls of `module` run `call`, or the plain call if it is None."""
    module._compiled_call_impl = call
