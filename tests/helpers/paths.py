"""Where the repository lies, and the published graphs beside it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
BENCHMARKS = ROOT / "benchmarks"
GRAPHS = ROOT.parent / "shared" / "graphs"


def published_graph(file: str) -> Path:
    """Return the path of a published graph; where it is missing, skip the test, or fail it under CI.

    A skip is easily overlooked there, and with it the only tests against the figures of other authors.
    """
    path = GRAPHS / file
    if not path.exists():
        missing = f"{path} is missing: the published graphs belong in a folder beside the repository"
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail(missing)
        pytest.skip(missing)
    return path
