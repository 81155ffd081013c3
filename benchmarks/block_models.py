"""Models that PyTorch's compiler captures in several graphs, and some that it captures in one, sized for a CPU.

`MODELS` maps a name to a function that returns `(model, make_call)`. `make_call(step)` makes the inputs of a training
step, the same in every process, and returns a function that calls a model with them. What the model returns has the
loss, which `loss_of` finds. Activations dominate parameters, dropout is on where the model has it, and nothing is
downloaded. A package that is not installed raises `ImportError`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowtide.testing.models import gpt
from lowtide.testing.models.common import seeded
from zoo import WithLoss, prepare_torchvision

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

Call = Callable[[nn.Module], Any]
MakeCall = Callable[[int], Call]
Work = tuple[nn.Module, MakeCall]

VOCAB = 512
LAYER_DROP = 0.2


def build(name: str) -> Work:
    """Return a model of `MODELS` or `COMPARED` in training mode, with seeded weights, and how it is called."""
    prepare_torchvision()
    with seeded(0):
        model, make_call = (MODELS | COMPARED)[name]()
    return model.train(), make_call


def _calling(make_inputs: Callable[[], dict[str, Any]]) -> MakeCall:
    def make_call(step: int) -> Call:
        with seeded(1000 + step):
            inputs = make_inputs()
        return lambda model: model(**inputs)

    return make_call


def _tokens(batch: int, length: int) -> Tensor:
    return torch.randint(3, VOCAB, (batch, length))


def _language_inputs(batch: int, length: int) -> MakeCall:
    def make_inputs() -> dict[str, Any]:
        tokens = _tokens(batch, length)
        return {"input_ids": tokens, "labels": tokens}

    return _calling(make_inputs)


def _hf() -> Any:
    hf = importlib.import_module("transformers")
    hf.logging.set_verbosity_error()
    return hf


def whisper() -> Work:
    """Return an encoder and decoder whose layers are dropped at random: a branch on a value before every layer."""
    hf = _hf()
    config = hf.WhisperConfig(
        vocab_size=VOCAB,
        num_mel_bins=40,
        d_model=96,
        encoder_layers=6,
        decoder_layers=6,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=384,
        decoder_ffn_dim=384,
        max_source_positions=192,
        max_target_positions=128,
        dropout=0.1,
        attention_dropout=0.1,
        encoder_layerdrop=LAYER_DROP,
        decoder_layerdrop=LAYER_DROP,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    inputs = _calling(lambda: {"input_features": torch.randn(8, 40, 384), "labels": _tokens(8, 128)})
    return hf.WhisperForConditionalGeneration(config), inputs


def bart() -> Work:
    """Return BART with layer drop in encoder and decoder."""
    hf = _hf()
    config = hf.BartConfig(
        vocab_size=VOCAB,
        max_position_embeddings=160,
        d_model=96,
        encoder_layers=6,
        decoder_layers=6,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=384,
        decoder_ffn_dim=384,
        attention_dropout=0.1,
        encoder_layerdrop=LAYER_DROP,
        decoder_layerdrop=LAYER_DROP,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        forced_eos_token_id=2,
    )
    inputs = _calling(lambda: {"input_ids": _tokens(8, 160), "labels": _tokens(8, 128)})
    return hf.BartForConditionalGeneration(config), inputs


def opt() -> Work:
    """Return OPT with layer drop."""
    hf = _hf()
    config = hf.OPTConfig(
        vocab_size=VOCAB,
        max_position_embeddings=192,
        hidden_size=96,
        word_embed_proj_dim=96,
        ffn_dim=384,
        num_hidden_layers=8,
        num_attention_heads=4,
        attention_dropout=0.1,
        layerdrop=LAYER_DROP,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return hf.OPTForCausalLM(config), _language_inputs(8, 192)


def wav2vec2() -> Work:
    """Return wav2vec 2.0 for sequence classification, with layer drop, and time masking drawn by numpy in forward."""
    hf = _hf()
    config = hf.Wav2Vec2Config(
        hidden_size=96,
        num_hidden_layers=8,
        num_attention_heads=4,
        intermediate_size=384,
        conv_dim=(32, 32, 32),
        conv_kernel=(10, 3, 3),
        conv_stride=(5, 4, 4),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        layerdrop=LAYER_DROP,
        mask_time_prob=0.05,
        num_labels=10,
        classifier_proj_size=64,
    )
    inputs = _calling(lambda: {"input_values": torch.randn(6, 16_000), "labels": torch.randint(10, (6,))})
    return hf.Wav2Vec2ForSequenceClassification(config), inputs


def _decoder_options(layers: int, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 192,
        "attention_dropout": 0.1,
        "use_cache": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **more,
    }


def mixtral() -> Work:
    """Return Mixtral, whose experts are a Python loop over those that tokens were sent to."""
    hf = _hf()
    options = _decoder_options(4, num_local_experts=4, num_experts_per_tok=2, router_jitter_noise=0.0)
    config = hf.MixtralConfig(**options, output_router_logits=True, experts_implementation="eager")
    return hf.MixtralForCausalLM(config), _language_inputs(8, 160)


def _decoder(config: str, model: str, layers: int, **more: Any) -> Callable[[], Work]:
    def make() -> Work:
        hf = _hf()
        made = getattr(hf, model)(getattr(hf, config)(**_decoder_options(layers, **more)))
        return made, _language_inputs(8, 160)

    return make


class Experts(nn.Module):
    """A block whose tokens are sent to one expert each: a Python loop, and as many rows as the tokens decide."""

    def __init__(self, dim: int, experts: int) -> None:
        super().__init__()
        self.norm, self.router, self.dropout = nn.LayerNorm(dim), nn.Linear(dim, experts), nn.Dropout(0.1)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` with what the chosen experts add."""
        flat = self.norm(x).flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).max(-1)
        total = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(-1)
            if rows.numel():
                total = total.index_add(0, rows, expert(flat[rows]) * weights[rows, None])
        return x + self.dropout(total).view_as(x)


