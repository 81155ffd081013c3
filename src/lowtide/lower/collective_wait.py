"""Waiting for a collective on the CPU until it has let go of its buffers, too.

There a thread of the process group runs it. That thread says that the result is there before it lets go of what it
holds; on a busy machine it comes to that milliseconds later, when the buffers of the next ops are there already. The
peak of a step would depend on that.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from lowtide.pytorch.process_groups import wait_for
from lowtide.pytorch.storages import is_held_by_others


@dataclass(frozen=True, slots=True)
class ReleasePolicy:
    """How long is waited for a thread that is about to let go of its buffers.

    Attributes:
        seconds: On an idle machine it takes microseconds, on one with five busy processes for each core up to 40
            milliseconds. Where somebody else holds the result, it never happens, so the wait must end.
    """

    seconds: float = 0.1


POLICY = ReleasePolicy()


def wait_until_released(started: torch.Tensor, *held: torch.Tensor) -> torch.Tensor:
    """Return the result of a collective that was started, once nobody but the caller holds it.

    Args:
        started: What the collective returned.
        held: What it was given and holds. The caller keeps it so long, too, so that it is the caller that frees it:
            what another thread frees, it frees later.
    """
    del held
    result = wait_for(started)
    # The caller's name and the argument's are for the same object.
    if is_held_by_others(result):
        last = time.perf_counter() + POLICY.seconds
        while is_held_by_others(result) and time.perf_counter() < last:
            time.sleep(0)
    return result
