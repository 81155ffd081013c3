"""DistributedDataParallel: torchrun --standalone --nproc-per-node=2 ddp.py"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import lowtide
from lowtide.testing.models import gpt


def training(budget=None):
    model, batch, _ = gpt(layers=4, dim=128, heads=4, tokens=192)
    if budget:
        model = lowtide.wrap(model, budget=budget)  # the one line; around the container it does the same
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def losses(step):
    torch.manual_seed(dist.get_rank())
    return [step() for _ in range(2)]  # the first one plans, the second makes the buckets that stay


dist.init_process_group("gloo")
plain, planned = training(), training(budget="50%")
same = losses(plain) == losses(planned)
before, after = lowtide.measure_peak(plain), lowtide.measure_peak(planned)
before, after, saved = before / 2**20, after / 2**20, 1 - after / before
if dist.get_rank() == 0:
    print(f"the same losses: {same}; peak {before:.1f} MiB plain, {after:.1f} MiB planned, {saved:.0%} saved")
dist.destroy_process_group()
