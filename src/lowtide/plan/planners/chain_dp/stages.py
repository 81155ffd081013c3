"""What the layers of a chain cost in a nested schedule, as rows of figures.

Layer `k` of `n` reads `outputs[k]` and makes `outputs[k + 1]`; `gradients[k]` belongs to `outputs[k]`. Bytes may be in
any whole unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from math import ceil

from lowtide.errors import InvalidOptionError
from lowtide.plan.planners.chain_dp.operations import Action, Operation

Seconds = tuple[float, ...]
Bytes = tuple[int, ...]
_BYTES = ("outputs", "gradients", "saved", "pass_bytes", "keep_bytes", "leaf_bytes", "backward_bytes")


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The figures of a chain's layers; no figure of bytes counts the layer's input.

    Attributes:
        first_seconds: Time of each layer in the forward pass.
        pass_seconds: Time to run it again for its output only.
        keep_seconds: Time to run it again for its output and all that its backward reads.
        leaf_seconds: Time to run it again for what its backward reads, which follows at once.
        backward_seconds: Time of its backward.
        outputs: Bytes of the chain's input and of each layer's output.
        gradients: Bytes that backward has made and still needs when it comes to each output.
        saved: Bytes of a layer's output and of all that its backward reads.
        pass_bytes: Most bytes while it runs and keeps nothing, its output included.
        keep_bytes: Most bytes while it runs and keeps all, which is included.
        leaf_bytes: Most bytes while what its backward reads is made and its backward runs, gradients included.
        backward_bytes: Most bytes while its backward runs after all was kept, saved bytes and gradients included.
    """

    first_seconds: Seconds
    pass_seconds: Seconds
    keep_seconds: Seconds
    leaf_seconds: Seconds
    backward_seconds: Seconds
    outputs: Bytes
    gradients: Bytes
    saved: Bytes
    pass_bytes: Bytes
    keep_bytes: Bytes
    leaf_bytes: Bytes
    backward_bytes: Bytes

    def __post_init__(self) -> None:
        """Check lengths and signs."""
        n = len(self.first_seconds)
        for field in fields(self):
            row = getattr(self, field.name)
            expected = n + 1 if field.name in ("outputs", "gradients") else n
            if not n or len(row) != expected:
                raise InvalidOptionError(
                    f"The chain has {n} layers and {len(row)} figures of {field.name}; there must be at least one "
                    f"layer and {expected} figures."
                )
            if not all(0 <= figure < float("inf") for figure in row):
                raise InvalidOptionError(f"The figures of {field.name} must be finite and at least 0: {row!r:.80}.")

    def __len__(self) -> int:
        return len(self.first_seconds)

    @property
    def plain_bytes(self) -> int:
        """Most bytes if every layer keeps all, apart from the chain's input."""
        n = len(self)
        before = [0, *accumulate(self.saved)]
        forward = [before[k] + self.keep_bytes[k] + self.gradients[n] for k in range(n - 1)]
        backward = [before[k] + self.backward_bytes[k] for k in range(n - 1)]
        return max(*forward, *backward, before[n - 1] + self.leaf_bytes[n - 1], 0)

    def rounded_up(self, unit: float) -> Stages:
        """Return the chain with bytes in multiples of `unit`, each rounded up: what fits rounded fits in bytes."""
        rows = {name: tuple(ceil(size / unit) for size in getattr(self, name)) for name in _BYTES}
        return replace(self, **rows)


def operations_seconds(stages: Stages, operations: Sequence[Operation]) -> float:
    """Return the time of `operations`."""
    total = 0.0
    forward = True
    for place, (action, layer) in enumerate(operations):
        if action is Action.BACKWARD:
            forward = False
            total += stages.backward_seconds[layer]
        elif forward:
            total += stages.first_seconds[layer]
        elif action is not Action.KEEP_ALL:
            total += stages.pass_seconds[layer]
        elif operations[place + 1] == (Action.BACKWARD, layer):
            total += stages.leaf_seconds[layer]
        else:
            total += stages.keep_seconds[layer]
    return total


def paper_stages(
    *,
    forward_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    outputs: Sequence[int],
    inside: Sequence[int] | None = None,
    forward_bytes: Sequence[int] | None = None,
    backward_bytes: Sequence[int] | None = None,
    gradients: Sequence[int] | None = None,
) -> Stages:
    """Return the chain in the model of the rotor paper, in which every run of a layer costs the same.

    Args:
        forward_seconds: Time of each layer.
        backward_seconds: Time of its backward.
        outputs: Bytes of the chain's input and of each layer's output.
        inside: Bytes that its backward reads beside input and output; none by default.
        forward_bytes: Bytes that exist only while it runs; none by default.
        backward_bytes: Bytes that exist only while its backward runs; none by default.
        gradients: Bytes of the gradient of the chain's input and of each output; as `outputs` by default.
    """
    n = len(forward_seconds)
    none = (0,) * n
    within, ahead, back = (tuple(row or none) for row in (inside, forward_bytes, backward_bytes))
    slopes = tuple(outputs if gradients is None else gradients)
    if not len(outputs) == len(slopes) == n + 1 or not len(within) == len(ahead) == len(back) == n:
        raise InvalidOptionError(
            f"The chain has {n} layers; give {n + 1} outputs and gradients (its input comes first) and {n} figures of "
            "everything else."
        )
    saved = tuple(outputs[k + 1] + within[k] for k in range(n))
    keep = tuple(saved[k] + ahead[k] for k in range(n))
    behind = tuple(saved[k] + slopes[k] + slopes[k + 1] + back[k] for k in range(n))
    seconds = tuple(forward_seconds)
    return Stages(
        first_seconds=seconds,
        pass_seconds=seconds,
        keep_seconds=seconds,
        leaf_seconds=seconds,
        backward_seconds=tuple(backward_seconds),
        outputs=tuple(outputs),
        gradients=slopes,
        saved=saved,
        pass_bytes=tuple(outputs[k + 1] + ahead[k] for k in range(n)),
        keep_bytes=keep,
        leaf_bytes=tuple(max(keep[k] + slopes[k + 1], behind[k]) for k in range(n)),
        backward_bytes=behind,
    )
