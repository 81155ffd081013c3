"""The operations of a nested schedule: what is done with which layer of a chain, in order.

Layers are numbered from 0. A sequence begins with one forward operation for every layer, in order: the forward pass.
After that come backward operations from the last layer to the first, and between them forward operations that
recompute what the next backward operations need.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Action(Enum):
    """What is done with a layer."""

    PASS = "pass"
    """Run it forward; keep neither its input nor what it makes inside."""
    KEEP_INPUT = "keep_input"
    """Run it forward; keep its input, so that it can be run again from there."""
    KEEP_ALL = "keep_all"
    """Run it forward; keep its input and all that its backward reads."""
    BACKWARD = "backward"
    """Run it backward; what was kept for it is freed."""


class Operation(NamedTuple):
    """One action on one layer."""

    action: Action
    layer: int


def keep_everything(layers: int) -> list[Operation]:
    """Return the operations of plain training."""
    forward = [Operation(Action.KEEP_ALL, layer) for layer in range(layers)]
    return forward + [Operation(Action.BACKWARD, layer) for layer in reversed(range(layers))]
