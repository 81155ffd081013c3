"""Progress of long planning: one line on stderr, shown only if stderr is a terminal; and messages for the logger."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from types import TracebackType

# Called with what is being done, in a few words.
Progress = Callable[[str], None]

# Work that takes less shows nothing: a line that flashes up tells nobody anything.
_SHOWN_AFTER_SECONDS = 1.0
# The line is cut to the terminal's width, so that it does not wrap and can be overwritten, and never longer than this.
_MOST_WIDTH = 100
_LOGGER = logging.getLogger("lowtide")


def silent(message: str) -> None:
    """Ignore a progress message."""
    del message


def say(message: str) -> None:
    """Hand a message to the logger "lowtide", which shows it where the program has asked for messages of this level."""
    _LOGGER.info(message)


def line_width() -> int:
    """Return how many characters of a line can be overwritten on stderr."""
    try:
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError, AttributeError):
        return _MOST_WIDTH
    # A terminal that does not know its width says 0; in the last column some wrap.
    return min(max(columns - 1, 1), _MOST_WIDTH) if columns else _MOST_WIDTH


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
        width = line_width()
        sys.stderr.write("\r" + f"lowtide: {message} ({seconds:.0f} s)"[:width].ljust(width))
        sys.stderr.flush()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the line."""
        if self._shown:
            sys.stderr.write("\r" + " " * line_width() + "\r")
            sys.stderr.flush()
