"""A cache folder of their own for the tests, removed at the end; and helpers whose asserts explain themselves."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest

CACHE = "LOWTIDE_CACHE_DIR"

pytest.register_assert_rewrite("helpers")


def pytest_configure(config: pytest.Config) -> None:
    """Keep measured costs and plans away from the user's cache; processes of pytest-xdist share one folder."""
    if CACHE not in os.environ:
        os.environ[CACHE] = tempfile.mkdtemp(prefix="lowtide-tests-")
        config.add_cleanup(remove_cache)


def remove_cache() -> None:
    shutil.rmtree(os.environ.pop(CACHE), ignore_errors=True)
