"""Launchers and frameworks on two processes: a wrapped model trains with the bits of the same loop without lowtide."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch.distributed as dist

LAUNCHED = Path(__file__).with_name("launched.py")
TORCHRUN = ("torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--nproc-per-node=2")
ACCELERATE = ("accelerate.commands.launch", "--num_processes=2", "--num_machines=1", "--main_process_port=0")
# What is launched, with what, the packages that it needs, and the engine that must have been at work.
# accelerate shards models (FSDP2) on accelerators alone.
LAUNCHES: dict[str, tuple[Sequence[str], str, Sequence[str], str]] = {
    "accelerate": ((*ACCELERATE, "--multi_gpu", "--mixed_precision=no"), "accelerate", ["accelerate"], "replica"),
    "accelerate under torchrun": (TORCHRUN, "accelerate", ["accelerate"], "replica"),
    "trainer": (TORCHRUN, "trainer", ["transformers", "accelerate"], "replica"),
    "lightning": (TORCHRUN, "lightning", ["lightning"], "replica"),
    "lightning fsdp2": (TORCHRUN, "lightning-fsdp2", ["lightning"], "fsdp2"),
}

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="PyTorch was built without distributed training")


@pytest.mark.slow
@pytest.mark.parametrize("name", LAUNCHES)
def test_loops_of_others_keep_their_bits_on_two_processes(name: str, tmp_path: Path) -> None:
    launcher, loop, packages, engine = LAUNCHES[name]
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "LOWTIDE_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", *launcher, str(LAUNCHED), loop]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count(f"same bits with {engine}") == 2, done.stdout
