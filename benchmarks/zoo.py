"""Real models from public packages, built from their configurations with random weights, sized for a CPU.

`ZOO` maps a name to an `Entry`; `Entry.build()` returns a `Workload`. A package that is not installed raises
`ImportError`, which callers report as a skipped row. Nothing is downloaded.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowtide.testing.models import MODELS, loss_of, new_batch
from lowtide.testing.models.common import seeded

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
_SCHEMAS: list[torch.library.Library] = []


@dataclass(frozen=True)
class Workload:
    """A model in training mode, an example call, and the plain run it must equal to the last bit."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    loss: Callable[[Any], Tensor] = loss_of
    reference: str = "eager"

    def batch(self, step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return fresh random arguments for training step `step`, the same in every process."""
        return new_batch((self.args, self.kwargs), seed=1000 + step)


@dataclass(frozen=True)
class Entry:
    """How to build one workload, which package it is from, and what stock PyTorch's compiled run equals."""

    package: str
    make: Callable[[], Workload]
    reference: str = "eager"

    def build(self) -> Workload:
        """Return the workload with seeded weights."""
        prepare_torchvision()
        with seeded(0):
            work = self.make()
        work.model.train()
        return Workload(work.model, work.args, work.kwargs, work.loss, self.reference)


def prepare_torchvision() -> None:
    """Define the two schemas without which torchvision's wheel does not import beside a CPU build of torch.

    They are defined before any import of torchvision, transformers, timm or diffusers, and only if nothing else has.
    """
    if _SCHEMAS or hasattr(torch.ops.torchvision, "nms"):
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _SCHEMAS.append(library)


class WithLoss(nn.Module):
    """A network and the loss on its output, so that the whole step is one planned graph."""

    def __init__(self, network: nn.Module, loss: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.network, self.loss = network, loss

    def forward(self, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss of the network's output against `labels`."""
        return self.loss(self.network(*args, **kwargs), labels)


def _classifier(network: nn.Module, *, size: int, batch: int, classes: int = 100) -> Workload:
    args = torch.randint(classes, (batch,)), torch.randn(batch, 3, size, size)
    return Workload(WithLoss(network, F.cross_entropy), args)


def _sample_mse(output: Any, target: Tensor) -> Tensor:
    return F.mse_loss(output.sample, target)


def _tokens(vocab: int, batch: int, length: int) -> Tensor:
    return torch.randint(vocab, (batch, length))


def _gpt2() -> Workload:
    hf = importlib.import_module("transformers")
    config = hf.GPT2Config(
        vocab_size=1024,
        n_positions=256,
        n_embd=192,
        n_layer=6,
        n_head=6,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
    )
    tokens = _tokens(1024, 4, 256)
    return Workload(hf.GPT2LMHeadModel(config), kwargs={"input_ids": tokens, "labels": tokens})


def _bert() -> Workload:
    hf = importlib.import_module("transformers")
    config = hf.BertConfig(
        vocab_size=1024, hidden_size=192, num_hidden_layers=6, num_attention_heads=6, intermediate_size=768
    )
    tokens = _tokens(1024, 4, 256)
    mask = (torch.rand(4, 256) < 0.9).long()
    return Workload(hf.BertForMaskedLM(config), kwargs={"input_ids": tokens, "attention_mask": mask, "labels": tokens})


def _llama_config(hf: Any) -> Any:
    return hf.LlamaConfig(
        vocab_size=1024,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=256,
        use_cache=False,
    )


def _llama() -> Workload:
    hf = importlib.import_module("transformers")
    tokens = _tokens(1024, 4, 256)
    return Workload(hf.LlamaForCausalLM(_llama_config(hf)), kwargs={"input_ids": tokens, "labels": tokens})


def _llama_lora() -> Workload:
    hf, peft = importlib.import_module("transformers"), importlib.import_module("peft")
    adapters = peft.LoraConfig(
        r=8, lora_alpha=16, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(hf.LlamaForCausalLM(_llama_config(hf)), adapters)
    tokens = _tokens(1024, 4, 256)
    return Workload(model, kwargs={"input_ids": tokens, "labels": tokens})


def _t5() -> Workload:
    hf = importlib.import_module("transformers")
    config = hf.T5Config(
        vocab_size=1024, d_model=128, d_kv=32, d_ff=512, num_layers=3, num_heads=4, use_cache=False, pad_token_id=0
    )
    config.decoder_start_token_id = 0
    kwargs = {"input_ids": _tokens(1024, 4, 192), "labels": _tokens(1024, 4, 192)}
    return Workload(hf.T5ForConditionalGeneration(config), kwargs=kwargs)


def _vit_hf() -> Workload:
    hf = importlib.import_module("transformers")
    config = hf.ViTConfig(
        hidden_size=192,
        num_hidden_layers=6,
        num_attention_heads=6,
        intermediate_size=768,
        image_size=96,
        patch_size=8,
        num_labels=100,
        hidden_dropout_prob=0.1,
    )
    kwargs = {"pixel_values": torch.randn(8, 3, 96, 96), "labels": torch.randint(100, (8,))}
    return Workload(hf.ViTForImageClassification(config), kwargs=kwargs)


def _convnext_hf() -> Workload:
    hf = importlib.import_module("transformers")
    config = hf.ConvNextConfig(
        hidden_sizes=[32, 64, 128, 256], depths=[2, 2, 4, 2], image_size=128, num_labels=100, drop_path_rate=0.1
    )
    kwargs = {"pixel_values": torch.randn(8, 3, 128, 128), "labels": torch.randint(100, (8,))}
    return Workload(hf.ConvNextForImageClassification(config), kwargs=kwargs)


def _timm(name: str, *, size: int, batch: int, **options: Any) -> Workload:
    timm = importlib.import_module("timm")
    network = timm.create_model(name, pretrained=False, num_classes=100, **options)
    return _classifier(network, size=size, batch=batch)


def _torchvision(name: str, *, size: int, batch: int) -> Workload:
    models = importlib.import_module("torchvision.models")
    return _classifier(models.get_model(name, weights=None, num_classes=100), size=size, batch=batch)


def _googlenet() -> Workload:
    models = importlib.import_module("torchvision.models")
    network = models.googlenet(weights=None, num_classes=100, aux_logits=False, init_weights=False)
    return _classifier(network, size=96, batch=16)


def _unet_diffusers() -> Workload:
    diffusers = importlib.import_module("diffusers")
    network = diffusers.UNet2DModel(
        sample_size=32,
        block_out_channels=(32, 64, 64),
        layers_per_block=1,
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    )
    images = torch.randn(8, 3, 32, 32)
    return Workload(WithLoss(network, _sample_mse), (torch.randn_like(images), images, torch.randint(1000, (8,))))


def _dit() -> Workload:
    diffusers = importlib.import_module("diffusers")
    network = diffusers.DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=32,
        in_channels=4,
        out_channels=4,
        num_layers=4,
        sample_size=32,
        patch_size=2,
        num_embeds_ada_norm=1000,
    )
    latents = torch.randn(4, 4, 32, 32)
    kwargs = {"timestep": torch.randint(1000, (4,)), "class_labels": torch.randint(1000, (4,))}
    return Workload(WithLoss(network, _sample_mse), (torch.randn_like(latents), latents), kwargs)


def _unet3d_monai() -> Workload:
    nets = importlib.import_module("monai.networks.nets")
    network = nets.UNet(
        spatial_dims=3, in_channels=1, out_channels=3, channels=(16, 32, 64), strides=(2, 2), num_res_units=2
    )
    args = torch.randint(3, (2, 48, 48, 48)), torch.randn(2, 1, 48, 48, 48)
    return Workload(WithLoss(network, F.cross_entropy), args)


def _unet_smp() -> Workload:
    smp = importlib.import_module("segmentation_models_pytorch")
    network = smp.Unet("resnet18", encoder_weights=None, classes=5)
    args = torch.randint(5, (12, 128, 128)), torch.randn(12, 3, 128, 128)
    return Workload(WithLoss(network, F.cross_entropy), args)


ZOO: dict[str, Entry] = {
    "hf_gpt2": Entry("transformers", _gpt2),
    "hf_bert": Entry("transformers", _bert),
    "hf_llama": Entry("transformers", _llama),
    "hf_t5": Entry("transformers", _t5),
    "hf_vit": Entry("transformers", _vit_hf),
    "hf_convnext": Entry("transformers", _convnext_hf),
    "peft_llama_lora": Entry("peft", _llama_lora),
    "timm_vit_tiny": Entry("timm", lambda: _timm("vit_tiny_patch16_224", size=128, batch=8, img_size=128)),
    "timm_efficientnet_b0": Entry("timm", lambda: _timm("efficientnet_b0", size=96, batch=8, drop_path_rate=0.1)),
    "timm_convnext_atto": Entry("timm", lambda: _timm("convnext_atto", size=96, batch=8)),
    "diffusers_unet2d": Entry("diffusers", _unet_diffusers),
    "diffusers_dit": Entry("diffusers", _dit),
    "monai_unet3d": Entry("monai", _unet3d_monai),
    "smp_unet": Entry("segmentation_models_pytorch", _unet_smp),
    "tv_resnet18": Entry("torchvision", lambda: _torchvision("resnet18", size=128, batch=24)),
    "tv_mobilenet_v3_small": Entry("torchvision", lambda: _torchvision("mobilenet_v3_small", size=128, batch=16)),
    "tv_googlenet": Entry("torchvision", _googlenet),
}


def _own(name: str) -> Callable[[], Workload]:
    return lambda: Workload(*MODELS[name]())


OWN: dict[str, Entry] = {name: Entry("lowtide.testing", _own(name)) for name in MODELS}
ALL: dict[str, Entry] = OWN | ZOO
