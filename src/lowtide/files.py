"""Files: written so that a reader sees the old content or all of the new one, and the folder for caches."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from lowtide.errors import PlanFileError


def replace_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` to `path` in one step; an `OSError` leaves what was there before, and nothing else."""
    target = Path(path)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: str | os.PathLike[str], data: dict[str, Any]) -> None:
    """Write `data` to `path` in one step; raise `PlanFileError` if that cannot be done."""
    try:
        replace_text(path, json.dumps(data, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise PlanFileError(f"Cannot write {os.fspath(path)!r}: {error.strerror}.") from None


def cache_dir() -> Path:
    """Return the folder of the cache; it need not exist."""
    if chosen := os.environ.get("LOWTIDE_CACHE_DIR"):
        return Path(chosen)
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or _home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = _home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or _home() / ".cache"
    return Path(base) / "lowtide"


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # an account without a home directory
        return Path(tempfile.gettempdir())
