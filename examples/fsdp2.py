"""FSDP2: shard the model, then wrap it. Run with `torchrun --nproc-per-node 2 fsdp2.py`."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import lowtide
from lowtide.testing.models import gpt


def training(budget=None):
    torch.manual_seed(0)
    model, (tokens, targets), _ = gpt(layers=4, dim=128, heads=4, tokens=192)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    if budget:
        lowtide.wrap(model, budget=budget)  # the one line; the budget is of this rank
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        model(tokens, targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


dist.init_process_group("gloo")
plain, planned = training(), training(budget="65%")
plain()
planned()  # plans
before, after = lowtide.measure_peak(plain), lowtide.measure_peak(planned)
if dist.get_rank() == 0:
    mib = 2**20
    print(f"fsdp2: peak {before / mib:.1f} MiB plain, {after / mib:.1f} MiB planned, {1 - after / before:.0%} saved")
dist.destroy_process_group()
