"""Models in DistributedDataParallel: what is wrapped, and what their buckets take."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lowtide
from helpers.ranks import run_on_ranks
from lowtide.errors import InvalidOptionError, LowtideError
from lowtide.plan.core.account import MemoryAccount


class Net(nn.Module):
    """A class of its own: the compiler leaves containers of PyTorch's alone that are called by code which it skips."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def container_and_inside(rank: int) -> None:
    inner = net()
    model = DistributedDataParallel(inner)
    batch = torch.randn(64, 512)
    assert lowtide.wrap(model, budget="100%", planner="greedy") is model
    model(batch).sum().backward()
    assert lowtide.plans(model) == lowtide.plans(inner)
    assert len(lowtide.plans(model)) == 1
    assert lowtide.unwrap(model) is model
    with pytest.raises(LowtideError, match="not wrapped"):
        lowtide.plans(inner)
    # Nothing of the container is traced or run.
    plan = lowtide.plan(model, (batch,), memory="64MiB", planner="greedy")
    assert plan.account is not None
    weights = sum(each.numel() * 4 for each in inner.parameters())
    assert plan.account.bucket_bytes == plan.account.parameter_bytes == weights
    assert plan.account.peak_bytes >= 3 * weights
    assert "gradient buckets" in str(plan)
    other = MemoryAccount.from_dict(plan.account.to_dict())
    assert other == plan.account


def cut_graph(rank: int) -> None:
    model = torch.compile(
        DistributedDataParallel(net()),
        backend="lowtide",
        options={"budget": "100%", "planner": "greedy"},
        dynamic=False,
    )
    with pytest.raises(Exception, match="optimize_ddp = False") as caught:
        model(torch.randn(64, 512))
    assert isinstance(getattr(caught.value, "inner_exception", caught.value), InvalidOptionError)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(optimize_ddp=False):
        model(torch.randn(64, 512)).sum().backward()


def test_a_container_is_wrapped_as_what_is_inside() -> None:
    run_on_ranks(container_and_inside)


def test_a_compiler_that_cuts_graphs_is_refused() -> None:
    run_on_ranks(cut_graph)


def test_an_account_without_buckets_is_written_as_before() -> None:
    account = MemoryAccount(1, 2, 3, 4, 5)
    assert "bucket_bytes" not in account.to_dict()
    assert MemoryAccount.from_dict(account.to_dict()) == account
