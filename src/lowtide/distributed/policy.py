"""How long ranks wait for each other."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WaitingPolicy:
    """How long a rank waits for others before it says that they do not come.

    Attributes:
        beat_seconds: A rank at work for all gives a sign of life so often.
        silent_seconds: A rank at work that gives no sign for so long is taken to be gone. Its sign comes from a thread
            of its own, which a busy machine can delay by seconds, hardly by half a minute.
        meeting_seconds: A rank that must run the same collectives and has not come to them for so long is taken not to
            come at all. It may have to load data first; PyTorch's own collectives wait for 10 to 30 minutes.
        shortest_pause: The first pause between two looks at the store, in seconds; each is twice as long as the last.
        longest_pause: The longest one: no rank becomes a straggler by it.
    """

    beat_seconds: float = 2.0
    silent_seconds: float = 45.0
    meeting_seconds: float = 600.0
    shortest_pause: float = 0.002
    longest_pause: float = 0.05


POLICY = WaitingPolicy()
