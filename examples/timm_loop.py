"""A training script in the style of timm: model, loss, optimizer, loop. The loss is wrapped with the model."""

import timm
import torch
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2

import lowtide


def training(budget=None):
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=96, depth=4, num_classes=10)
    loss_fn = LabelSmoothingCrossEntropy()
    optimizer = create_optimizer_v2(model, opt="momentum", lr=0.1, momentum=0.0)
    images, labels = torch.randn(16, 3, 96, 96), torch.randint(0, 10, (16,))

    def forward(images, labels):
        return loss_fn(model(images), labels)

    if budget:
        forward = lowtide.wrap(forward, budget=budget)  # the one line

    def step():
        forward(images, labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


plain, planned = training(), training(budget="50%")
plain()
planned()  # plans
before, after = lowtide.measure_peak(plain), lowtide.measure_peak(planned)
mib = 2**20
print(f"timm: peak {before / mib:.1f} MiB plain, {after / mib:.1f} MiB planned, {1 - after / before:.0%} saved")
