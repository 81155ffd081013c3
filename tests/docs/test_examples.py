"""The examples run as they are, in a process of their own, and save what they say."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.paths import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NEEDS = {
    "accelerate_loop": ["accelerate"],
    "ddp": [],
    "distributed_checkpoint": [],
    "fsdp2": [],
    "lightning_callback": ["lightning"],
    "peft_lora": ["peft", "transformers"],
    "tensor_parallel": [],
    "timm_loop": ["timm"],
    "trainer": ["transformers", "accelerate"],
}
QUICK = ("accelerate_loop", "ddp", "distributed_checkpoint", "fsdp2", "tensor_parallel")
# They are started by torchrun.
PROCESSES = {"ddp": 2, "distributed_checkpoint": 2, "fsdp2": 2, "tensor_parallel": 2}
# What they may take of the plain peak.
SHARES = {"distributed_checkpoint": 0.65, "fsdp2": 0.65}
PEAKS = re.compile(r"peak ([\d.]+) MiB plain, ([\d.]+) MiB planned, (\d+)% saved")
# Beside a CPU build of torch, torchvision's wheel imports only after its two ops have been declared.
RUN = """
import runpy, sys
sys.path.insert(0, {benchmarks!r})
from zoo import prepare_torchvision
prepare_torchvision()
runpy.run_path({example!r}, run_name="__main__")
"""


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_short_and_listed(example: Path) -> None:
    assert len(example.read_text().splitlines()) <= 40
    assert example.stem in NEEDS
    assert any(example.name in page.read_text() for page in (ROOT / "docs").glob("*.md"))


def run(example: Path, folder: Path) -> str:
    code = RUN.format(benchmarks=str(ROOT / "benchmarks"), example=str(example))
    command = [sys.executable, "-c", code]
    if example.stem in PROCESSES:
        count = f"--nproc-per-node={PROCESSES[example.stem]}"
        launch = ["torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
        command = [sys.executable, "-m", *launch, count, str(example)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize(
    "example",
    [pytest.param(each, marks=() if each.stem in QUICK else pytest.mark.slow, id=each.stem) for each in EXAMPLES],
)
def test_example_saves_memory(example: Path, tmp_path: Path) -> None:
    for package in NEEDS[example.stem]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    printed = run(example, tmp_path)
    found = PEAKS.search(printed)
    assert found, printed
    assert "False" not in printed
    plain, planned = float(found[1]), float(found[2])
    assert 0.40 < planned / plain <= SHARES.get(example.stem, 0.50) + 0.01, printed
    assert abs(100 * (1 - planned / plain) - float(found[3])) < 1
