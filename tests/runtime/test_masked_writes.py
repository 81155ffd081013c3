"""`x[mask] = value` where the value needs a gradient: the graph ends there, and the bits are eager's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import lowtide
from helpers.exactness import STEPS, Batch, assert_exact

ROWS, DIM = 24, 16


class Writing(nn.Module):
    def __init__(self, write: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.write = write
        self.first, self.last, self.token = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), nn.Parameter(torch.randn(DIM))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        h = torch.dropout(torch.tanh(self.first(x)), 0.2, self.training)
        return torch.tanh(self.last(self.write(h, mask, self.token))).square().mean()


def rows(h: torch.Tensor, mask: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    h[mask] = token
    return h


def elements(h: torch.Tensor, mask: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    h[h.detach() > 0] = token[0]
    return h


def view(h: torch.Tensor, mask: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    h[:, : DIM // 2][mask] = token[: DIM // 2]
    return h


def reshaped(h: torch.Tensor, mask: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    h.view(ROWS, 4, -1)[mask] = token.view(4, -1)
    return h


def column(h: torch.Tensor, mask: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    h[mask, 1] = token[3]
    return h


def added(h: torch.Tensor, mask: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    h[mask] += token * 2
    return h


def put(h: torch.Tensor, mask: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    return h.index_put_((mask,), token.sin(), accumulate=True)


def put_copy(h: torch.Tensor, mask: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    return h.index_put(indices=(mask,), values=token.sin())


def batches() -> list[Batch]:
    made = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        made.append(((torch.randn(ROWS, DIM, generator=generator), torch.rand(ROWS, generator=generator) > 0.4), {}))
    return made


@pytest.mark.parametrize("write", [rows, elements, view, reshaped, column, added, put, put_copy])
def test_a_write_by_mask_ends_the_graph_and_is_exact(
    write: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    torch.manual_seed(0)
    model = assert_exact(Writing(write), batches())
    # A part that reads as many rows as the mask selects is compiled for every number of them.
    assert len(lowtide.plans(model)) >= 2


def constant(h: torch.Tensor, mask: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    h[mask] = 0.5
    return h * token


def numbered(h: torch.Tensor, mask: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    h[torch.arange(4)] = token
    return h


def kept(h: torch.Tensor, mask: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    h[mask] = token.detach()
    return h * token


@pytest.mark.parametrize("write", [constant, numbered, kept])
def test_other_writes_stay_in_one_graph(
    write: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    torch.manual_seed(0)
    model = assert_exact(Writing(write), batches())
    assert len(lowtide.plans(model)) == 1
