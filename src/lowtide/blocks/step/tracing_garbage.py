"""What the compiler leaves behind in a call: objects that refer to each other and to values that it has traced.

The collector frees them some time. Until then they hold tensors that the code between blocks has let go of: the step
would take more than its later repetitions, and what it shows of its gaps would be too much.

Garbage from before a call has to be gone when its recording begins: the profiler remembers the size of what an earlier
recording saw, so that tensors which the collector frees in this one would lower its level.
"""

from __future__ import annotations

import gc


class TracingGarbage:
    """Frees what compiling has left behind, in the same call.

    A full collection takes up to a second, and every block of a call may be compiled. So what has survived the first
    one of a call is not looked at again in that call.
    """

    def __init__(self) -> None:
        self._is_there = False
        self._has_frozen = False

    def note(self) -> None:
        """Note that something is compiled."""
        self._is_there = True

    def free(self) -> None:
        """Free what was left behind; nothing is being compiled now."""
        if not self._is_there:
            return
        self._is_there = False
        gc.collect()
        # Where the program itself has frozen objects, they are not ours to release.
        if self._has_frozen or not gc.get_freeze_count():
            gc.freeze()
            self._has_frozen = True

    def free_before_recording(self) -> None:
        """Free what was left behind before a recording, which begins now; compiling may go on in it."""
        is_there, self._is_there = self._is_there, True
        self.free()
        self._is_there = is_there

    def end_call(self) -> None:
        """Let the collector look at everything again."""
        if self._has_frozen:
            gc.unfreeze()
            self._has_frozen = False
