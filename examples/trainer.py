"""Hugging Face Trainer: LowtideCallback in place of gradient_checkpointing=True."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import lowtide
from lowtide.integrations.transformers import LowtideCallback

config = GPT2Config(n_layer=4, n_embd=128, n_head=4, vocab_size=512, use_cache=False)
torch.manual_seed(0)
words = torch.randint(0, 512, (16, 128))
data = [{"input_ids": row, "labels": row} for row in words]


def trainer(*callbacks):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)
    args = TrainingArguments("out/trainer", optim="sgd", max_steps=2, per_device_train_batch_size=4, use_cpu=True)
    return Trainer(model, args, train_dataset=data, callbacks=list(callbacks))


plain, planned = trainer(), trainer(LowtideCallback(budget="50%", report="plan.html"))
plain.train()
planned.train()  # the first step plans; from here on it is only run
before, after = lowtide.measure_peak(plain.train), lowtide.measure_peak(planned.train)
mib = 2**20
print(f"Trainer: peak {before / mib:.1f} MiB plain, {after / mib:.1f} MiB planned, {1 - after / before:.0%} saved")
