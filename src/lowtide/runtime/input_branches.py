"""Branches on what integer and boolean inputs contain, taken as eager takes them, without cutting the graph in two.

`if attention_mask.all():` is a choice between two graphs. The tracer cannot read values, so it would end the graph
there; libraries that know this do something else while they are traced, which gives other bits than eager. Here the
condition is computed on the real inputs of the call that is captured, the branch is traced, and an op in the graph
checks at every call that the condition is as expected. Where it is not, the call is captured for the other branch.

Only conditions that follow from integer and boolean inputs by a few ops are treated so: they are cheap, early in the
step, and seldom change.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from lowtide.pytorch.compiler.tracing import Condition, decide_branches
from lowtide.pytorch.custom_ops import define_op

# A condition of more ops, or on larger tensors, would take noticeable time at every call.
_MOST_NODES, _MOST_ELEMENTS = 64, 1 << 24
# Functions with which model libraries ask whether they are traced, to do something else than in eager: masks that are
# built though nothing is masked, a scan in the place of a loop. Where a model asks, the answer is no.
_QUESTIONS = ("is_tracing", "is_torchdynamo_compiling")
_MODELS = ("transformers.masking_utils", "transformers.models.")


class BranchChangedError(Exception):
    """A condition on inputs has another value than when the call was captured."""


def _expect(condition: torch.Tensor, answer: bool) -> None:
    if bool(condition) != answer:
        raise BranchChangedError


expect = define_op("expect(Tensor condition, bool answer) -> ()", _expect, fake=lambda condition, answer: None)
fx.node.has_side_effect(expect)


class Branches(threading.local):
    """Tells whether branches are traced as expected in this thread now, and how many have been."""

    active = False
    num_expected = 0


branches = Branches()


@contextmanager
def expecting_branches(active: bool) -> Iterator[None]:
    """Trace branches as eager takes them in this thread, if `active`."""
    before = branches.active
    branches.active = active
    asked = _questions(len(sys.modules)) if active else ()
    for module, name, _ in asked:
        setattr(module, name, _no)
    try:
        yield
    finally:
        branches.active = before
        for module, name, original in asked:
            setattr(module, name, original)


_asked: dict[tuple[str, str], tuple[Any, str, Any]] = {}


@lru_cache(maxsize=1)
def _questions(num_modules: int) -> tuple[tuple[Any, str, Any], ...]:
    """Return where models ask whether they are traced: module, name and function; looked up when modules have come."""
    del num_modules
    for where, module in list(sys.modules.items()):
        if where.startswith(_MODELS):
            found = ((where, name, vars(module).get(name)) for name in _QUESTIONS)
            # Another thread may be in a call, and have its answer there at the moment.
            _asked.update(
                {(where, name): (module, name, f) for where, name, f in found if callable(f) and f is not _no}
            )
    return tuple(_asked.values())


def _no(*_: Any, **__: Any) -> bool:
    """Answer that nothing is traced: what is decided by reading values is decided as eager does."""
    return False


def _expected(condition: Condition) -> bool | None:
    """Return the value of `condition`, and put a check of it into the graph; None if it is expensive to check."""
    if not _is_cheap(condition.node):
        return None
    answer = condition.value()
    condition.call(expect, answer)
    branches.num_expected += 1
    return answer


def _is_cheap(node: fx.Node) -> bool:
    """Return True if the value of `node` follows from integer and boolean inputs by a few ops without effects."""
    pending, seen = [node], set()
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        if len(seen) > _MOST_NODES or not _is_plain(current):
            return False
        pending += current.all_input_nodes
    return True


def _is_plain(node: fx.Node) -> bool:
    example = node.meta.get("example_value")
    if node.op == "placeholder":
        argument = node.meta.get("grapharg")
        real = argument.example if argument is not None else None
        return isinstance(real, torch.Tensor) and not real.is_floating_point() and not real.is_complex()
    if node.op not in ("call_function", "call_method") or not isinstance(example, torch.Tensor | int | float | bool):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "_")
    if name.startswith("rand") or name.endswith("_") or name in ("setitem", "bernoulli", "multinomial", "normal"):
        return False
    return not isinstance(example, torch.Tensor) or example.numel() <= _MOST_ELEMENTS


decide_branches(_expected, active=lambda: branches.active)
