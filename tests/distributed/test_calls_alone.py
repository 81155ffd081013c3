"""A call that one rank makes by itself, to see what happens, ends before it communicates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from helpers.ranks import outcomes_of_ranks
from lowtide.pytorch.collective_stop import CollectiveStop, CollectiveStopError
from lowtide.runtime.eager_errors import eager_error, eager_error_within

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="PyTorch was built without distributed training")

functional = torch.ops._c10d_functional


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


COLLECTIVES: dict[str, Callable[[Tensor], Any]] = {
    "all_reduce": dist.all_reduce,
    "broadcast": lambda x: dist.broadcast(x, 0),
    "all_gather": lambda x: dist.all_gather([torch.empty_like(x)], x),
    "functional": lambda x: functional.wait_tensor(functional.all_reduce(x, "sum", "0")),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_raise_and_do_not_run(name: str) -> None:
    COLLECTIVES[name](torch.ones(3))
    with CollectiveStop(), pytest.raises(CollectiveStopError):
        COLLECTIVES[name](torch.ones(3))


def test_other_ops_run() -> None:
    with CollectiveStop():
        assert torch.equal(torch.ones(3) + 1, torch.full((3,), 2.0))


class Net(nn.Module):
    """Communicates in forward, and then raises an error or not."""

    def __init__(self, error: Exception | None, first: bool) -> None:
        super().__init__()
        self.part = nn.Linear(4, 4)
        self.error, self.first = error, first

    def forward(self, x: Tensor) -> Tensor:
        x = self.part(x)
        if self.first and self.error is not None:
            raise self.error
        x = functional.wait_tensor(functional.all_reduce(x.detach(), "sum", "0"))
        if self.error is not None:
            raise self.error
        return x


def ask(rank: int, first: bool, within: bool) -> str:
    if rank == 0:
        return "not asked"
    model, args = Net(ValueError("mine"), first), (torch.ones(2, 4),)
    found = eager_error_within(10**6, model, model, args, {}) if within else eager_error(model, model, args, {})
    return repr(found)


@pytest.mark.parametrize("within", [False, True], ids=["whole", "within"])
def test_the_users_error_is_found_if_it_comes_before_the_first_collective(within: bool) -> None:
    assert outcomes_of_ranks(ask, True, within, seconds=90) == ["not asked", "ValueError('mine')"]
    assert outcomes_of_ranks(ask, False, within, seconds=90) == ["not asked", "None"]
