"""Branches on masks of floats, as in PyTorch's own transformers: one graph, with eager's choice at every call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from helpers.exactness import Batch, DropEverything, assert_exact, assert_same, train

pytestmark = pytest.mark.filterwarnings("ignore::lowtide.errors.LowtideWarning")

LOOSE: dict[str, Any] = {"budget": "1TiB", "costs": "analytic", "planner": DropEverything(again=True)}
ROWS, LENGTH, WIDTH = 3, 6, 8
CAUSAL = nn.Transformer.generate_square_subsequent_mask(LENGTH)
BANDED = CAUSAL.roll(1, 0)
PADDED = torch.tensor([[False] * 4 + [True] * 2] * ROWS)


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    """Forget earlier tests, which share code with the next one."""
    torch._dynamo.reset()


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.1, batch_first=True)
        self.parts = nn.TransformerEncoder(layer, 1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, padded: Any = None) -> torch.Tensor:
        result: torch.Tensor = self.parts(x, mask=mask, src_key_padding_mask=padded)
        return result.square().mean()


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, 2, 16, batch_first=True), 1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, padded: Any = None) -> torch.Tensor:
        result: torch.Tensor = self.parts(x, x.flip(0), tgt_mask=mask, tgt_key_padding_mask=padded)
        return result.square().mean()


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Transformer(WIDTH, 2, 1, 1, 16, batch_first=True)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, padded: Any = None) -> torch.Tensor:
        result: torch.Tensor = self.parts(x, x.flip(0), tgt_mask=mask, src_mask=mask, src_key_padding_mask=padded)
        return result.square().mean()


class InAutocast(Encoder):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, padded: Any = None) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x, mask, padded)


class OwnMask(Encoder):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", CAUSAL.clone())

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, padded: Any = None) -> torch.Tensor:
        return super().forward(x, self.get_buffer("mask"), padded)


def batches(*masks: torch.Tensor | None, padded: torch.Tensor | None = None) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [((torch.randn(ROWS, LENGTH, WIDTH, generator=generator), mask, padded), {}) for mask in masks]


MODELS = [Encoder, *(pytest.param(each, marks=pytest.mark.slow) for each in (Decoder, Both, InAutocast, OwnMask))]


@pytest.mark.parametrize("model", [Encoder, Decoder, Both, InAutocast, OwnMask])
def test_transformers_with_a_mask_are_one_graph(model: type[nn.Module]) -> None:
    wrapped = lowtide.wrap(model(), **LOOSE)
    wrapped(*batches(CAUSAL)[0][0]).backward()
    assert len(lowtide.plans(wrapped)) == 1


@pytest.mark.parametrize("model", MODELS)
def test_masks_that_change_between_calls(model: type[nn.Module]) -> None:
    assert_exact(model(), batches(CAUSAL, BANDED, None, CAUSAL))


@pytest.mark.parametrize("mask", [CAUSAL.isinf(), None], ids=["of booleans", "none"])
@pytest.mark.slow
def test_masks_with_padding(mask: torch.Tensor | None) -> None:
    assert_exact(Encoder(), batches(mask, mask, padded=PADDED))


class Asking(nn.Module):
    def __init__(self, ask: Callable[[nn.Module, torch.Tensor], bool]) -> None:
        super().__init__()
        self.first, self.norm, self.last, self.ask = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), ask

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        h = F.dropout(self.norm(self.first(x)), 0.3)
        return self.last(torch.tanh(h) if self.ask(self, mask) else torch.cos(h)).square().mean()


QUESTIONS: dict[str, Callable[[Any, torch.Tensor], bool]] = {
    "bool": lambda _, mask: bool((mask > 0).all()),
    "not": lambda _, mask: not mask.any(),
    "item": lambda _, mask: (mask > 0).all().item() is True,
    "two": lambda _, mask: bool(mask[0] > 0) and not bool(mask[1] > 0),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_questions_about_floats(question: str) -> None:
    model, plain = Asking(QUESTIONS[question]), Asking(QUESTIONS[question])
    plain.load_state_dict(model.state_dict())
    masks = [torch.ones(4), torch.tensor([1.0, 0, 1, 0]), torch.ones(4), torch.zeros(4)]
    steps: list[Batch] = [((torch.randn(4, 8), mask), {}) for mask in masks]
    wrapped = lowtide.wrap(model, **LOOSE)
    assert_same(train(plain, plain, steps), train(model, wrapped, steps))
    assert len(lowtide.plans(wrapped)) == 2


def test_statistics_that_the_call_has_written() -> None:
    """Batch normalisation does not say that it writes them: what a check reads before the call is another value."""

    def asks(model: Any, mask: torch.Tensor) -> bool:
        return bool(model.norm.running_mean.abs().sum() > mask.sum())

    steps: list[Batch] = [((torch.randn(4, 8), torch.full((4,), 1e-9)), {}) for _ in range(3)]
    assert_exact(Asking(asks), steps)


def test_a_question_in_autocast_is_asked_as_the_model_asks_it() -> None:
    """In 16 bits the sum is another one: a check outside of autocast would fail at every call."""

    class Summed(Asking):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x, mask)

    model = Summed(lambda _, mask: bool((mask[None] @ mask[:, None]).sum() == 4))
    steps: list[Batch] = [((torch.randn(4, 8), torch.full((4,), 1.001)), {}) for _ in range(2)]
    wrapped = lowtide.wrap(model, **LOOSE)
    for step in steps:
        wrapped(*step[0]).backward()
    assert len(lowtide.plans(wrapped)) == 1
    assert wrapped._compiled_call_impl.session.num_compiled == 1


@pytest.mark.parametrize(("width", "graphs"), [(1024, 1), (8, 2)])
def test_a_look_takes_at_most_what_the_gradients_take(width: int, graphs: int) -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow = nn.Linear(width, width), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            x = self.narrow(x)
            return (torch.tanh(x) if (mask + 1 > 1).all() else x).sum() + self.wide.weight.sum()

    wrapped = lowtide.wrap(Wide(), **LOOSE)
    wrapped(torch.randn(4, 8), torch.ones(700, 700)).backward()
    assert (len(lowtide.plans(wrapped)) > 1) == (graphs > 1)
