"""Hooks that reduce buckets in another way than a plain all-reduce: what they allocate, by what is known of each.

A hook is never called to be measured: it communicates. What it makes for a bucket is taken to live to the end of the
step, since nobody knows when the other processes are done with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Hook = Callable[..., Any]


@dataclass(frozen=True)
class HookMemory:
    """What a hook takes, in bytes for every byte of gradients.

    Attributes:
        in_step: From when a bucket is full to the end of the step.
        always: Between steps as well.
    """

    in_step: float = 0.0
    always: float = 0.0


def memory_of_hooks(hooks: Sequence[tuple[Hook, object]], item_bytes: int) -> HookMemory | None:
    """Return what hooks take, each given with its state; None if one of them is not known.

    Args:
        hooks: The hooks.
        item_bytes: The least size of a number in the gradients.
    """
    found = [_memory_of(hook, state, item_bytes) for hook, state in hooks]
    known = [each for each in found if each is not None]
    if len(known) < len(found):
        return None
    return HookMemory(sum(each.in_step for each in known), sum(each.always for each in known))


def _memory_of(hook: Hook, state: Any, item_bytes: int) -> HookMemory | None:
    # Here, because PyTorch can be built without them.
    from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, powerSGD_hook

    if hook in (default_hooks.allreduce_hook, debugging_hooks.noop_hook):
        return HookMemory()
    if hook in (default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook):
        return HookMemory(in_step=2 / item_bytes)
    if hook is powerSGD_hook.powerSGD_hook:
        # A bucket is copied to see what compression loses, and the loss is kept for the next step. The factors are
        # small, and parameters with one dimension, which are not compressed, too.
        return HookMemory(in_step=1.0, always=1.0) if state.use_error_feedback else HookMemory()
    return None
