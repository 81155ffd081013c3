"""Eager's dropout taken apart: draw a mask of bytes, widen it to noise, multiply.

Eager draws noise into a tensor laid out like its input, divides it by the keep probability in that tensor's own
precision, and multiplies; it keeps the noise for backward. The op that tracing puts in its place scales by a double:
the products differ in the last bit for some probabilities in float32, and in backward for nearly all of them in
bfloat16 and float16; and its backward is many times slower than eager's.

Here the mask is drawn in bytes, which takes the same numbers from the generator, and the noise is made from it. So a
plan can keep the noise, as eager does, or the mask, which is a quarter of it and quickly widened again.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("lowtide", "DEF")
_LIBRARY.define(
    "dropout_mask(Tensor x, float keep) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded, torch.Tag.pt2_compliant_tag),
)
_LIBRARY.define(
    "dropout_noise(Tensor mask, float keep, ScalarType dtype) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)


def _mask(x: Tensor, keep: float) -> Tensor:
    return torch.empty_like(x, dtype=torch.uint8).bernoulli_(keep)


def _noise(mask: Tensor, keep: float, dtype: torch.dtype) -> Tensor:
    return mask.to(dtype).div_(keep)


def _fake_mask(x: Tensor, keep: float) -> Tensor:
    del keep
    return torch.empty_like(x, dtype=torch.uint8)


def _fake_noise(mask: Tensor, keep: float, dtype: torch.dtype) -> Tensor:
    del keep
    return torch.empty_like(mask, dtype=dtype)


for _name, _kernel, _fake in (("dropout_mask", _mask, _fake_mask), ("dropout_noise", _noise, _fake_noise)):
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"lowtide::{_name}", _fake, lib=_LIBRARY)

dropout_mask = torch.ops.lowtide.dropout_mask.default
dropout_noise = torch.ops.lowtide.dropout_noise.default
