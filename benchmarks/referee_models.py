"""One small model per architecture, from the registries of transformers and timm, built from configurations.

`architectures()` lists them: a model folder of transformers, a model module of timm. `build` returns the first way to
build and call one that eager PyTorch trains, or raises `NotBuiltError` with the first reason. Nothing is downloaded.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import zoo
from lowtide.testing.models.common import seeded
from referee_configs import small_configs
from referee_inputs import batches

zoo.prepare_torchvision()
timm = importlib.import_module("timm")
transformers = importlib.import_module("transformers")
auto = importlib.import_module("transformers.models.auto.modeling_auto")
configurations = importlib.import_module("transformers.models.auto.configuration_auto")
for heavy in ("torch._dynamo", "torch._functorch.aot_autograd", "torch._inductor", "ortools.sat.python.cp_model"):
    importlib.import_module(heavy)  # once for all the processes that are forked from one

MOST_PARAMETERS = 40_000_000
SMALL_PARAMETERS = 3_000_000
BUILD_SECONDS = 12.0
COUNT_SECONDS = 6.0
# Heads in the order in which they are tried: those with a loss of their own first. What is not named comes after.
HEADS = (
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "IMAGE_TEXT_TO_TEXT",
    "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "MULTIMODAL_LM",
    "MASKED_LM",
    "CAUSAL_LM",
    "CTC",
    "AUDIO_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "IMAGE_CLASSIFICATION",
    "SEMANTIC_SEGMENTATION",
    "SEQUENCE_CLASSIFICATION",
)


class NotBuiltError(Exception):
    """Eager PyTorch does not train what could be built, so there is nothing to compare with."""


@dataclass(frozen=True, order=True)
class Architecture:
    """A package and the name of one of its architectures."""

    package: str
    name: str

    @property
    def key(self) -> str:
        """What a row is found by."""
        return f"{self.package}/{self.name}"


@dataclass(frozen=True)
class Subject:
    """How to make a model again, always with the same weights, and how to call it."""

    title: str
    new: Callable[[], nn.Module]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def model(self) -> nn.Module:
        """Return the model in training mode."""
        with seeded(0):
            return self.new().train()

    def batch(self, step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a step: the rows of the batch in another order each time, all alike."""
        return pytree.tree_map(lambda value: _rolled(value, step), (self.args, self.kwargs))


def _rolled(value: Any, step: int) -> Any:
    return value.roll(step, 0).clone() if isinstance(value, Tensor) and value.dim() else value


class WithLoss(nn.Module):
    """A model without a loss of its own, and a smooth one of everything it returns."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss."""
        leaves = pytree.tree_leaves(self.network(*args, **kwargs))
        return torch.stack([leaf.float().sin().mean() for leaf in leaves if _is_trained(leaf)]).sum()


