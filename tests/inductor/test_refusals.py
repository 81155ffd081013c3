"""What engine="inductor" does not do is refused before any work, in words that say what to do."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import lowtide
from lowtide.errors import CaptureError, InvalidModelError, InvalidOptionError, UnsupportedTorchError


def linear():
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def test_the_engine_has_a_name():
    with pytest.raises(InvalidOptionError, match="'exact' and 'inductor'"):
        lowtide.wrap(linear(), budget="50%", engine="triton")
    with pytest.raises(InvalidOptionError, match="engine=3"):
        lowtide.wrap(linear(), budget="50%", engine=3)


@pytest.mark.parametrize("blocks", [["0", "2"], [nn.Linear]])
def test_blocks_are_refused(blocks):
    with pytest.raises(InvalidOptionError, match="one graph"):
        lowtide.wrap(linear(), budget="50%", engine="inductor", blocks=blocks)


def test_saved_plans_are_refused(tmp_path):
    plan = lowtide.plan(Loss(), (torch.ones(2, 8),), budget="100%", planner="keep_all", costs="analytic")
    with pytest.raises(InvalidOptionError, match="plan="):
        lowtide.wrap(linear(), plan=plan, engine="inductor")


def test_verifying_is_refused():
    with pytest.raises(InvalidOptionError, match=r"torch\.compile"):
        lowtide.wrap(linear(), budget="50%", engine="inductor", verify=True)


def test_recurrent_modules_are_refused():
    with pytest.raises(InvalidModelError, match="LSTM"):
        lowtide.wrap(nn.Sequential(nn.LSTM(8, 8)), budget="50%", engine="inductor")


@pytest.fixture
def alone():
    """A process group of one process."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_models_that_train_in_several_processes_are_refused():
    with pytest.raises(InvalidModelError, match="DistributedDataParallel"):
        lowtide.wrap(DistributedDataParallel(linear()), budget="90%", engine="inductor")
    sharded = fully_shard(linear())
    with pytest.raises(InvalidModelError, match="fully_shard"):
        lowtide.wrap(sharded, budget="90%", engine="inductor")


class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = linear()

    def forward(self, x):
        return self.inner(x).sum()


class Broken(Loss):
    def forward(self, x):
        x = self.inner[0](x)
        torch._dynamo.graph_break()
        return self.inner[2](x).sum()


def test_models_in_several_graphs_are_refused():
    model = lowtide.wrap(Broken(), budget="90%", engine="inductor", planner="greedy")
    with pytest.raises(CaptureError, match="one graph"):
        model(torch.ones(4, 8))


def test_without_a_compiler_the_error_says_what_to_install():
    from torch._inductor import config, cpp_builder

    cpp_builder.cpp_compiler_search.cache_clear()
    try:
        with config.patch({"cpp.cxx": ("/nowhere/g++",)}):
            with pytest.raises(UnsupportedTorchError, match=r"apt install g\+\+.*exact engine.*needs none"):
                lowtide.wrap(Loss(), budget="90%", engine="inductor")
            model = lowtide.wrap(Loss(), budget="100%", planner="greedy")
            model(torch.ones(4, 8)).backward()
    finally:
        cpp_builder.cpp_compiler_search.cache_clear()


def test_the_exact_engine_does_not_import_the_code_generator():
    code = (
        "import sys, torch, lowtide\n"
        "m = lowtide.wrap(torch.nn.Linear(4, 4), budget='100%', planner='keep_all', costs='analytic')\n"
        "m(torch.ones(2, 4)).sum().backward()\n"
        "assert 'lowtide.inductor.engine' not in sys.modules\n"
        "assert 'lowtide.pytorch.inductor' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
