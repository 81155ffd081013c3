"""Models far larger than this machine are planned without their memory."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from helpers.paths import TESTS

CHILD = TESTS / "helpers" / "plan_large.py"


def planned(layers: int, batch: int, memory: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, CHILD, str(layers), str(batch), memory], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["peak_bytes"] <= found["budget_bytes"] < found["baseline_peak_bytes"], "nothing had to be recomputed"
    return found


def test_layers_of_a_large_transformer_are_planned_in_little_memory() -> None:
    # Two layers of 0.86 billion parameters each; eight sequences of 4096 tokens do not fit plainly.
    found = planned(2, 8, "45GiB")
    assert found["training_bytes"] <= 45 * 2**30
    assert found["resident_bytes"] < 2 * 2**30


@pytest.mark.slow
def test_seventy_billion_parameters_are_planned_in_8_gib() -> None:
    found = planned(80, 8, "1TiB")
    assert found["parameters"] > 68e9
    assert found["training_bytes"] <= 2**40
    assert found["resident_bytes"] < 8 * 2**30
    # By blocks it takes about 10 s; as one graph it was about a minute.
    assert found["seconds"] < 30
