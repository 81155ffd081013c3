"""Save a sharded, wrapped model and go on from there. Run: torchrun --nproc-per-node 2 distributed_checkpoint.py"""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import lowtide
from lowtide.testing.models import gpt


def training(budget=None):
    model, (tokens, targets), _ = gpt(layers=4, dim=128, heads=4, tokens=192)
    model = lowtide.wrap(model, budget=budget) if budget else model  # the one line; names in checkpoints stay
    for part in (*model.blocks, model):
        fully_shard(part)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        torch.manual_seed(0)  # dropout
        model(tokens, targets).backward()
        optimizer.step(), optimizer.zero_grad()

    return model, optimizer, step


dist.init_process_group("gloo")
model, optimizer, planned = training(budget="65%")
other, its_optimizer, plain = training()
planned()  # plans
dcp.save(dict(zip("mo", get_state_dict(model, optimizer), strict=True)), checkpoint_id="checkpoint")
state = dict(zip("mo", get_state_dict(other, its_optimizer), strict=True))
dcp.load(state, checkpoint_id="checkpoint")
set_state_dict(other, its_optimizer, model_state_dict=state["m"], optim_state_dict=state["o"])
before, after = (lowtide.measure_peak(step) / 2**20 for step in (plain, planned))
same = all(map(torch.equal, *([each.to_local() for each in part.parameters()] for part in (model, other))))
if dist.get_rank() == 0:
    print(f"the same: {same}; peak {before:.1f} MiB plain, {after:.1f} MiB planned, {1 - after / before:.0%} saved")
dist.destroy_process_group()
