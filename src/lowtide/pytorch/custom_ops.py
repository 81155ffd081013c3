"""Ops of lowtide's own, which the compiler traces as one call each; the Python functions behind those of users."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload

_LIBRARY = torch.library.Library("lowtide", "FRAGMENT")  # type: ignore[no-untyped-call]


def define_op(
    schema: str, kernel: Callable[..., Any], fake: Callable[..., Any], *, is_random: bool = False
) -> Callable[..., Any]:
    """Return a new op of the namespace "lowtide".

    Args:
        schema: Its name, arguments and results, such as "lay_out(Tensor gradient, int[] strides) -> Tensor".
        kernel: Computes it, on any device.
        fake: Makes the fake results.
        is_random: It draws from the random number generator.
    """
    name = schema.partition("(")[0]
    tags = (torch.Tag.pt2_compliant_tag, *([torch.Tag.nondeterministic_seeded] if is_random else []))
    _LIBRARY.define(schema, tags=tags)  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"lowtide::{name}", fake, lib=_LIBRARY)
    op: Callable[..., Any] = getattr(torch.ops.lowtide, name).default
    return op


def functions_behind(op: Any) -> list[Callable[..., Any]]:
    """Return the Python functions that compute an op made by `torch.library.custom_op`; none for others."""
    definition = OPDEFS.get(op.name()) if isinstance(op, OpOverload) else None  # type: ignore[no-untyped-call]
    return [] if definition is None else [definition._init_fn, *definition._backend_fns.values()]
