"""A language model of LSTM cells (Hochreiter and Schmidhuber 1997), unrolled: one set of weights at every step."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowtide.testing.models.common import Case, seeded

State = tuple[Tensor, Tensor]


class Cell(nn.Module):
    """One LSTM step, from one linear map of input and hidden state."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gates = nn.Linear(2 * dim, 4 * dim)

    def forward(self, x: Tensor, state: State) -> State:
        """Return the next hidden and cell state."""
        hidden, cell = state
        entry, forget, exit_, candidate = self.gates(torch.cat([x, hidden], -1)).chunk(4, -1)
        cell = forget.sigmoid() * cell + entry.sigmoid() * candidate.tanh()
        return exit_.sigmoid() * cell.tanh(), cell


class LSTM(nn.Module):
    """Stacked cells run token by token, with dropout between layers; returns the loss."""

    def __init__(self, vocab: int, layers: int, dim: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.cells = nn.ModuleList(Cell(dim) for _ in range(layers))
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(dim, vocab)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy of `targets`, given as (batch, time) like `tokens`."""
        embedded = self.embedding(tokens)
        zero = embedded.new_zeros(embedded.shape[0], embedded.shape[2])
        states: list[State] = [(zero, zero)] * len(self.cells)
        tops: list[Tensor] = []
        for x in embedded.unbind(1):
            for index, cell in enumerate(self.cells):
                states[index] = cell(x, states[index])
                x = self.dropout(states[index][0])
            tops.append(x)
        return F.cross_entropy(self.head(torch.stack(tops, 1)).flatten(0, 1), targets.flatten())


def lstm(
    *,
    layers: int = 2,
    dim: int = 256,
    tokens: int = 20,
    batch: int = 96,
    vocab: int = 256,
    dropout: float = 0.2,
    seed: int = 0,
) -> Case:
    """Return an unrolled LSTM, and a batch of random tokens and targets."""
    with seeded(seed):
        args = torch.randint(vocab, (batch, tokens)), torch.randint(vocab, (batch, tokens))
        return LSTM(vocab, layers, dim, dropout), args, {}
