"""PEFT: LoRA adapters on a frozen model; only activations and the adapters' gradients take memory."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

import lowtide


def training(budget=None):
    torch.manual_seed(0)
    base = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=128, n_head=4, vocab_size=512, use_cache=False))
    model = get_peft_model(base, LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True)).train()
    if budget:
        model = lowtide.wrap(model, budget=budget)  # the one line
    words = torch.randint(0, 512, (4, 128))
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)

    def step():
        model(input_ids=words, labels=words).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


plain, planned = training(), training(budget="50%")
plain()
planned()  # plans
before, after = lowtide.measure_peak(plain), lowtide.measure_peak(planned)
mib = 2**20
print(f"LoRA: peak {before / mib:.1f} MiB plain, {after / mib:.1f} MiB planned, {1 - after / before:.0%} saved")