def _is_trained(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.requires_grad and leaf.numel() > 0


def architectures() -> list[Architecture]:
    """Return all, the two packages by turns, in an order that mixes them: any beginning of it is a fair sample."""
    first = _mixed(Architecture("transformers", name) for name in _folders())
    second = _mixed(Architecture("timm", name) for name in timm.list_modules())
    return [each for pair in itertools.zip_longest(first, second) for each in pair if each is not None]


def _mixed(some: Iterable[Architecture]) -> list[Architecture]:
    return sorted(some, key=lambda each: sha256(each.key.encode()).hexdigest())


def build(architecture: Architecture) -> Subject:
    """Return the first subject of an architecture that eager PyTorch trains."""
    ways = {"transformers": _transformers, "timm": _timm}[architecture.package](architecture.name)
    first, end = "", time.process_time() + BUILD_SECONDS
    for way in ways:
        try:
            subject = way()
            _try(subject)
        except Exception as error:  # whatever a model raises in eager PyTorch says that this way does not train
            first = first or f"{type(error).__name__}: {error}"
        else:
            return subject
        if time.process_time() > end:
            first += " (no time for other ways)"
            break
    raise NotBuiltError(first or "the registry names no model of it that can be built")


def _try(subject: Subject) -> None:
    """Train one step in eager PyTorch; raises if that does not work or gives no gradient."""
    model = subject.model()
    args, kwargs = subject.batch(0)
    loss = loss_of(model(*args, **kwargs))
    loss.backward()
    if not torch.isfinite(loss):
        raise NotBuiltError(f"the loss is {loss.item()}")
    if not any(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters()):
        raise NotBuiltError("no parameter has a gradient that is not zero")


def loss_of(output: Any) -> Tensor:
    """Return the loss in what a subject's model has returned."""
    if isinstance(output, Tensor) and output.dim() == 0:
        return output
    loss = output["loss"] if isinstance(output, dict) and "loss" in output else getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        raise NotBuiltError("the model has returned no loss")
    return loss if loss.dim() == 0 else loss.mean()


def _folders() -> dict[str, list[str]]:
    """Return the model types in each model folder of transformers, the one that names the folder first."""
    found: dict[str, list[str]] = {}
    for kind in configurations.CONFIG_MAPPING_NAMES:
        found.setdefault(configurations.model_type_to_module_name(kind), []).append(kind)
    return {folder: sorted(kinds, key=lambda kind: kind != folder) for folder, kinds in found.items()}


def _transformers(folder: str) -> Iterator[Callable[[], Subject]]:
    for kind in _folders()[folder]:
        for name in _class_names(kind):
            cls = getattr(transformers, name, None)
            if cls is not None:
                yield from _ways(cls, configurations.CONFIG_MAPPING[kind])


def _class_names(kind: str) -> list[str]:
    """Return the names of the classes that the registry has for a model type, heads with a loss first."""
    mappings = [name for name in dir(auto) if name.startswith("MODEL_") and name.endswith("MAPPING_NAMES")]
    preferred = [f"MODEL_FOR_{head}_MAPPING_NAMES" for head in HEADS]
    rest = sorted((name for name in mappings if name not in preferred), key=lambda name: name == "MODEL_MAPPING_NAMES")
    found: list[str] = []
    for mapping in preferred + rest:
        entry = getattr(auto, mapping, {}).get(kind, ())
        found += [name for name in ([entry] if isinstance(entry, str) else entry) if name not in found]
    return found


def _ways(cls: Any, config_class: Any) -> Iterator[Callable[[], Subject]]:
    try:
        for config in small_configs(config_class):
            yield from _calls(cls, config)
    except Exception as error:  # a configuration that cannot be made is a reason like any other
        yield lambda error=error: _raise(error)


def _raise(error: Exception) -> Subject:
    raise error


def _calls(cls: Any, config: Any) -> Iterator[Callable[[], Subject]]:
    def new() -> nn.Module:
        return cls(copy.deepcopy(config))

    try:
        _refuse_large(new)
        with seeded(0):
            model = new()
            tried = list(batches(model, config))
    except Exception as error:
        yield lambda error=error: _raise(error)
        return
    for batch in tried:
        yield lambda batch=batch: _subject(cls.__name__, new, batch)


def _subject(title: str, new: Callable[[], nn.Module], batch: dict[str, Any]) -> Subject:
    """Return the subject for a batch: the model itself if it returns a loss, or else with one of ours."""
    subject = Subject(title, new, kwargs=batch)
    with torch.no_grad():
        output = subject.model()(**copy.deepcopy(batch))
    try:
        loss_of(output)
    except NotBuiltError:
        return Subject(title, lambda: WithLoss(new()), kwargs=batch)
    return subject


def _refuse_large(new: Callable[[], nn.Module]) -> None:
    count = _parameters(new)
    if count > MOST_PARAMETERS:
        raise NotBuiltError(f"{count} parameters with every size at its smallest; at most {MOST_PARAMETERS} are tried")


def _parameters(new: Callable[[], nn.Module]) -> int:
    """Return the number of parameters without their memory."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in new().parameters())


def _timm(module: str) -> Iterator[Callable[[], Subject]]:
    for name in _smallest(module):
        for side in (64, 96, 128, 224, 256):
            for options in _timm_options(name, side):
                yield lambda name=name, side=side, options=options: _timm_subject(name, side, options)


def _smallest(module: str) -> list[str]:
    """Return up to three models of a timm module, the smallest of those counted first: until one is small enough."""
    end = time.process_time() + COUNT_SECONDS
    counts: dict[str, int] = {}
    for name in sorted(timm.list_models(module=module), key=_guess):
        try:
            counts[name] = _parameters(lambda name=name: timm.create_model(name, num_classes=10))
        except Exception:  # some build tables from real numbers, which `meta` does not have
            counts[name] = MOST_PARAMETERS
        if counts[name] < SMALL_PARAMETERS or time.process_time() > end:
            break
    return sorted(counts, key=lambda name: counts[name])[:3]


def _guess(name: str) -> tuple[bool, int]:
    """Return a key by which names that promise small models come first."""
    small = ("test_", "atto", "femto", "pico", "nano", "tiny", "xxs", "xs", "small", "_s", "_t", "_b0", "050")
    return not any(mark in name for mark in small), len(name)


def _timm_options(name: str, side: int) -> Iterator[dict[str, Any]]:
    """Yield the options to try; an option that a model does not take makes it raise."""
    accepted = _accepted(name)
    size = {"img_size": side} if "img_size" in accepted else {}
    drops = {"drop_rate": 0.1, "drop_path_rate": 0.1}
    for drop in (drops, {"drop_rate": 0.1}, {}):
        for shallow in _shallow(accepted):
            yield {**drop, **size, **shallow}
            if size:
                yield {**drop, **shallow}


def _shallow(accepted: dict[str, inspect.Parameter]) -> Iterator[dict[str, Any]]:
    """Yield options that leave one or two layers of each kind, then none."""
    for name in ("depth", "depths", "layers", "num_blocks", "blocks"):
        if name in accepted:
            default = accepted[name].default
            yield {
                name: 2
                if isinstance(default, int)
                else (1,) * (len(default) if isinstance(default, tuple | list) else 4)
            }
    yield {}


def _accepted(name: str) -> dict[str, inspect.Parameter]:
    """Return the options of the class that a timm model is made of."""
    with torch.device("meta"):
        try:
            cls = type(timm.create_model(name, num_classes=10))
        except Exception:  # some build tables from real numbers, which `meta` does not have
            return {}
    return dict(inspect.signature(cls.__init__).parameters)


class Classifier(nn.Module):
    """A network that classifies, and its loss."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the loss."""
        return F.cross_entropy(self.network(images), labels)


def _timm_subject(name: str, side: int, options: dict[str, Any]) -> Subject:
    def new() -> nn.Module:
        return Classifier(timm.create_model(name, pretrained=False, num_classes=10, **options))

    batch = 8 if _count(new) < 1_000_000 else 16
    with seeded(1):
        args = torch.randn(batch, 3, side, side), torch.randint(10, (batch,))
    return Subject(f"{name}({', '.join(f'{key}={value}' for key, value in options.items())}) at {side}", new, args)


def _count(new: Callable[[], nn.Module]) -> int:
    return sum(parameter.numel() for parameter in new().parameters())
