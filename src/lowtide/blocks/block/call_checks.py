"""What is checked before a training call of blocks: that it can be one node of the autograd graph, and be profiled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from lowtide.blocks import refusals as refused
from lowtide.blocks.block.tensor_spec import is_dense_tensor, kind_of
from lowtide.pytorch.dispatch_modes import in_forward_ad, in_func_transform
from lowtide.pytorch.fully_sharded import is_sharded
from lowtide.pytorch.modules import buffers, child_ids, children, parameters, parameters_in, parametrizations_are_cached
from lowtide.pytorch.tensor_versions import is_traceable_wrapper_subclass


class WatchedModules:
    """The modules that blocks are made of, found again where one was replaced.

    Args:
        roots: The modules of the blocks.
        loose: Tensors that blocks refer to beside them.
    """

    def __init__(self, roots: Sequence[nn.Module], loose: Sequence[Tensor] = ()) -> None:
        self._roots, self.loose = list(roots), list(loose)
        self.modules: list[nn.Module] = []
        self._children: list[int] | None = None

    def look(self) -> tuple[tuple[object, ...], list[Tensor]]:
        """Return what a program depends on in the blocks (modes, identities of tensors), and all their parameters."""
        if child_ids(self.modules) != self._children:
            self.modules = _all_modules(self._roots)
            self._children = child_ids(self.modules)
        tensors = self.loose + parameters_in(self.modules)
        modes = [module.training for module in self.modules]
        return (*modes, *map(id, tensors), *(each.requires_grad for each in tensors)), tensors


def _all_modules(roots: Iterable[nn.Module]) -> list[nn.Module]:
    """Return `roots` and all modules in them, each once."""
    found: dict[int, nn.Module] = {}
    stack = list(roots)
    while stack:
        module = stack.pop()
        if id(module) not in found:
            found[id(module)] = module
            stack += [child for child in children(module).values() if child is not None]
    return list(found.values())


def check_call(state: Sequence[Tensor], leaves: Sequence[Tensor], modules: Iterable[nn.Module]) -> None:
    """Raise if a call that needs gradients cannot be one node of the autograd graph."""
    sharded = next(filter(is_sharded, modules), None)
    if sharded is not None:
        raise refused.sharded_module(type(sharded).__name__)
    if in_func_transform():
        raise refused.function_transform()
    if in_forward_ad():
        raise refused.forward_mode()
    for number, tensor in enumerate(state):
        if not is_dense_tensor(tensor):
            raise refused.input_kind(f"Input {number} of the chain", kind_of(tensor))
    for tensor in leaves:
        if not is_dense_tensor(tensor):
            raise refused.input_kind("An extra argument of the chain that needs a gradient", kind_of(tensor))
    if parametrizations_are_cached() and any(parametrize.is_parametrized(module) for module in modules):
        raise refused.cached_parametrization()


def check_modules(modules: Iterable[nn.Module], loose: Iterable[Tensor]) -> None:
    """Raise if a module has tensors that cannot be profiled: without a shape, or of a class of their own."""
    for module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            raise refused.script_module(str(module.original_name))
        for name, tensor in (*parameters(module).items(), *buffers(module).items()):
            if tensor is not None:
                _check_tensor(f"{type(module).__name__}.{name}", tensor)
    for tensor in loose:
        _check_tensor("A tensor that a block refers to", tensor)


def _check_tensor(name: str, tensor: Tensor) -> None:
    if is_lazy(tensor):
        raise refused.lazy_parameter(name)
    if is_traceable_wrapper_subclass(tensor):
        raise refused.wrapped_parameter(name, type(tensor).__name__)
