"""Tensor parallel, plain and with sequence parallel: that engine's eager bits, its peak as predicted and in budget."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import lowtide
from helpers.ranks import outcomes_of_ranks, run_on_ranks
from lowtide.distributed import policy
from lowtide.distributed.policy import WaitingPolicy
from lowtide.measure import measure_peak
from lowtide.plan.planners.greedy import Greedy

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="PyTorch was built without distributed training")

DIM, HEADS, WORDS, BATCH, LENGTH = 64, 4, 96, 4, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.queries, self.keys, self.values, self.mix = (nn.Linear(DIM, DIM) for _ in range(4))
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        q, k, v = (
            part(h).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2) for part in (self.queries, self.keys, self.values)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.mix(seen), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.between(x)))), 0.1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), words.flatten())


def parallel(model: Net, sequence: bool) -> Net:
    """Return the model with its parameters spread over all ranks, in place."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    wide, narrow = {"input_layouts": Shard(1)}, {"output_layouts": Shard(1)}
    if not sequence:
        wide = narrow = {}
    inner: dict[str, Any] = {name: ColwiseParallel(**wide) for name in ("queries", "keys", "values", "up")}
    inner |= {name: RowwiseParallel(**narrow) for name in ("mix", "down")}
    outer: dict[str, Any] = {"head": ColwiseParallel(**wide, output_layouts=Replicate())}
    if sequence:
        inner |= {"before": SequenceParallel(), "between": SequenceParallel()}
        outer |= {"norm": SequenceParallel(), "embed": RowwiseParallel(input_layouts=Replicate(), **narrow)}
    for block in model.blocks:
        parallelize_module(block, mesh, inner)
    return parallelize_module(model, mesh, outer)


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def batch() -> Tensor:
    return torch.randint(WORDS, (BATCH, LENGTH))


def train(model: nn.Module) -> list[Tensor]:
    """Return what three steps leave behind; ranks have the same batches and dropout."""
    torch.manual_seed(10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    left: list[Tensor] = []
    for _ in range(3):
        loss = model(batch())
        loss.backward()
        left += [
            local(loss.detach()),
            *(local(each.grad).clone() for each in model.parameters()),
            torch.get_rng_state(),
        ]
        optimizer.step()
        optimizer.zero_grad()
    return left


def peak_of_step(model: nn.Module) -> int:
    """Return the least peak of several steps.

    The thread that runs a reduce-scatter frees a buffer when it comes to it; what it frees the profiler does not see.
    """
    words = batch()
    peaks = []
    for _ in range(8):
        model.zero_grad()
        dist.barrier()
        peaks.append(measure_peak(lambda: model(words).backward()))
    return min(peaks)


def collectives(plan: lowtide.Plan, steps: Sequence[int]) -> list[int]:
    return [op for op in steps if plan.problem.graph.ops[op].target.startswith("_c10d")]


def train_within(budget: str | int, plain: Net, sequence: bool) -> tuple[nn.Module, list[Tensor]]:
    """Return a model that has trained within `budget`, or else within the least budget there is, and what it has left.

    What a collective has gathered is kept, so half of the memory is too little with sequence parallel.
    """
    model = lowtide.wrap(parallel(copy.deepcopy(plain), sequence), budget=budget, planner=Greedy(effort=0.02))
    try:
        return model, train(model)
    except lowtide.errors.InfeasibleBudgetError as error:
        assert sequence
        return train_within(error.least_bytes, plain, sequence)


def compare(rank: int, sequence: bool, cache: str) -> None:
    # Empty and each rank's own: what one of them measures, the others know from it alone.
    os.environ["LOWTIDE_CACHE_DIR"] = f"{cache}/{rank}"
    torch.manual_seed(0)
    plain = Net()
    expected = train(parallel(copy.deepcopy(plain), sequence))
    schedules = []
    for budget in ("70%", "50%"):
        model, left = train_within(budget, plain, sequence)
        for ours, theirs in zip(left, expected, strict=True):
            assert torch.equal(ours, theirs)
        peak = peak_of_step(model)
        (plan,) = lowtide.plans(model)
        assert plan.num_recomputed
        assert peak <= plan.budget_bytes
        assert abs(peak - plan.peak_bytes) <= max(64 * 1024, 0.01 * peak)
        assert collectives(plan, plan.schedule.steps) == collectives(plan, range(plan.num_ops))
        schedules.append((plan.schedule, plan.peak_bytes))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, schedules)
    assert all(each == schedules for each in everyone)


@pytest.mark.parametrize("sequence", [False, True], ids=["plain", "sequence"])
def test_steps_are_those_of_eager_within_the_budget(sequence: bool, tmp_path: Path) -> None:
    run_on_ranks(compare, sequence, str(tmp_path))


def train_on_another_shape(rank: int) -> str:
    policy.POLICY = WaitingPolicy(meeting_seconds=60)
    model = lowtide.wrap(parallel(Net(), sequence=False), budget="60%", planner=Greedy(effort=0.02), costs="analytic")
    return str(model(torch.randint(WORDS, (BATCH + rank, LENGTH))))


def test_ranks_that_would_run_other_collectives_are_told_before_any_runs() -> None:
    first, second = outcomes_of_ranks(train_on_another_shape)
    for each, own, other in ((first, 0, 1), (second, 1, 0)):
        assert each.startswith(f"RanksError: Ranks {own} and {other} would run different collectives")
        assert f"all_reduce.default(float32[{BATCH + own},{LENGTH},{DIM}]" in each


def train_alone(rank: int) -> str:
    policy.POLICY = WaitingPolicy(meeting_seconds=3)
    model = lowtide.wrap(parallel(Net(), sequence=False), budget="60%", planner=Greedy(effort=0.02), costs="analytic")
    return str(model(batch())) if rank else "has left"


def test_a_rank_that_does_not_come_is_told_of() -> None:
    left, waiting = outcomes_of_ranks(train_alone)
    assert left == "has left"
    assert waiting.startswith("RanksError: Rank 1 is about to run")
    assert "rank 0, which has not come to the same graph within 3 seconds" in waiting
