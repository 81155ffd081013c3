"""Which ops must not be recomputed, and why; which draw random numbers; which recompute by another call."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from lowtide.capture.fused_op import Call
from lowtide.pytorch.ops import BATCH_NORM, BATCH_NORM_NO_STATISTICS, changes_its_input, is_collective, is_op, op_name

aten = torch.ops.aten

# Ops whose result is a choice: a recomputation that differs in the last bit could choose otherwise.
_DECISIONS = {
    "topk", "argmax", "argmin", "sort", "argsort", "kthvalue", "median", "nanmedian", "mode", "multinomial",
    "nonzero", "unique", "unique_dim", "unique_consecutive", "_unique2", "searchsorted", "bucketize",
}  # fmt: skip
_DECISION_OVERLOADS = {aten.max.dim, aten.min.dim, aten.cummax.default, aten.cummin.default}
_PURE = {"aten", "prims", "lowtide", "_quantized", "quantized_decomposed"}


def is_random(node: fx.Node) -> bool:
    """Return True if `node` draws from the random number generator."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def why_pinned(node: fx.Node, changed: Collection[fx.Node]) -> str:
    """Return why `node` must run exactly once, or "" if it may be recomputed.

    Args:
        node: A call.
        changed: Nodes whose storage the step changes; reading them later gives other contents.
    """
    target: Any = node.target
    if not is_op(target):
        return f"{getattr(target, '__name__', target)} is not an op whose effects are known"
    if is_collective(target):
        return "it communicates with other processes"
    if changes_its_input(target):
        return "it changes its input"
    if target.namespace not in _PURE:
        return f"{target} is a custom op whose effects are not known"
    if op_name(target).startswith(("_assert", "sym_constrain")):
        return "it checks something"
    if op_name(target) in _DECISIONS or target in _DECISION_OVERLOADS:
        return "its result is a discrete decision"
    if any(source in changed for source in node.all_input_nodes) and replay_call(node) is None:
        return "it reads an input that the step changes"
    return ""


def is_foreign(node: fx.Node) -> bool:
    """Return True if `node` calls something that is no op of PyTorch's own: its temporaries may depend on data."""
    target: Any = node.target
    return not is_op(target) or not (target.namespace in _PURE or is_collective(target))


def replay_call(node: fx.Node) -> Call | None:
    """Return what recomputes `node` where that is not the call itself.

    Batch normalisation in training mode reads and updates its running statistics; a recomputation must do neither. The
    variant without statistics gives the same output, mean and inverse deviation, bit for bit.
    """
    if node.target is not BATCH_NORM:
        return None
    x, weight, bias, _mean, _var, training, momentum, eps = node.args
    if training is not True:
        return None
    return BATCH_NORM_NO_STATISTICS, (x, weight, bias, True, momentum, eps), {}


def first_run_only(node: fx.Node) -> tuple[int, ...]:
    """Return the positions of results that a recomputation of `node` does not give."""
    return (3, 4) if replay_call(node) is not None else ()
