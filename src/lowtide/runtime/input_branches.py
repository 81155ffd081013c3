"""Branches on what inputs contain, taken as eager takes them, without cutting the graph in two.

`if attention_mask.all():` is a choice between two graphs. The tracer cannot read values, so it would end the graph
there; libraries that know this do something else while they are traced, which gives other bits than eager. Here the
condition is computed on the real inputs of the call that is captured, the branch is traced, and the condition becomes
one of the compiler's guards: it is computed at every call, before anything of the traced code runs. Where it has
another value, the code is traced again for the other branch. So nothing ever has to be undone: not buffers, not random
numbers, and not what other processes have been sent.

A call that is only planned has fakes of the user's inputs; conditions are computed on what these stand for.

Only conditions that follow by a few ops from inputs that need no gradient are treated so, such as masks, be they of
floats or not: they are cheap and seldom change. A value that the traced code has written to before the branch is not
what a guard would read, and is left alone.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import lru_cache, partial
from typing import Any

import torch
from torch import fx

from lowtide.pytorch.compiler.tracing import Condition, decide_branches, real_input
from lowtide.pytorch.dispatch_modes import without_modes, without_torch_function
from lowtide.pytorch.fake_tensors import FakeTensor
from lowtide.pytorch.ops import any_overload, changes_its_input
from lowtide.pytorch.storages import storage_key
from lowtide.pytorch.tensor_versions import version_of

# A condition of more ops, or one that holds larger tensors, would take noticeable time at every call, and memory that
# no plan counts. As much as the gradients of the parameters is free: at the end of the step they are there as well,
# with all that is there when it begins.
_MOST_NODES, _MOST_BYTES = 64, 1 << 20
# They write running statistics, which their schemas do not say.
_NORMS_THAT_WRITE = ("batch_norm", "instance_norm")
# Traces of one function for inputs of one shape that differ by their branches; further ones are cut at the branches.
# Every trace takes seconds, and 8 are all combinations of three conditions.
_MOST_VARIANTS = 8
# Functions with which model libraries ask whether they are traced, to do something else than in eager: masks that are
# built though nothing is masked, a scan in the place of a loop. Where a model asks, the answer is no.
_QUESTIONS = ("is_tracing", "is_torchdynamo_compiling")
_MODELS = ("transformers.masking_utils", "transformers.models.")

# The traces of a function that expect branches, by what they have in common.
Variants = defaultdict[Hashable, set[Hashable]]


# The tensors with data that fakes stand for, by the fakes' `id`.
Originals = Mapping[int, torch.Tensor]
Parameters = Callable[[], Iterable[torch.Tensor]]


class Branches(threading.local):
    """For each thread, the traces so far if branches are expected in it now, and what is known of fakes; else None.

    `parameters` returns those of the code that is traced.
    """

    variants: Variants | None = None
    originals: Originals | None = None
    parameters: Parameters = tuple


branches = Branches()


@contextmanager
def expecting_branches(
    variants: Variants | None, originals: Originals | None = None, parameters: Parameters = tuple
) -> Iterator[None]:
    """Trace branches in this thread as eager takes them, and note the traces in `variants`; not if that is None.

    Where the inputs are fakes, `originals` has the tensors that they stand for. What `parameters` returns has
    gradients at the end of the step.
    """
    before = branches.variants, branches.originals, branches.parameters
    branches.variants, branches.originals, branches.parameters = variants, originals, parameters
    # Inside of another call the answers are there already, and stay until that one ends.
    asked = _questions(len(sys.modules)) if variants is not None and before[0] is None else ()
    for module, name, _ in asked:
        setattr(module, name, _no)
    try:
        yield
    finally:
        branches.variants, branches.originals, branches.parameters = before
        for module, name, original in asked:
            setattr(module, name, original)


_asked: dict[tuple[str, str], tuple[Any, str, Any]] = {}


@lru_cache(maxsize=1)
def _questions(num_modules: int) -> tuple[tuple[Any, str, Any], ...]:
    """Return where models ask whether they are traced: module, name and function; looked up again after imports."""
    del num_modules
    for where, module in list(sys.modules.items()):
        if where.startswith(_MODELS):
            found = ((where, name, vars(module).get(name)) for name in _QUESTIONS)
            # While another thread is in a call, `_no` is there, which is not the original.
            _asked.update(
                {(where, name): (module, name, f) for where, name, f in found if callable(f) and f is not _no}
            )
    return tuple(_asked.values())


def _no(*_: Any, **__: Any) -> bool:
    """Answer that nothing is traced: what is decided by reading values is decided as eager does."""
    return False


def _expected(condition: Condition) -> bool | None:
    """Return the value of `condition`, and guard the trace by it; None if it cannot be expected."""
    assert branches.variants is not None
    nodes = _cheap_ancestors(condition.node)
    if nodes is None or not _are_unchanged(nodes):
        return None
    siblings = branches.variants[condition.signature]
    if len(siblings) >= _MOST_VARIANTS:
        return None
    inputs = [node for node in nodes if node.op == "placeholder"]
    look = _Look(_excerpt(nodes, condition.node), inputs)
    value = _value_without_chance(look, [_real(node) for node in inputs])
    if value is not None and inputs:
        condition.guard(_Expectation(look, value), inputs, partial(siblings.add, condition.trace))
    return value


class _Expectation:
    """Tells whether a condition on inputs has the value that it had when it was traced."""

    def __init__(self, condition: _Look, value: bool) -> None:
        self.condition = condition
        self.value = value

    def __call__(self, *inputs: torch.Tensor) -> bool:
        """Return True if it has; False if it cannot be computed, for then tracing tells the user why."""
        return self.condition([_original(tensor) for tensor in inputs]) == self.value


class _Look:
    """Computes a condition as the model does at the branch that is traced now, be it in autocast or not."""

    def __init__(self, condition: fx.GraphModule, inputs: Iterable[fx.Node]) -> None:
        self._condition = condition
        devices = sorted({"cpu", *(_real(node).device.type for node in inputs)})
        self._autocast = [
            (each, torch.get_autocast_dtype(each), torch.is_autocast_enabled(each))
            for each in devices
            if torch.amp.is_autocast_available(each)
        ]

    def __call__(self, inputs: Collection[torch.Tensor]) -> bool | None:
        """Return the value for these inputs, or None if it cannot be computed."""
        try:
            with ExitStack() as stack:
                for each in (torch.no_grad(), without_torch_function(), _on_real_tensors()):
                    stack.enter_context(each)
                for device, dtype, is_enabled in self._autocast:
                    if is_enabled or torch.is_autocast_enabled(device):
                        stack.enter_context(torch.autocast(device, dtype, enabled=is_enabled))
                return bool(self._condition(*inputs))
        except Exception:  # whatever it is, the model raises it again when it is traced
            return None


def _value_without_chance(condition: _Look, inputs: Collection[torch.Tensor]) -> bool | None:
    """Return the value of a condition; None also if it draws random numbers, which only the model's own run may do."""
    with _on_real_tensors():
        before = torch.get_rng_state()
        value = condition(inputs)
        if torch.equal(before, torch.get_rng_state()):
            return value
        torch.set_rng_state(before)
        return None


