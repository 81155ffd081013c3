"""Lightning: a callback; forward returns the loss, so that the loss is planned too."""

import lightning
import torch

import lowtide
from lowtide.integrations.lightning import LowtideCallback
from lowtide.testing.models import unet


class Segmenter(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.batch, _ = unet()

    def forward(self, *batch):
        return self.net(*batch)

    def training_step(self, batch, index):
        return self(*batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*self.batch), batch_size=len(self.batch[0]))


def training(*callbacks):
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer, model = lightning.Trainer(max_epochs=1, accelerator="cpu", callbacks=list(callbacks), **quiet), Segmenter()
    trainer.fit(model)
    batch = next(iter(model.train_dataloader()))
    return lowtide.measure_peak(lambda: (model.zero_grad(), model.training_step(batch, 0).backward()))


before, after = training(), training(LowtideCallback(budget="50%"))
mib = 2**20
print(f"Lightning: peak {before / mib:.1f} MiB plain, {after / mib:.1f} MiB planned, {1 - after / before:.0%} saved")
