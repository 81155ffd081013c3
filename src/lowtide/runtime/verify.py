"""`verify=True`: the first training call is run both ways and compared bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from lowtide.errors import VerificationError
from lowtide.pytorch.nested import map_tensors, tensor_leaves
from lowtide.pytorch.storages import same_bits
from lowtide.runtime.output_tensors import output_tensors


def verify_call(
    plain: Callable[..., Any], planned: Callable[..., Any], model: nn.Module | None, args: Any, kwargs: Any
) -> None:
    """Raise `VerificationError` unless both ways give the same outputs, gradients, buffers and random numbers.

    Needs the memory of plain training once. Parameters' `.grad`, buffers and the generator are as before afterwards.
    """
    before = ModelState(model)
    expected = _run(plain, model, args, kwargs)
    before.restore(model)
    found = _run(planned, model, args, kwargs)
    before.restore(model)
    different = [name for name in expected if not _equal(expected[name], found.get(name))]
    if different or expected.keys() != found.keys():
        raise VerificationError(
            f"The planned step differs from plain training in {len(different)} of {len(expected)} results: "
            f"{', '.join(different[:5])}. Please report the model; lowtide.unwrap(model) trains it plainly meanwhile."
        )


_SIMPLE = (int, float, complex, str, bytes, bool, type(None))


class ModelState:
    """Buffers, generator states and simple Python attributes of modules, to be put back."""

    def __init__(self, model: nn.Module | None) -> None:
        modules = [] if model is None else list(model.modules())
        self.attributes = [(module, _simple_attributes(module)) for module in modules]
        self.python = random.getstate()
        self.numpy = np.random.get_state()
        self.buffers = {} if model is None else {name: b.clone() for name, b in model.named_buffers()}
        self.rng = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

    def restore(self, model: nn.Module | None) -> None:
        """Put everything back as it was."""
        with torch.no_grad():
            for name, buffer in model.named_buffers() if model is not None else ():
                # One that is written to, be it with what it has, is no longer what an earlier call has saved.
                if not buffer.is_meta and not same_bits(buffer, self.buffers[name]):
                    buffer.copy_(self.buffers[name])
        for module, attributes in self.attributes:
            if _simple_attributes(module) != attributes:
                module.__dict__.update(attributes)
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.rng)
        if self.cuda is not None:
            torch.cuda.set_rng_state_all(self.cuda)


def _simple_attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if isinstance(value, _SIMPLE)}


def _run(call: Callable[..., Any], model: nn.Module | None, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return everything a training call gives: outputs, gradients for a fixed upstream gradient, buffers, RNG."""
    # Inputs that the model changes must be fresh for each of the two runs.
    args, kwargs = map_tensors(fresh, (args, kwargs))
    leaves = [leaf for leaf in tensor_leaves((args, kwargs)) if leaf.requires_grad]
    parameters = [] if model is None else [p for p in model.parameters() if p.requires_grad]
    outputs = output_tensors(call(*args, **kwargs))
    heads = [output for output in outputs if output.requires_grad]
    results: dict[str, Any] = {f"output {i}": output.detach().clone() for i, output in enumerate(outputs)}
    if heads and (parameters or leaves):
        upstream = [torch.ones_like(head) for head in heads]
        gradients = torch.autograd.grad(heads, parameters + leaves, upstream, allow_unused=True)
        results |= {f"gradient {i}": gradient for i, gradient in enumerate(gradients)}
    if model is not None:
        results |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
    results["random state"] = torch.get_rng_state()
    return results


def fresh(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of an input that the model may change."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _equal(expected: torch.Tensor | None, found: torch.Tensor | None) -> bool:
    if expected is None or found is None:
        return expected is found
    return same_bits(expected, found)