def _on_real_tensors() -> AbstractContextManager[Any]:
    """Compute on tensors with data, also where the call is made on fakes."""
    return nullcontext() if branches.originals is None else without_modes()


def _original(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with data that a fake stands for, or `tensor` if it is not known or no fake."""
    return tensor if branches.originals is None else branches.originals.get(id(tensor), tensor)


def _excerpt(nodes: Collection[fx.Node], result: fx.Node) -> fx.GraphModule:
    """Return the part of a graph that consists of `nodes`, which are in order."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in nodes:
        is_input = node.op == "placeholder"
        copies[node] = graph.placeholder(node.name) if is_input else graph.node_copy(node, copies.__getitem__)
    graph.output(copies[result])
    return fx.GraphModule({}, graph)


def _cheap_ancestors(node: fx.Node) -> list[fx.Node] | None:
    """Return `node` and what it follows from, in order; None unless it is inputs without gradients and a few ops."""
    pending, seen = [node], set[fx.Node]()
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        if len(seen) > _MOST_NODES or not _is_plain(current):
            return None
        pending += current.all_input_nodes
    nodes = sorted(seen)
    made_bytes = _most_bytes(nodes)
    return nodes if made_bytes <= _MOST_BYTES or made_bytes <= _gradient_bytes() else None


def _most_bytes(nodes: Sequence[fx.Node]) -> int:
    """Return the most bytes that the results of `nodes`, which are in order, take at a time."""
    last_uses = {each: position for position, node in enumerate(nodes) for each in node.all_input_nodes}
    held_bytes = most_bytes = 0
    for position, node in enumerate(nodes):
        held_bytes += _num_bytes(node)
        most_bytes = max(most_bytes, held_bytes)
        held_bytes -= sum(_num_bytes(each) for each in node.all_input_nodes if last_uses[each] == position)
    return most_bytes


def _gradient_bytes() -> int:
    return sum(each.numel() * each.element_size() for each in branches.parameters() if each.requires_grad)


def _are_unchanged(nodes: Collection[fx.Node]) -> bool:
    """Return True if nothing traced so far has written to these values, nor to others that share their memory."""
    for node in nodes:
        if _is_written(node) or any(_may_write(user) for user in node.users):
            return False
    own = {storage_key(_real(node)) for node in nodes if node.op == "placeholder"}
    inputs = next(iter(nodes)).graph.find_nodes(op="placeholder")
    written = (real_input(node) for node in inputs if _is_written(node))
    return not any(storage_key(_original(tensor)) in own for tensor in written if tensor is not None)


def _may_write(user: fx.Node) -> bool:
    name = getattr(user.target, "__name__", user.target)
    return changes_its_input(any_overload(user.target)) or any(norm in str(name) for norm in _NORMS_THAT_WRITE)


def _is_written(node: fx.Node) -> bool:
    example = node.meta.get("example_value")
    return isinstance(example, torch.Tensor) and (example.is_inference() or version_of(example) > 0)


def _real(node: fx.Node) -> torch.Tensor:
    tensor = real_input(node)
    assert tensor is not None, "only inputs that are tensors are plain"
    return _original(tensor)


def _is_plain(node: fx.Node) -> bool:
    example = node.meta.get("example_value")
    if node.op == "placeholder":
        tensor = real_input(node)
        if tensor is None or tensor.requires_grad:
            return False
        return not isinstance(_original(tensor), FakeTensor)
    if node.op not in ("call_function", "call_method") or not isinstance(example, torch.Tensor | int | float | bool):
        return False
    # What an op of the user's does, and what it remembers, is not known.
    return getattr(any_overload(node.target), "namespace", "aten") == "aten"


def _num_bytes(node: fx.Node) -> int:
    """Return the size of what `node` makes, which is nothing for inputs; views count as if they were copies."""
    if node.op == "placeholder":
        return 0
    example = node.meta.get("example_value")
    return example.numel() * example.element_size() if isinstance(example, torch.Tensor) else 0


decide_branches(_expected, active=lambda: branches.variants is not None)
