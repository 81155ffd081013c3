"""Inputs that cannot be planned, refused before any work is done."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from lowtide.errors import CaptureError, InvalidInputError


def check_inputs(inputs: Sequence[Any]) -> None:
    """Refuse inputs on several devices and symbolic sizes, before any work is done."""
    if any(isinstance(item, torch.SymInt) for item in inputs):
        raise CaptureError(
            "The graph has symbolic shapes, and a byte budget needs sizes that are numbers. Use "
            'torch.compile(model, backend="lowtide", dynamic=False, ...): each input shape then gets its own plan.'
        )
    tensors = [item for item in inputs if isinstance(item, torch.Tensor)]
    # The compiler loses the type of what such rules return, so that they no longer apply to later ops: other values.
    refuse_types({type(item) for item in tensors if _has_rules(type(item))})
    check_devices(tensors)


def _has_rules(kind: type[torch.Tensor]) -> bool:
    """Return True if tensors of this type may change what ops do with them; parameters have that switched off."""
    return kind is not torch.Tensor and kind.__torch_function__ is not nn.Parameter.__torch_function__


def refuse_types(kinds: Collection[type[torch.Tensor]]) -> None:
    """Raise `InvalidInputError` if there are any: subclasses of tensors that are not served."""
    if kinds:
        raise InvalidInputError(
            f"The call has tensors of the subclasses {', '.join(sorted(kind.__name__ for kind in kinds))}, whose own "
            "rules a planned graph does not follow. Pass plain tensors (x.as_subclass(torch.Tensor), or what the "
            "subclass wraps), or leave the model unwrapped."
        )


def check_devices(tensors: Sequence[torch.Tensor], *, data: bool = True) -> None:
    """Raise `InvalidInputError` unless all tensors that are not host scalars are on one device that is served.

    Args:
        tensors: Parameters and inputs.
        data: True if they must have data; the meta device has none.
    """
    found = sorted({str(tensor.device) for tensor in tensors if tensor.dim() or tensor.device.type != "cpu"})
    if len(found) > 1:
        raise InvalidInputError(
            f"The model and its inputs are on {' and '.join(found)}; lowtide plans one real device, or lowtide.plan a "
            "model that is on the meta device as a whole. Move the inputs to the model's device."
        )
    if data and "meta" in found:
        raise InvalidInputError(
            "The model and its inputs are on the meta device, which has no data to train on. lowtide.plan plans such a "
            "model if it is an nn.Module or in the closure of a function. To run it, move it to a real device "
            "(model.to_empty) and give it weights."
        )
