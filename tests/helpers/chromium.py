"""A headless Chromium for tests, or a skip that says how to get one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from helpers.paths import ROOT

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "headless_shell")


def executable() -> str | None:
    """Return the path of a Chromium: from LOWTIDE_CHROMIUM, `make browser`, or the system."""
    named = os.environ.get("LOWTIDE_CHROMIUM")
    if named:
        return named
    local = ROOT / ".browser" / "chromium"
    if local.exists():
        return str(local)
    return next((found for name in NAMES if (found := shutil.which(name))), None)


@contextmanager
def launched() -> Iterator[Any]:
    """Yield a running browser; skip the test where there is none."""
    playwright = pytest.importorskip("playwright.sync_api")
    path = executable()
    with playwright.sync_playwright() as session:
        if path is None and not Path(session.chromium.executable_path).exists():
            pytest.skip("no Chromium: `make browser` gets one, or set LOWTIDE_CHROMIUM to the path of yours")
        browser = session.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()
