"""Random numbers in recomputation: every copy of a random op replays the first run's numbers.

Before its first run the generator's state is taken; a recomputation runs with that state and puts the caller's state
back, so that the caller's stream goes on as in plain training.
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
