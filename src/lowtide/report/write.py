"""A plan as a file for people: a page, a picture or plain text, by the suffix of the path."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from lowtide.errors import InvalidOptionError, ReportError
from lowtide.files import replace_text

if TYPE_CHECKING:
    from lowtide.analysis.compare import Comparison
    from lowtide.plan.core.result import Plan

PAGES = (".html", ".htm")
PICTURES = (".png", ".svg")
TEXTS = (".txt",)


def write_report(plan: Plan, path: str | os.PathLike[str], comparison: Comparison | None = None) -> None:
    """Write a report of `plan` to `path`, replacing what is there.

    Raises:
        InvalidOptionError: The suffix is none of .html, .png, .svg and .txt, or the comparison is of another graph.
        ReportError: The file cannot be written, or a picture is asked for and matplotlib is not installed.
    """
    suffix = check_report_path(path)
    try:
        if suffix in PICTURES:
            _draw(plan, Path(path))
        elif suffix in PAGES:
            from lowtide.report.page import html_page

            replace_text(path, html_page(plan, comparison))
        else:
            from lowtide.report.words import text_report

            replace_text(path, text_report(plan, comparison) + "\n")
    except OSError as error:
        raise ReportError(
            f"Cannot write {os.fspath(path)!r}: {error.strerror}. Name a file in a folder that exists and that you may "
            "write to."
        ) from None


def check_report_path(path: str | os.PathLike[str]) -> str:
    """Return the suffix of `path` in small letters; raise `InvalidOptionError` if no report has it."""
    suffix = Path(path).suffix.lower()
    if suffix not in (*PAGES, *PICTURES, *TEXTS):
        found = f"the suffix {suffix!r}" if suffix else "no suffix"
        raise InvalidOptionError(
            f"{os.fspath(path)!r} has {found}; a report is a page (.html), a picture (.png, .svg) or plain text (.txt)."
        )
    return suffix


def _draw(plan: Plan, path: Path) -> None:
    from lowtide.report.picture import can_draw, draw, plan_panel

    if not can_draw():
        raise ReportError("Pictures need matplotlib: pip install 'lowtide[picture]'. A page (.html) does not.")
    # As with text files, a reader sees the old picture or the new one.
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.", suffix=path.suffix)
    os.close(handle)
    try:
        draw([plan_panel(plan)], temporary)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
