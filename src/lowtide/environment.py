"""Environment variables: every one that lowtide reads or sets, and what it means."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

# Set in the process that proves bounds, so that it does not start another one.
PROVER_PROCESS = "LOWTIDE_PROVER_PROCESS"
_DEBUG = "LOWTIDE_DEBUG"


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


def plan_cache_is_on() -> bool:
    """Return True unless `LOWTIDE_PLAN_CACHE=0` says that plans are not kept on disk."""
    return os.environ.get("LOWTIDE_PLAN_CACHE", "1") not in ("0", "")


def patience_text() -> str | None:
    """Return what `LOWTIDE_PATIENCE` says about how long first calls may wait for the best plan, or None."""
    return os.environ.get("LOWTIDE_PATIENCE") or None


def shows_compiler_messages() -> bool:
    """Return True if the user has asked for PyTorch's own messages: `LOWTIDE_DEBUG=1`, or PyTorch's `TORCH_LOGS`."""
    return os.environ.get(_DEBUG, "0") not in ("0", "") or bool(os.environ.get("TORCH_LOGS"))


def show_compiler_messages() -> None:
    """Show PyTorch's own messages in this process, unless the user has decided otherwise."""
    os.environ.setdefault(_DEBUG, "1")


def hide_profiler_messages() -> None:
    """Keep the profiler from writing two lines to stderr per session; it reads this before its first one."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
