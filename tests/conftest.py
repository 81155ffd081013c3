"""What holds for all tests: a cache folder of their own, time limits, and helpers whose asserts explain themselves."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest

CACHE = "LOWTIDE_CACHE_DIR"
PATIENCE = "LOWTIDE_PATIENCE"
SLOW_SECONDS = 3600

pytest.register_assert_rewrite("helpers")


def pytest_configure(config: pytest.Config) -> None:
    """Keep measured costs and plans away from the user's cache; processes of pytest-xdist share one folder."""
    # What a test sees must not depend on how fast the machine is; tests of first plans say how long they wait.
    os.environ.setdefault(PATIENCE, "full")
    if CACHE not in os.environ:
        os.environ[CACHE] = tempfile.mkdtemp(prefix="lowtide-tests-")
        config.add_cleanup(remove_cache)


def remove_cache() -> None:
    shutil.rmtree(os.environ.pop(CACHE), ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give slow tests that have no time limit of their own a long one."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_SECONDS))
