"""A step of blocks counts the gradients of parameters, whether or not there are some to add them to already."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.measure import measure_peak

DIM = 96
ROWS = 8


class Stack(nn.Module):
    """Runs as many of its layers as it is told; Python between them cannot be traced."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(6))
        self.depth = 6
        if tied:
            for layer in list(self.layers)[1:]:
                layer.weight = self.layers[0].weight

    def part(self, layer: nn.Module, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return torch.sin(layer(x))

    def forward(self, x: Tensor) -> Tensor:
        for layer in list(self.layers)[: self.depth]:
            x = self.part(layer, x)
        return x.mean()


def wrapped(*, tied: bool = False) -> Stack:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return lowtide.wrap(Stack(tied=tied), budget=10_000_000, planner="greedy", costs="analytic")


def train(model: Stack, depth: int) -> None:
    model.depth = depth
    model(torch.ones(ROWS, DIM)).backward()


def predicted(model: Stack) -> int:
    return lowtide.plans(model)[0].peak_bytes


@pytest.mark.parametrize("first", [2, 5])
def test_a_sequence_first_seen_with_gradients_there_is_not_taken_to_need_less(first: int) -> None:
    model = wrapped()
    train(model, first)
    # The first call compiles blocks, and the second one is recorded.
    train(model, 6)
    train(model, 6)
    expected = predicted(model)
    model.zero_grad(set_to_none=True)
    assert measure_peak(lambda: train(model, 6)) <= expected


def test_gradients_of_one_parameter_in_several_blocks_are_added_up_as_before() -> None:
    alone, after = wrapped(tied=True), wrapped(tied=True)
    for _ in range(3):
        train(alone, 6)
        alone.zero_grad(set_to_none=True)
    for _ in range(3):
        train(after, 6)
    assert predicted(after) <= predicted(alone) + DIM * DIM * 4


def test_the_peak_of_a_first_micro_batch_is_known_from_later_ones() -> None:
    model = wrapped()
    for _ in range(4):
        train(model, 6)
    model.zero_grad(set_to_none=True)
    for _ in range(2):
        expected = predicted(model)
        assert measure_peak(lambda: train(model, 6)) <= expected
