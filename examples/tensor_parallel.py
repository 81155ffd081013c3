"""Tensor parallel: spread the parameters over the ranks, then wrap. Run: torchrun --nproc-per-node 2 this file."""

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import lowtide


class Layer(nn.Sequential):
    def __init__(self, dim=256):
        super().__init__(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        return x + nn.functional.dropout(super().forward(x), 0.1)


class Loss(nn.Module):
    def forward(self, x):
        return x.square().mean()


def training(budget=None):
    model = nn.Sequential(*(Layer() for _ in range(6)), Loss())
    for layer in model[:-1]:
        parallelize_module(layer, mesh, {"1": ColwiseParallel(), "3": RowwiseParallel()})
    model = lowtide.wrap(model, budget=budget) if budget else model
    return lambda: model(batch).backward()


distributed.init_process_group("gloo")
mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
torch.manual_seed(0)  # ranks that share a model take the same batch
batch, plain, planned = torch.randn(4096, 256), training(), training(budget="50%")
plain(), planned()  # plans; later steps add to these gradients
before, after = (lowtide.measure_peak(step) / 2**20 for step in (plain, planned))
if mesh.get_rank() == 0:
    print(f"rank 0: peak {before:.1f} MiB plain, {after:.1f} MiB planned, {1 - after / before:.0%} saved")
distributed.destroy_process_group()
