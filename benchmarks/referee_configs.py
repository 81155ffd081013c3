"""Small configurations of transformers' model types, made by rules about the names of fields, not about models.

A rule says what a field of such a name becomes in a small model: few layers, narrow, a small vocabulary, small images,
and dropout on wherever the configuration has a field for it. Five levels are tried until one trains: everything small;
lists of widths as they are; nothing changed but depth, vocabulary and images; everything small and dropout as it is,
for some models refuse it; and all fields of inner configurations as their owner has set them, as a backbone's name.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

LEVELS = (0, 1, 2, 3, 4)
# Those in which everything is small.
_SMALL = (0, 3, 4)
VOCABULARY = 256
LAYERS = 2
IMAGE = 64
HEAD = 16
WIDTH = 64
DROPOUT = 0.1

_Rule = tuple[str, Callable[[int], int]]


def _at_most(limit: int) -> Callable[[int], int]:
    return lambda value: min(value, limit)


# The first rule whose pattern is found in the name of an integer field decides.
_DEPTHS: list[_Rule] = [
    (r"vocab_size$|vocabulary_size$|n_vocab$", _at_most(VOCABULARY)),
    (r"(^|_)n?_?layers?$|depth$|num_.*blocks?$|max_window_layers|^n_layers?$", _at_most(LAYERS)),
    (r"first_k_dense", _at_most(1)),
    (r"image_size$|img_size$", _at_most(IMAGE)),
    (r"num_frames$|frames_per_clip", _at_most(4)),
    (r"(num|n)_.*experts$|^num_experts|moe_num_experts", _at_most(4)),
    (r"experts_per_tok|moe_k$|moe_top_?k|num_selected_experts|experts_top_?k", _at_most(2)),
    (r"^n_group$|^topk_group$|num_expert_group|^num_queries$", _at_most(8)),
    (r"position|max_.*length|^n_ctx$|^context_length$|max_seq", _at_most(512)),
]
_WIDTHS: list[_Rule] = [
    (r"key_value_heads|kv_heads|query_groups", _at_most(2)),
    (r"heads?$", _at_most(4)),
    (r"head_dim$|d_kv$|kv_channels|head_size|rotary_dim|v_dim$|k_dim$", _at_most(HEAD)),
    (r"lora_rank|time_step_rank", _at_most(WIDTH // 2)),
    (r"moe_.*size$|expert_.*size", _at_most(WIDTH // 2)),
    (r"intermediate|ffn|d_ff|n_inner|mlp_dim|feed_?forward|^d_inner$", _at_most(2 * WIDTH)),
    (r"^patch_size$", _at_most(8)),
    (
        r"hidden_size|d_model|n_embd|embed_?dim|embedding_size|emb_dim|projection_dim|_dim$|^dim$|_width$",
        _at_most(WIDTH),
    ),
    (r"sliding_window|local_attention$|window_length", _at_most(16)),
    (r"codebook_size|codevectors", _at_most(WIDTH)),
]
_LIST_DEPTHS = re.compile(r"depth|layers$|blocks$|num_.*repeats")
_LIST_WIDTHS = re.compile(r"hidden_size|embed_dim|channels|dims?$|widths?$|sizes$")
_TOKEN = re.compile(r"token_id$|token_index$|token_ids$|^(pad|bos|eos|sep|cls|mask)_.*id$")


def small_configs(cls: type) -> Iterator[Any]:
    """Yield small configurations of a class, the smallest first; raises what the class raises without arguments."""
    defaults = cls()
    for level in LEVELS:
        try:
            yield _small(defaults, level, {})
        except Exception as error:  # a configuration may refuse any combination, with any error
            last = error
            continue
        last = None
    if last is not None:
        raise last


def walk(config: Any) -> Iterator[Any]:
    """Yield a configuration and all within it."""
    yield config
    for name in type(config).sub_configs:
        inner = getattr(config, name, None)
        if hasattr(inner, "sub_configs"):
            yield from walk(inner)


def find(config: Any, names: str, default: Any) -> Any:
    """Return the first field of that name, of several between spaces, in a configuration or those within it."""
    for name in names.split():
        for each in walk(config):
            value = getattr(each, name, None)
            if value is not None:
                return value
    return default


def _small(defaults: Any, level: int, tokens: dict[str, int], *, whole: bool = False) -> Any:
    """Return a small configuration of the class of `defaults`; `tokens` are the special tokens given out so far.

    If it is `whole`, fields that stay as they are in `defaults` are given too, or else they are what the class says.
    """
    chosen: dict[str, Any] = {"use_cache": False} if hasattr(defaults, "use_cache") else {}
    for name in _fields(defaults):
        value = getattr(defaults, name, None)
        if hasattr(value, "sub_configs"):
            chosen[name] = _small(value, level, tokens, whole=level == 4)
        else:
            smaller = _smaller(name, value, level, tokens, defaults)
            if whole or smaller is not value:
                chosen[name] = smaller
    return type(defaults)(**chosen)


def _fields(config: Any) -> list[str]:
    if dataclasses.is_dataclass(config):
        return [field.name for field in dataclasses.fields(config) if field.init]
    return list(vars(config))


def _smaller(name: str, value: Any, level: int, tokens: dict[str, int], config: Any) -> Any:
    if "drop" in name and isinstance(value, int | float) and not isinstance(value, bool):
        return value if level == 3 else DROPOUT
    if isinstance(value, bool) or value is None:
        return value
    if _TOKEN.search(name):
        return _token(name, value, tokens)
    if isinstance(value, int):
        return _number(name, value, level)
    if isinstance(value, list | tuple) and value:
        return _sequence(name, value, level, config)
    if isinstance(value, dict) and level in _SMALL:
        return _rope(value)
    return value


def _number(name: str, value: int, level: int) -> int:
    for pattern, rule in _DEPTHS + (_WIDTHS if level != 2 else []):
        if re.search(pattern, name):
            return rule(value)
    return value


def _token(name: str, value: Any, tokens: dict[str, int]) -> Any:
    """Return a token within the vocabulary; fields of one name get one token."""
    if isinstance(value, list):
        return [_token(name, entry, tokens) for entry in value[:1]]
    if not isinstance(value, int) or value < 10:
        return value
    return tokens.setdefault(name, VOCABULARY - 1 - len(tokens))


def _sequence(name: str, value: Any, level: int, config: Any) -> Any:
    kind = type(value)
    if len(value) in _lengths(config) and len(value) > LAYERS and not _is_numbers(value):
        return kind(_distinct(value)[:LAYERS])
    if not _is_numbers(value):
        return value
    if _LIST_DEPTHS.search(name):
        return kind(min(entry, 1) for entry in value)
    if re.search("image_size|img_size", name):
        return kind(min(entry, IMAGE) for entry in value)
    if _LIST_WIDTHS.search(name) and level in _SMALL:
        return kind(max(8, entry // 4) if entry >= 32 else entry for entry in value)
    return value


def _is_numbers(value: Any) -> bool:
    return all(isinstance(entry, int) and not isinstance(entry, bool) for entry in value)


def _lengths(config: Any) -> set[int]:
    """Return the numbers of layers that a configuration speaks of: lists of such a length name a kind per layer."""
    return {
        value for name in _fields(config) if "layers" in name and isinstance(value := getattr(config, name, 0), int)
    }


def _distinct(value: Any) -> list[Any]:
    """Return the entries so that every kind comes as early as it can."""
    first: list[Any] = []
    for entry in value:
        if entry not in first:
            first.append(entry)
    return first + list(value)


def _rope(entry: dict[str, Any]) -> dict[str, Any]:
    """Return rotary settings whose sections fill a small head."""
    half = int(HEAD // 2 * entry.get("partial_rotary_factor", 1))
    outer = 3 * half // 8
    # Models that divide heads into sections have a default of their own, which only fits a large head.
    named = "mrope_section" in entry or "rope_theta" in entry
    sections = {"mrope_section": [half - 2 * outer, outer, outer]} if named else {}
    inner = {key: _rope(value) for key, value in entry.items() if isinstance(value, dict)}
    return {**entry, **inner, **sections}
