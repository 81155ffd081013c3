"""`torch.inference_mode()` inside of a model that trains: eager's bits, and the mode is left as it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from helpers.exactness import STEPS, assert_exact

pytestmark = pytest.mark.filterwarnings("ignore::lowtide.errors.LowtideWarning")


def mean_as_number(h: Tensor) -> Tensor:
    with torch.inference_mode():
        mean = float(h.detach().mean())
    return h * (1 + mean)


def mean_as_copy(h: Tensor) -> Tensor:
    with torch.inference_mode():
        mean = h.sin().mean(1, keepdim=True)
    return h * mean.clone()


def decorated(h: Tensor) -> Tensor:
    @torch.inference_mode()
    def scale(x: Tensor) -> Tensor:
        return x.abs().amax() + nn.functional.dropout(x, 0.5).mean()

    return h / scale(h.detach()).clone()


def switched_off(h: Tensor) -> Tensor:
    with torch.inference_mode(False):
        h = h.cos()
    with torch.inference_mode(True):
        largest = h.amax()
    return h + largest.clone()


class Net(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.head, self.between = nn.Linear(8, 8), nn.Linear(8, 8), between

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.head(self.between(torch.tanh(self.body(x))))).square().mean()


@pytest.mark.parametrize("between", [mean_as_number, mean_as_copy, decorated, switched_off])
def test_training_is_exact(between: Callable[[Tensor], Tensor]) -> None:
    batches = [((torch.randn(16, 8, generator=torch.Generator().manual_seed(s)),), {}) for s in range(STEPS)]
    assert_exact(Net(between), batches)
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()
