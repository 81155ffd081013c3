"""The autograd engine and its graph: running backward for one block, the age of nodes, hooks on tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from math import prod
from typing import Any

from torch import Tensor
from torch._C._autograd import (
    _get_current_graph_task_keep_graph,
    _pop_saved_tensors_default_hooks,
    _push_saved_tensors_default_hooks,
    _top_saved_tensors_default_hooks,
)
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward


def gradients_from(
    start: Tensor, gradient: Tensor, inputs: Sequence[Tensor | GradientEdge], *, retain: bool
) -> tuple[Tensor | None, ...]:
    """Return the gradients of `inputs` when backward begins at `start` with `gradient`.

    It does what `torch.autograd.grad` does without checking its arguments once more, which for a small block takes
    longer than the backward itself.
    """
    return _engine_run_backward((start,), (gradient,), retain, False, tuple(inputs), True, accumulate_grad=False)


def graph_is_retained() -> bool:
    """Return True if the backward that runs was called with `retain_graph=True`, which nothing public tells."""
    return _get_current_graph_task_keep_graph()


def sequence_number(node: Any) -> int:
    """Return a number that grows with every node of the graph that is made, to tell older nodes from newer ones."""
    assert isinstance(node, Node)
    return node._sequence_nr()


def next_nodes(node: Any) -> list[Any]:
    """Return the nodes that the gradients of `node` go to."""
    return [each for each, _ in node.next_functions if each is not None]


def around_backward(
    node: Any, before: Callable[[Sequence[Any]], None], after: Callable[[Sequence[Any]], None]
) -> Callable[[], None]:
    """Let `before` be called with what arrives at `node` before it runs, and `after` with what it has made.

    Returns:
        What takes both away again. It does not hold the node, and neither may `before` and `after`.
    """
    assert isinstance(node, Node)

    def enter(arriving: tuple[Tensor, ...]) -> None:
        before(arriving)

    def leave(made: tuple[Tensor, ...], _: tuple[Tensor, ...]) -> None:
        after(made)

    handles = (node.register_prehook(enter), node.register_hook(leave))

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


def next_edges(node: Any) -> list[tuple[Any, int]]:
    """Return, for each gradient that `node` makes, the node that it goes to, or None, and which of its inputs it is."""
    return list(node.next_functions)


def leaf_gradient(node: Any) -> Tensor | None:
    """Return the gradient of the leaf of `node`, or None if there is none yet."""
    gradient: Tensor | None = node.variable.grad
    return gradient


def is_leaf_node(node: Any) -> bool:
    """Return True if `node` accumulates the gradient of a leaf."""
    return hasattr(node, "variable")


def has_gradient(node: Any) -> bool:
    """Return True if the leaf of `node` has a gradient already, to which the next one is added."""
    return node.variable.grad is not None


def gradient_bytes(node: Any) -> int:
    """Return the bytes of the gradients that arrive at `node`."""
    return sum(prod(map(int, each.shape)) * each.dtype.itemsize for each in node._input_metadata)


def saved_tensors(node: Any) -> list[Tensor]:
    """Return the tensors that `node` has saved for its backward; none if it has run already."""
    found: list[Any] = []
    try:
        if hasattr(node, "saved_tensors"):
            found += node.saved_tensors
        kind: Any = type(node)
        for name in _saved_names(kind):
            value = getattr(node, name)
            found += value if isinstance(value, list | tuple) else (value,)
    except RuntimeError:  # how a node says that what it saved is freed, or was changed in place
        pass
    return [each for each in found if isinstance(each, Tensor)]


@cache
def _saved_names(kind: Any) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_saved_"))


def before_backward(tensor: Tensor, call: Callable[[], None]) -> None:
    """Let `call` be called when the backward of `tensor` begins."""
    node = tensor.grad_fn
    assert node is not None
    node.register_prehook(lambda _: call())


def after_backward(call: Callable[[], None]) -> None:
    """Let `call` be called when the backward pass that is running has ended without an error."""
    Variable._execution_engine.queue_callback(call)


@contextmanager
def tensor_hooks_off(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Take the hooks of `tensors` away for a while; a hook can be removed by the handle alone, which others have."""
    hooked = [(each, hooks) for each in tensors if (hooks := each._backward_hooks)]
    contents = [dict(hooks) for _, hooks in hooked]
    for _, hooks in hooked:
        hooks.clear()
    try:
        yield
    finally:
        for (_, hooks), own in zip(hooked, contents, strict=True):
            hooks.update(own)


def saved_tensors_hook_module() -> str | None:
    """Return the module of the innermost `saved_tensors_hooks` around this call, or None if there are none."""
    hooks = _top_saved_tensors_default_hooks(True)
    return None if hooks is None else str(getattr(hooks[0], "__module__", "?"))


@contextmanager
def innermost_hooks_off() -> Iterator[None]:
    """Take the innermost `saved_tensors_hooks` around this call away for a while."""
    hooks = _top_saved_tensors_default_hooks(True)
    if hooks is None:
        yield
        return
    _pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        _push_saved_tensors_default_hooks(*hooks)
