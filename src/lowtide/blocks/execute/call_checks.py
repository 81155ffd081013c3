"""Calls of a chain that cannot be planned, each refused with its reason."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lowtide.blocks.block.tensor_spec import is_usual, kind_of
from lowtide.errors import InvalidInputError, InvalidModelError, UnsupportedBackwardError


def check_call(state: Sequence[Tensor], leaves: Sequence[Tensor], modules: Iterable[nn.Module]) -> None:
    """Raise if a call that needs gradients cannot be one node of the autograd graph."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise UnsupportedBackwardError(
            "A chain was called in training inside a transform of torch.func (grad, vjp, jvp, vmap, ...), which cannot "
            "go through it: it recomputes in a backward of its own. Use loss.backward() or torch.autograd.grad, or "
            "transform a function that calls the blocks one after the other."
        )
    if forward_ad._current_level >= 0:
        raise UnsupportedBackwardError(
            "A chain was called in training inside torch.autograd.forward_ad.dual_level(); it has no derivatives in "
            "forward mode. Call the blocks one after the other there, or put the chain in eval mode."
        )
    for number, tensor in enumerate(state):
        if not is_usual(tensor):
            raise _unusual(f"Input {number} of the chain", tensor)
    for tensor in leaves:
        if not is_usual(tensor):
            raise _unusual("An extra argument of the chain that needs a gradient", tensor)
    if parametrize._cache_enabled and any(parametrize.is_parametrized(module) for module in modules):
        raise InvalidModelError(
            "A chain with parametrised modules was called in training inside torch.nn.utils.parametrize.cached(). "
            "Repeated runs would read weights of the first one, with its graph. Leave cached() out around the chain."
        )


def check_modules(modules: Iterable[nn.Module], loose: Iterable[Tensor]) -> None:
    """Raise if a module has tensors that cannot be looked at: without a shape, or of a class of their own."""
    for module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            raise InvalidModelError(
                f"The chain has a {module.original_name} of TorchScript, which changes its code, and with it the last "
                "bits of its results, in its first few runs. Use the plain module."
            )
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                _check_tensor(f"{type(module).__name__}.{name}", tensor)
    for tensor in loose:
        _check_tensor("A tensor that a block refers to", tensor)


def _check_tensor(name: str, tensor: Any) -> None:
    if is_lazy(tensor):
        raise InvalidModelError(
            f"{name} has no shape yet: a lazy module gets it in its first run. Run the chain once without gradients "
            "(with torch.no_grad(): model(x)) before the optimizer is made and training begins."
        )
    if is_traceable_wrapper_subclass(tensor):
        raise InvalidModelError(
            f"{name} is a {type(tensor).__name__}, not a plain tensor. Chains of sharded or quantised modules are not "
            "supported; use plain parameters."
        )


def _unusual(what: str, tensor: Tensor) -> InvalidInputError:
    return InvalidInputError(
        f"{what} is {kind_of(tensor)}; a chain takes dense tensors of the class torch.Tensor, for only those come out "
        "of it as they would without it. Convert it: tensor.as_subclass(torch.Tensor), or tensor.to_dense()."
    )
