"""Random numbers in recomputation: every repeated run of a random op replays the numbers of its first run.

The state of the generator is kept before the first run; a repeated run gets it back and leaves the generator as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lowtide import device as devices


def take_rng_state(device: torch.device) -> torch.Tensor:
    """Return the present state of the generator of `device`."""
    return devices.get_rng_state(device)


def replay_random(
    target: Callable[..., Any], state: torch.Tensor, where: torch.device, /, *args: Any, **kwargs: Any
) -> Any:
    """Return `target(*args, **kwargs)` run with the generator in `state`; the generator is left as it was."""
    present = devices.get_rng_state(where)
    devices.set_rng_state(state, where)
    try:
        return target(*args, **kwargs)
    finally:
        devices.set_rng_state(present, where)