class LanguageModel(nn.Module):
    """Token embedding, a body, a head, and the loss of the next token."""

    def __init__(self, body: nn.Module, dim: int) -> None:
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(VOCAB, dim), body, nn.Linear(dim, VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Return the loss."""
        hidden = self.body(self.embedding(input_ids))
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        return F.cross_entropy(self.head(hidden[:, :-1]).flatten(0, 1), labels[:, 1:].flatten())


def experts() -> Work:
    """Return a stack of blocks that loop over experts and select rows by index."""
    return LanguageModel(nn.Sequential(*(Experts(96, 4) for _ in range(6))), 96), _language_inputs(16, 160)


def lstm() -> Work:
    """Return a language model of `nn.LSTM` with two layers and dropout between them."""
    body = nn.LSTM(128, 192, num_layers=2, dropout=0.2, batch_first=True)
    model = LanguageModel(body, 128)
    model.head = nn.Linear(192, VOCAB)
    return model, _language_inputs(32, 96)


class Halves(nn.Module):
    """Two stacks, with a value read by Python between them."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.first, self.second = self._stack(dim, layers), self._stack(dim, layers)

    def _stack(self, dim: int, layers: int) -> nn.Sequential:
        return nn.Sequential(
            *(nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.LayerNorm(dim), nn.Dropout(0.1)) for _ in range(layers))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss; the second half is scaled if the first half's mean is large."""
        hidden = self.first(x)
        scale = 0.5 if hidden.abs().mean().item() > 2.0 else 1.0
        return (self.second(hidden) * scale).square().mean()


def item() -> Work:
    """Return two halves with `.item()` between them."""
    return Halves(128, 8), _calling(lambda: {"x": torch.randn(4096, 128)})


class GraphNetwork(nn.Module):
    """Graph convolutions with ReLU and dropout, and the loss of the node's class."""

    def __init__(self, convolution: Any, dims: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(convolution(a, b) for a, b in pairwise(dims))

    def forward(self, x: Tensor, edge_index: Tensor, y: Tensor) -> Tensor:
        """Return the loss."""
        for layer in self.layers[:-1]:
            x = F.dropout(layer(x, edge_index).relu(), 0.2, self.training)
        return F.cross_entropy(self.layers[-1](x, edge_index), y)


def gcn() -> Work:
    """Return a graph convolution network of five layers on a random graph."""
    nets = importlib.import_module("torch_geometric.nn")
    nodes, edges = 4000, 12_000
    inputs = _calling(
        lambda: {
            "x": torch.randn(nodes, 64),
            "edge_index": torch.randint(nodes, (2, edges)),
            "y": torch.randint(16, (nodes,)),
        }
    )
    return GraphNetwork(nets.GCNConv, [64, 128, 128, 128, 128, 16]), inputs


def gpt_layers(layers: int) -> Work:
    """Return lowtide's own GPT of so many layers, which is one graph."""
    model, args, kwargs = gpt(layers=layers, dim=96, heads=4, tokens=128, batch=8, vocab=VOCAB)
    return model, lambda _step: lambda called: called(*args, **kwargs)


def _timm(name: str, *, size: int, batch: int, **options: Any) -> Callable[[], Work]:
    def make() -> Work:
        network = importlib.import_module("timm").create_model(name, pretrained=False, num_classes=100, **options)
        inputs = lambda: {"labels": torch.randint(100, (batch,)), "x": torch.randn(batch, 3, size, size)}  # noqa: E731
        return WithLoss(network, F.cross_entropy), _calling(inputs)

    return make


_LLAMA = ("LlamaConfig", "LlamaForCausalLM")

MODELS: dict[str, Callable[[], Work]] = {
    "whisper": whisper,
    "bart": bart,
    "opt": opt,
    "wav2vec2": wav2vec2,
    "mixtral": mixtral,
    "experts": experts,
    "gcn": gcn,
    "item": item,
    "lstm": lstm,
    "llama": _decoder(*_LLAMA, 4),
    "llama-12": _decoder(*_LLAMA, 12),
    # Without dropout eager's attention takes another kernel than the one that is traced.
    "llama-plain": _decoder(*_LLAMA, 4, attention_dropout=0.0),
    "qwen2": _decoder("Qwen2Config", "Qwen2ForCausalLM", 4),
    "qwen2-12": _decoder("Qwen2Config", "Qwen2ForCausalLM", 12),
    "qwen3": _decoder("Qwen3Config", "Qwen3ForCausalLM", 4, head_dim=24),
    "mistral": _decoder("MistralConfig", "MistralForCausalLM", 4, sliding_window=64),
    "mistral-12": _decoder("MistralConfig", "MistralForCausalLM", 12, sliding_window=64),
}

COMPARED: dict[str, Callable[[], Work]] = {
    "gpt-12": lambda: gpt_layers(12),
    "vit-12": _timm("vit_tiny_patch16_224", size=128, batch=8, img_size=128, proj_drop_rate=0.1),
    "llama-12": MODELS["llama-12"],
    "resnet50": _timm("resnet50", size=96, batch=16),
}


def _llama_70b() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Return LLaMA in the shape of its 70-billion-parameter size, without data, and what it is called with."""
    prepare_torchvision()
    transformers = importlib.import_module("transformers")
    config = transformers.LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        use_cache=False,
    )
    with torch.device("meta"):
        tokens = torch.zeros(16, 4096, dtype=torch.long)
        return transformers.LlamaForCausalLM(config).train(), {"input_ids": tokens, "labels": tokens}


# Planned without data: no machine here could hold them.
META: dict[str, Callable[[], tuple[nn.Module, dict[str, torch.Tensor]]]] = {"llama-70b": _llama_70b}
