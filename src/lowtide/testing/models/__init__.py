"""Models to train in tests and benchmarks, written here so that they need nothing but torch.

Every factory takes keyword sizes with CPU-friendly defaults and returns a `Case`: `(model, args, kwargs)`. Calling
`model(*args, **kwargs)` returns the loss, a tuple whose first entry is the loss, or a dict with the key `"loss"`;
`loss_of` finds it in all three. Weights and inputs depend on `seed` only, and the caller's random state is untouched.

```python
model, args, kwargs = MODELS["gpt"](layers=2)
loss_of(model(*args, **kwargs)).backward()
```
"""

from __future__ import annotations

from collections.abc import Callable

from lowtide.testing.models.common import Case, Output, loss_of, new_batch
from lowtide.testing.models.convolutions import densenet121, inception, resnet50, unet
from lowtide.testing.models.sequences import encoder_decoder, gpt, lstm, moe

MODELS: dict[str, Callable[..., Case]] = {
    "gpt": gpt,
    "resnet50": resnet50,
    "densenet121": densenet121,
    "unet": unet,
    "inception": inception,
    "encoder_decoder": encoder_decoder,
    "lstm": lstm,
    "moe": moe,
}

SMALL: dict[str, dict[str, int]] = {
    "gpt": {"layers": 2, "dim": 32, "heads": 2, "tokens": 16, "batch": 2, "vocab": 50},
    "resnet50": {"width": 8, "size": 32, "batch": 2},
    "densenet121": {"growth": 4, "size": 32, "batch": 2},
    "unet": {"width": 4, "size": 32, "batch": 2},
    "inception": {"width": 4, "size": 32, "batch": 2},
    "encoder_decoder": {"layers": 1, "dim": 32, "heads": 2, "tokens": 16, "batch": 2, "vocab": 50},
    "lstm": {"dim": 16, "tokens": 4, "batch": 2, "vocab": 50},
    "moe": {"layers": 2, "dim": 32, "heads": 2, "tokens": 16, "batch": 2, "vocab": 50},
}
"""Sizes for `MODELS` at which a training step takes milliseconds."""

__all__ = [
    "MODELS",
    "SMALL",
    "Case",
    "Output",
    "densenet121",
    "encoder_decoder",
    "gpt",
    "inception",
    "loss_of",
    "lstm",
    "moe",
    "new_batch",
    "resnet50",
    "unet",
]
