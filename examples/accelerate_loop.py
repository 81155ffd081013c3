"""accelerate: wrap the model, then prepare it."""

import torch
from accelerate import Accelerator

import lowtide
from lowtide.testing.models import gpt


def training(budget=None):
    model, (tokens, targets), _ = gpt(layers=4, dim=128, heads=4, tokens=192)
    if budget:
        model = lowtide.wrap(model, budget=budget)  # the one line
    accelerator = Accelerator(cpu=True)
    data = torch.utils.data.TensorDataset(tokens, targets)
    loader = torch.utils.data.DataLoader(data, batch_size=len(tokens))
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)

    def epoch():
        for batch in loader:
            loss = model(*batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    return epoch


plain, planned = training(), training(budget="50%")
plain()
planned()  # plans
before, after = lowtide.measure_peak(plain), lowtide.measure_peak(planned)
mib = 2**20
print(f"accelerate: peak {before / mib:.1f} MiB plain, {after / mib:.1f} MiB planned, {1 - after / before:.0%} saved")
