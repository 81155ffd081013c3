"""Progress of long planning: one line on stderr, shown only if stderr is a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType

# Called with what is being done, in a few words.
Progress = Callable[[str], None]

# Work that takes less shows nothing: a line that flashes up tells nobody anything.
_SHOWN_AFTER_SECONDS = 1.0
# The line is cut to this width, so that it does not wrap in a usual terminal and can be overwritten.
_WIDTH = 100


def silent(message: str) -> None:
    """Ignore a progress message."""
    del message


class ProgressLine:
    """A line that is overwritten as work goes on and removed at the end; only if stderr is a terminal.

    Example:
        ```python
        with ProgressLine() as progress:
            progress("measuring op 3 of 120")
        ```
    """

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._shown = False

    def __enter__(self) -> ProgressLine:
        """Start the clock; nothing is shown for work that is over at once."""
        return self

    def __call__(self, message: str) -> None:
        """Show `message` and the seconds since the start."""
        seconds = time.monotonic() - self._start
        if not sys.stderr.isatty() or seconds < _SHOWN_AFTER_SECONDS:
            return
        self._shown = True
        sys.stderr.write("\r" + f"lowtide: {message} ({seconds:.0f} s)"[:_WIDTH].ljust(_WIDTH))
        sys.stderr.flush()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the line."""
        if self._shown:
            sys.stderr.write("\r" + " " * _WIDTH + "\r")
            sys.stderr.flush()
