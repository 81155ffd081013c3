"""`verify=True`: the first training call is run both ways and compared bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lowtide.errors import VerificationError
from lowtide.pytorch.contents import contents_of
from lowtide.pytorch.nested import map_tensors, tensor_leaves
from lowtide.pytorch.storages import same_bits
from lowtide.runtime.model_state import ModelState, copies_of_buffers
from lowtide.runtime.output_tensors import output_tensors


def verify_call(
    plain: Callable[..., Any], planned: Callable[..., Any], model: nn.Module, args: Any, kwargs: Any
) -> None:
    """Raise `VerificationError` unless both ways give the same outputs, gradients, buffers and random numbers.

    Needs the memory of plain training once. Parameters' `.grad`, buffers and the generator are as before afterwards.
    """
    before = ModelState(model)
    expected = _run(plain, model, args, kwargs)
    before.restore()
    found = _run(planned, model, args, kwargs)
    before.restore()
    different = [name for name in expected if not _equal(expected[name], found.get(name))]
    if different or expected.keys() != found.keys():
        raise VerificationError(
            f"The planned step differs from plain training in {len(different)} of {len(expected)} results: "
            f"{', '.join(different[:5])}. Please report the model; lowtide.unwrap(model) trains it plainly meanwhile."
        )


def as_module(function: Callable[..., Any], *, tensors: bool = False) -> nn.Module:
    """Return a module that holds the modules that `function` refers to, and as buffers its loose tensors, if asked.

    They may be as large as the user's data, and a copy of them as well.
    """
    contents = contents_of(function)
    holder = nn.ModuleList(contents.modules)
    for number, tensor in enumerate(contents.tensors if tensors else ()):
        holder.register_buffer(f"tensor {number}", tensor)
    return holder


def _run(call: Callable[..., Any], model: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return everything a training call gives: outputs, gradients for a fixed upstream gradient, buffers, RNG."""
    # Inputs that the model changes must be fresh for each of the two runs.
    args, kwargs = map_tensors(fresh, (args, kwargs))
    sources = [*model.parameters(), *model.buffers(), *tensor_leaves((args, kwargs))]
    sources = [tensor for tensor in sources if tensor.requires_grad]
    # A function may refer to what was computed before; the graph behind that is the user's.
    computed = any(not tensor.is_leaf for tensor in sources)
    outputs = output_tensors(call(*args, **kwargs))
    heads = [output for output in outputs if output.requires_grad]
    results: dict[str, Any] = {f"output {i}": output.detach().clone() for i, output in enumerate(outputs)}
    if heads and sources:
        upstream = [torch.ones_like(head) for head in heads]
        gradients = torch.autograd.grad(heads, sources, upstream, retain_graph=computed, allow_unused=True)
        results |= {f"gradient {i}": gradient for i, gradient in enumerate(gradients)}
    results |= {f"buffer {name}": buffer for name, buffer in copies_of_buffers(model).items()}
    results["random state"] = torch.get_rng_state()
    return results


def fresh(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of an input that the model may change."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _equal(expected: torch.Tensor | None, found: torch.Tensor | None) -> bool:
    if expected is None or found is None:
        return expected is found
    return same_bits(expected, found)
