"""Files that are replaced in one step."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lowtide.errors import PlanFileError


@contextmanager
def replace_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a new file with the suffix of `path`, which takes the place of `path` when the block ends without an error.

    Readers of `path` see the old content or all of the new one. An error leaves what was there, and nothing else.
    """
    target = Path(path)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.stem}.", suffix=target.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def replace_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` to `path` in one step; an `OSError` leaves what was there before."""
    with replace_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | os.PathLike[str], data: dict[str, Any]) -> None:
    """Write `data` to `path` in one step; raise `PlanFileError` if that cannot be done."""
    try:
        replace_text(path, json.dumps(data, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise PlanFileError(f"Cannot write {os.fspath(path)!r}: {error.strerror}.") from None
