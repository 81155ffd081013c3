"""Progress of long planning: it fits the terminal, whatever its width, and is silent elsewhere."""

from __future__ import annotations

import io
import os
from typing import Any

import pytest

from lowtide import progress


class Terminal(io.StringIO):
    """A stderr that is a terminal."""

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 2


def shown(monkeypatch: pytest.MonkeyPatch, columns: int | None, stderr: Any) -> str:
    def size(number: int) -> os.terminal_size:
        del number
        if columns is None:
            raise OSError
        return os.terminal_size((columns, 24))

    monkeypatch.setattr(progress, "_SHOWN_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(os, "get_terminal_size", size)
    monkeypatch.setattr("sys.stderr", stderr)
    with progress.ProgressLine() as line:
        line("measuring op 3 of 120: " + "x" * 200)
    return str(stderr.getvalue())


@pytest.mark.parametrize(("columns", "width"), [(40, 39), (60, 59), (80, 79), (101, 100), (200, 100), (0, 100)])
def test_a_line_does_not_wrap(monkeypatch: pytest.MonkeyPatch, columns: int, width: int) -> None:
    text = shown(monkeypatch, columns, Terminal())
    assert [len(each) for each in text.split("\r") if each] == [width, width]
    assert "\n" not in text
    assert text.endswith("\r")


def test_a_terminal_without_a_width_gets_a_usual_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert max(map(len, shown(monkeypatch, None, Terminal()).split("\r"))) == 100


def test_what_is_no_terminal_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, 80, io.StringIO()) == ""
