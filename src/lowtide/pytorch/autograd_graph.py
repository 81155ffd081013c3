"""The autograd engine and its graph: running backward for one block, the age of nodes, hooks on tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch._C._autograd import _get_current_graph_task_keep_graph, _top_saved_tensors_default_hooks
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
