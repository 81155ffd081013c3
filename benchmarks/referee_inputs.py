"""Inputs for any model of transformers, made from the signature of its `forward` and its configuration.

`batches` yields arguments to be tried in turn: nothing here knows which model takes which. Names of arguments decide
what is made; where a name leaves the shape open (an image or a video, features first or last), every shape is tried.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from referee_configs import VOCABULARY, find

BATCH = 4
TOKENS = 32
FRAMES = 4
Batch = dict[str, Any]


def batches(model: nn.Module, config: Any) -> Iterator[Batch]:
    """Yield arguments to try, those that use most of the model first."""
    names = set(inspect.signature(model.forward).parameters)
    for base in _bases(model, config, names):
        rest = _companions(config, names - _left_out(model), base)
        for labels in _labels(config, names, base):
            yield {**base, **rest, **labels}
            if rest:
                yield {**base, **labels}


def _left_out(model: nn.Module) -> set[str]:
    """Return what is left to its default: attention masks of half of all classes, for models make others of none."""
    return {"attention_mask"} if len(type(model).__name__) % 2 else set()


def _bases(model: nn.Module, config: Any, names: set[str]) -> Iterator[Batch]:
    """Yield the main inputs: all kinds together, then each kind alone."""
    kinds = [list(make(config, names)) for make in (_texts, _images, _videos, _sounds, _series)]
    present = [kind for kind in kinds if kind]
    if {"input_ids", "pixel_values"} <= names:
        yield from _texts_with_images(model, config, names)
    if len(present) > 1:
        for parts in itertools.islice(itertools.product(*present), 6):
            yield {name: value for part in parts for name, value in part.items()}
    for kind in present:
        yield from kind
    if isinstance(model.dummy_inputs, dict):
        yield dict(model.dummy_inputs)


def _texts(config: Any, names: set[str]) -> Iterator[Batch]:
    if "input_ids" in names:
        yield {"input_ids": _tokens(config)}


def _tokens(config: Any) -> Tensor:
    size = min(find(config, "vocab_size", VOCABULARY), VOCABULARY)
    return torch.randint(min(10, size // 4), size // 2, (BATCH, TOKENS))


def _images(config: Any, names: set[str]) -> Iterator[Batch]:
    if "pixel_values" not in names:
        return
    side = find(config, "image_size img_size input_size", 64)
    height, width = side if isinstance(side, list | tuple) else (side, side)
    channels = find(config, "num_channels in_channels in_chans", 3)
    frames = find(config, "num_frames frames_per_clip", FRAMES)
    images: list[Tensor] = [torch.randn(BATCH, channels, height, width)]
    if find(config, "num_frames frames_per_clip tubelet_size", None) is not None:
        images.insert(0, torch.randn(BATCH, frames, channels, height, width))
    images += [torch.randn(BATCH, 1, channels, height, width), torch.randn(BATCH, channels, 224, 224)]
    if "image_grid_thw" in names or "grid_thw" in names:
        yield _flat_images(config, names, channels)
    yield from ({"pixel_values": image} for image in images)
    if "image_sizes" in names:
        yield {"pixel_values": images[0], "image_sizes": torch.tensor([[height, width]] * BATCH)}


def _videos(config: Any, names: set[str]) -> Iterator[Batch]:
    if "pixel_values_videos" not in names or "pixel_values" in names:
        return
    side, channels = find(config, "image_size img_size", 64), find(config, "num_channels in_channels in_chans", 3)
    height, width = side if isinstance(side, list | tuple) else (side, side)
    frames = find(config, "num_frames frames_per_clip", FRAMES)
    yield {"pixel_values_videos": torch.randn(BATCH, frames, channels, height, width)}
    yield {"pixel_values_videos": torch.randn(BATCH, channels, frames, height, width)}


def _flat_images(config: Any, names: set[str], channels: int) -> Batch:
    """Return images as rows of patches, with the grid each is laid out in."""
    patch = find(config, "patch_size", 14)
    values = channels * find(config, "temporal_patch_size", 1) * patch**2
    name = "image_grid_thw" if "image_grid_thw" in names else "grid_thw"
    return {"pixel_values": torch.randn(BATCH * 16, values), name: torch.tensor([[1, 4, 4]] * BATCH)}


def _texts_with_images(model: nn.Module, config: Any, names: set[str]) -> Iterator[Batch]:
    """Yield texts that hold as many image tokens as the model makes of an image."""
    token = find(config, "image_token_id image_token_index", None)
    features = getattr(model, "get_image_features", None) or getattr(model.base_model, "get_image_features", None)
    if token is None or features is None:
        return
    for images in _images(config, names):
        taken = inspect.signature(features).parameters
        try:
            with torch.no_grad():
                count = _rows(features(**{name: value for name, value in images.items() if name in taken})) // BATCH
        except Exception:  # not a shape that this model takes; the next one may be
            continue
        ids = _tokens(config)
        yield {"input_ids": torch.cat([torch.full((BATCH, count), token), ids], 1), **images}


def _rows(features: Any) -> int:
    """Return the number of feature vectors in what `get_image_features` has returned."""
    pooled = getattr(features, "pooler_output", None)
    found = features if pooled is None else pooled
    if isinstance(found, Tensor):
        return found.numel() // found.shape[-1]
    return sum(_rows(entry) for entry in found)


def _sounds(config: Any, names: set[str]) -> Iterator[Batch]:
    bins = find(config, "num_mel_bins feature_size input_feat_per_channel num_mels n_mels input_dim", 80)
    frames = find(config, "max_source_positions max_length", 64)
    if "input_features" in names:
        for shape in ((bins, 2 * frames), (2 * frames, bins), (bins, 64), (64, bins)):
            yield {"input_features": torch.randn(BATCH, *shape)}
    if "input_values" in names:
        for shape in ((8000,), (frames, bins), (1, 8000), (64, bins)):
            yield {"input_values": torch.randn(BATCH, *shape)}


def _series(config: Any, names: set[str]) -> Iterator[Batch]:
    if "past_values" not in names:
        return
    context = find(config, "context_length", 32)
    lags = max(find(config, "lags_sequence", [0]))
    channels = find(config, "num_input_channels input_size", 1)
    horizon = find(config, "prediction_length horizon_length", 8) or 8
    features = find(config, "num_time_features", 0)
    for shape in ((), (channels,)):
        yield {
            "past_values": torch.randn(BATCH, context + lags, *shape),
            **_named(names, "future_values", torch.randn(BATCH, horizon, *shape)),
            **_named(names, "past_observed_mask", torch.ones(BATCH, context + lags, *shape)),
            **_named(names, "past_time_features", torch.randn(BATCH, context + lags, features)),
            **_named(names, "future_time_features", torch.randn(BATCH, horizon, features)),
        }


def _named(names: set[str], name: str, value: Tensor) -> Batch:
    return {name: value} if name in names else {}


def _companions(config: Any, names: set[str], base: Batch) -> Batch:
    """Return what belongs to the main inputs: a mask with padding, boxes, the decoder's tokens."""
    made: Batch = {}
    if "input_ids" in base:
        shape = base["input_ids"].shape
        made |= _named(names, "attention_mask", _mask(*shape))
        if "pixel_values" in base:
            images = (base["input_ids"] == find(config, "image_token_id image_token_index", -1)).long()
            made |= _named(names, "mm_token_type_ids", images) | _named(names, "token_type_ids", images)
        made |= _named(names, "bbox", torch.tensor([10, 20, 30, 40]).expand(*shape, 4).contiguous())
    if {"visual_feats", "visual_pos"} <= names:
        made["visual_feats"] = torch.randn(BATCH, 8, find(config, "visual_feat_dim", 64))
        made["visual_pos"] = torch.rand(BATCH, 8, 4)
    if "decoder_input_ids" in names:
        made["decoder_input_ids"] = _tokens(config)
    return made


def _mask(batch: int, tokens: int) -> Tensor:
    """Return an attention mask in which the second row ends with padding."""
    mask = torch.ones(batch, tokens, dtype=torch.long)
    mask[1:2, -max(1, tokens // 8) :] = 0
    return mask


def _labels(config: Any, names: set[str], base: Batch) -> Iterator[Batch]:
    if "labels" in names:
        ids = base.get("input_ids", _tokens(config))
        classes = max(2, find(config, "num_labels", 2))
        choices = [ids, torch.randint(2, ids.shape), torch.randint(classes, (BATCH,))]
        if "input_ids" not in base:
            choices = [choices[2], torch.randint(10, 30, (BATCH, 8)), *choices[:2]]
        images = base.get("pixel_values")
        if images is not None and images.dim() == 4:
            choices.append(torch.randint(classes, (images.shape[0], *images.shape[-2:])))
        yield from ({"labels": choice} for choice in choices)
    if {"start_positions", "end_positions"} <= names:
        yield {"start_positions": torch.randint(8, (BATCH,)), "end_positions": torch.randint(8, 16, (BATCH,))}
    if "return_loss" in names:
        yield {"return_loss": True}
    yield {}
